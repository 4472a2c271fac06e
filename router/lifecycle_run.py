"""One lifecycle running: performs its actions with real calls and feeds what happens back to it.

Events are handled where they arrive, one after another, so nothing queues between a worker's stream and the client's
outbox. The run owns its calls: however it ends, they have ended or are cancelled before `wait` returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from contextlib import suppress

from kvferry.errors import Internal, KvferryError, Unavailable, WorkerDraining
from kvferry.sequence_fields import set_fields
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.telemetry import log_event
from kvferry.wire import spec_to_pb
from proto.kvferry.v1 import worker_pb2
from router.calls import CallContext, DecodeCall, PrefillCall, WorkerCall
from router.events import (
    Action,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Emit,
    EmitPromptLogprobs,
    Event,
    Failed,
    Finished,
    MoveSource,
    NoWorkers,
    OpenDecode,
    OpenPrefill,
    PrefillDone,
    SendStop,
    SplitChoice,
    SplitChoices,
    StopFound,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import RequestLifecycle
from router.prepared_request import PreparedRequest
from router.prompt_logprobs import PromptLogprobProgress
from router.request_context import RequestContext
from router.selection import Needs, Pair
from router.tracing import AttemptSpans
from router.validation import num_blocks_needed
from router.worker import MemberState, Role, Worker

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""How long a retry waits for another worker before it takes one that failed it: time for a broken one to be noticed."""

CLOSING_GRACE_S = 0.25
"""After a good end, how long calls may take to end by themselves: the shipment's figures and overshoot come last."""


class LifecycleRun:
    """Runs the choices of one request, or the one it resumes: `start` and `wait`, once each."""

    def __init__(self, context: RequestContext, spans: AttemptSpans, resumes: SplitChoice | None = None) -> None:
        prepared = context.prepared
        self._context = context
        self._prepared = prepared
        self._cluster = context.cluster
        self._output = context.output
        self._ledger = context.ledger
        self._spans = spans
        self._lifecycle = RequestLifecycle(
            prepared.prompt_token_ids,
            prepared.sampling.max_tokens,
            num_choices=prepared.request.best_of,
            is_beam_search=prepared.request.beam is not None,
            resumes=resumes,
            attempts=context.attempts,
            local_prefill=context.cluster.workers.local_prefill,
            max_attempts=context.cluster.max_attempts,
            prompt_logprobs=None if resumes is not None else _prompt_logprobs(prepared),
            min_moved_tokens=context.cluster.min_moved_tokens,
        )
        self._pair = Pair(None, None)
        self._prefill: PrefillCall | None = None
        self._decode: DecodeCall | None = None
        self._calls: list[WorkerCall] = []
        self._waiting: asyncio.Task[None] | None = None
        self._queued_at_s = 0.0
        self._events: deque[Event] = deque()  # more than one only while an event's actions are performed
        self._handling = False
        self._ended = asyncio.Event()
        self._error: KvferryError | None = None
        self._phase = self._lifecycle.phase.name.lower()

    @property
    def phase(self) -> str:
        """Where the lifecycle is, or was when it ended; for metrics."""
        return self._phase

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def start(self) -> None:
        """Begins the first attempt, unless the request has ended."""
        if not self._lifecycle.ended:
            self._perform_all(self._lifecycle.start())
            self._handle_events()

    async def wait(self) -> None:
        """Returns when everything has ended, calls included; cancels them if it is cancelled itself."""
        try:
            await self._ended.wait()
        finally:
            await self._close()
            self._spans.end(self._error)

    def post(self, event: Event) -> None:
        """Takes one event and performs what follows from it."""
        if isinstance(event, Tokens):
            self._count_overshoot(event)
        elif isinstance(event, PrefillDone):
            self._count_move(event)
        if self._lifecycle.ended:
            return
        self._events.append(event)
        if not self._handling:
            self._handle_events()

    # --- events to actions ---

    def _handle_events(self) -> None:
        self._handling = True
        try:
            while self._events:
                if not self._lifecycle.ended:
                    self._phase = self._lifecycle.phase.name.lower()
                self._perform_all(self._lifecycle.handle(self._events.popleft()))
        except KvferryError as error:  # output made again that is not what the client has
            self._crashed(error)
        except Exception as error:
            logger.exception("request_failed", extra={"fields": {"request": self._prepared.id}})
            self._crashed(Internal(f"the router failed with {type(error).__name__}; its log has the details"))
        finally:
            self._handling = False
        if self._lifecycle.ended and not self._ended.is_set():
            self._ended.set()
            self._context.ended(self._error)

    def _crashed(self, error: KvferryError) -> None:
        """A fault of ours: a retry could lose tokens, so the request ends here."""
        self._events.clear()
        self._perform_all(self._lifecycle.handle(ClientGone(error)))
        self._error = self._error or error

    def _count_overshoot(self, event: Tokens) -> None:
        """After a stop string: what decode made before it heard of the stop."""
        is_ours = event.attempt == self._lifecycle.attempt and event.choice in self._lifecycle.choices
        if is_ours and self._output.stop_of(event.choice) is not None:
            self._ledger.num_overshoot_tokens += len(event.token_ids)

    def _count_move(self, event: PrefillDone) -> None:
        """Where a draining decode worker was in the place of prefill."""
        source, target = self._pair.prefill, self._pair.decode
        is_ours = event.attempt == self._lifecycle.attempt
        if not is_ours or source is None or target is None or source.role is Role.PREFILL:
            return
        self._cluster.count_move(event.num_blocks_shipped)
        log_event(
            logger,
            "sequence_moved",
            request=self._prepared.id,
            attempt=event.attempt,
            source=source.name,
            target=target.name,
            num_blocks=event.num_blocks_shipped,
        )

    def _perform_all(self, actions: list[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case ChooseWorkers():
                self._choose(action)
            case OpenDecode():
                self._open_decode(action)
            case OpenPrefill():
                self._open_prefill(action)
            case CancelPrefill() if self._prefill is not None:
                self._prefill.cancel()
            case CancelDecode() if self._decode is not None:
                self._decode.cancel()
            case SendStop() if self._decode is not None:
                self._decode.send_stop(action.choice, action.num_wanted_tokens)
            case EmitPromptLogprobs():
                self._output.push_prompt_logprobs(action.token_index, action.logprobs)
            case Emit():
                self._emit(action)
            case Finished():
                self._output.finish(action.choice, action.finish, action.cumulative_logprob)
            case SplitChoices(choices):
                self._spans.end(choices[0].cause)
                self._context.split(action, self._spans)
            case Failed():
                self._error = action.error

    def _emit(self, action: Emit) -> None:
        output, choice = self._output, action.choice
        output.push(choice, action.token_ids, action.logprobs)
        stop = output.stop_of(choice)
        if stop is not None:
            self._events.append(StopFound(output.num_tokens_of(choice), stop, choice))

    # --- workers ---

    def _choose(self, action: ChooseWorkers) -> None:
        self._spans.begin(action.attempt, action.cause)
        self._ledger.num_attempts += 1
        self._queued_at_s = time.monotonic()
        if action.cause is not None:
            self._cluster.count_retry(action.cause)
            is_free = action.is_resume or isinstance(action.cause, WorkerDraining)  # an order, and no storm of failures
            if not is_free and not self._cluster.retries.take():
                message = f"the retry budget is used up; the attempt before failed with: {action.cause.message}"
                self._events.append(NoWorkers(Unavailable(message, retry_after_s=1.0)))
                return
        try:
            self._chosen(self._try_choose(action, allow_excluded=False))
        except Unavailable as error:
            if action.cause is not None or action.is_resume:
                self._waiting = asyncio.create_task(self._wait_for_pair(action, error))
            else:
                self._events.append(NoWorkers(error))

    def _try_choose(self, action: ChooseWorkers, *, allow_excluded: bool) -> Pair:
        selector, needs, excluding = self._cluster.selector, self._needs(action), action.excluding
        source = None if action.source is None else self._source_of(action.source)
        if source is not None:
            others = dataclasses.replace(needs, prefill=False)
            target = selector.choose(others, excluding=excluding, allow_excluded=allow_excluded).decode
            if target is not source:
                return Pair(source, target)
        return selector.choose(needs, excluding=excluding, allow_excluded=allow_excluded)

    def _source_of(self, source: MoveSource) -> Worker | None:
        """The worker, where it lives the same life still."""
        workers = (worker for worker in self._cluster.workers.accepted if worker.address == source.worker)
        worker = next(workers, None)
        if worker is None or worker.status is None or worker.status.epoch != source.epoch:
            return None
        return worker if worker.state in (MemberState.DRAINING, MemberState.READY) else None

    def _needs(self, action: ChooseWorkers) -> Needs:
        served, prepared = self._cluster.workers.served, self._prepared
        if served is None:
            return Needs(prefill=action.needs_prefill, decode=action.needs_decode)
        num_prompt_tokens, layout = len(prepared.prompt_token_ids), served.layout
        num_known_tokens = num_prompt_tokens + self._lifecycle.num_emitted_tokens
        return Needs(
            prefill=action.needs_prefill,
            decode=action.needs_decode,
            num_prefill_blocks=layout.num_blocks_for(num_known_tokens),
            num_decode_blocks=num_blocks_needed(
                prepared.request, num_prompt_tokens, prepared.sampling.max_tokens, layout
            ),
            num_seats=1 if prepared.request.beam is None else prepared.request.beam.width,
            tenant=prepared.request.tenant,
            session=prepared.request.session,
            fields=set_fields(self._spec(1, prepared.prompt_token_ids[:1], computes_prompt=True)),
        )

    def _chosen(self, pair: Pair) -> None:
        self._pair = pair
        self._ledger.workers.update((worker.name, None) for worker in (pair.prefill, pair.decode) if worker is not None)
        is_move = pair.prefill is not None and pair.prefill.role is Role.DECODE
        self._spans.chosen(moved_from=pair.prefill.name if pair.prefill is not None and is_move else None)
        self._ledger.router_queue_s += time.monotonic() - self._queued_at_s
        names = [None if worker is None else worker.address for worker in (pair.prefill, pair.decode)]
        self.post(WorkersChosen(prefill=names[0], decode=names[1]))

    async def _wait_for_pair(self, action: ChooseWorkers, error: Unavailable) -> None:
        """Waits for a worker that has not failed this request; after a pause one that has will do.

        A client that has part of its answer waits up to `recovery_wait_s` for a worker to come back; one that has
        nothing yet is told soon, and may try again safely.
        """
        begin_s = time.monotonic()
        limit_s = self._cluster.recovery_wait_s if action.is_resume else 0.0
        pair = await self._pair_within(RETRY_PAUSE_S, action, allow_excluded=False)
        while pair is None:
            try:
                pair = self._try_choose(action, allow_excluded=True)
            except Unavailable as again:
                error = again
                rest_s = limit_s - (time.monotonic() - begin_s)
                if rest_s <= 0:
                    self.post(NoWorkers(error))
                    return
                pair = await self._pair_within(rest_s, action, allow_excluded=True)
        self._chosen(pair)

    async def _pair_within(self, timeout_s: float, action: ChooseWorkers, *, allow_excluded: bool) -> Pair | None:
        """A pair as soon as a change of the membership allows one; None after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._cluster.workers.wait_changed()
                    with suppress(Unavailable):
                        return self._try_choose(action, allow_excluded=allow_excluded)
        except TimeoutError:
            return None

    def _open_decode(self, action: OpenDecode) -> None:
        assert self._pair.decode is not None
        start = worker_pb2.DecodeStart(
            sequence=self._spec(action.attempt, action.token_ids, computes_prompt=action.local_prefill),
            local_prefill=action.local_prefill,
            progress_timeout_s=self._cluster.progress_timeout_s,
            min_moved_tokens=self._cluster.min_moved_tokens,
        )
        self._decode = DecodeCall(self._pair.decode, self._call_context(action.attempt), start)
        self._start_call(self._decode)

    def _open_prefill(self, action: OpenPrefill) -> None:
        assert self._pair.prefill is not None
        request = worker_pb2.PrefillRequest(
            sequence=self._spec(action.attempt, action.token_ids, computes_prompt=True),
            progress_timeout_s=self._cluster.progress_timeout_s,
        )
        if action.target is not None:
            request.target.address = action.target.address
            request.target.epoch = action.target.epoch
        self._prefill = PrefillCall(self._pair.prefill, self._call_context(action.attempt), request, self._pair.decode)
        self._start_call(self._prefill)

    def _start_call(self, call: WorkerCall) -> None:
        self._calls = [known for known in self._calls if not known.task.done()]
        self._calls.append(call)
        call.start()

    def _call_context(self, attempt: int) -> CallContext:
        return CallContext(
            request_id=self._prepared.id,
            attempt=attempt,
            parent=self._spans.context,
            timeout_s=self._prepared.rest_of_deadline_s,
            progress_timeout_s=self._cluster.progress_timeout_s,
            wants_logprobs=self._prepared.sampling.logprobs,
            post=self.post,
            ledger=self._ledger,
        )

    def _spec(self, attempt: int, token_ids: tuple[int, ...], *, computes_prompt: bool) -> worker_pb2.SequenceSpec:
        request, rest_s = self._prepared.request, self._prepared.rest_of_deadline_s
        choices = self._lifecycle.choices
        return spec_to_pb(
            SequenceSpec(
                id=AttemptId(self._prepared.id, attempt),
                token_ids=token_ids,
                num_prompt_tokens=len(self._prepared.prompt_token_ids),
                sampling=self._prepared.sampling,
                tier_rank=request.tier_rank,
                deadline_unix_ms=0 if rest_s is None else int((time.time() + rest_s) * 1000),
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                bypass_prefix_cache=request.bypass_prefix_cache,
                choice=choices[0],
                num_choices=len(choices) if request.beam is None else 1,
                beam=request.beam,
                tenant=request.tenant,
                shared_salt=request.shared_salt,
                prompt_scoring=self._lifecycle.prompt_scoring if computes_prompt else None,
            )
        )

    async def _close(self) -> None:
        """Lets calls end by themselves after a good end, cancels what is left, and waits for all."""
        tasks = [call.task for call in self._calls]
        try:
            if tasks and self._ended.is_set() and self._error is None:
                await asyncio.wait(tasks, timeout=CLOSING_GRACE_S)
        finally:
            rest = [task for task in (*tasks, self._waiting) if task is not None and not task.done()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)


def _prompt_logprobs(prepared: PreparedRequest) -> PromptLogprobProgress | None:
    """None where the request asks for none."""
    request = prepared.request
    if request.carries.num_prompt_logprobs is None:
        return None
    num_received = 0 if request.resume is None else request.resume.num_prompt_logprobs
    return PromptLogprobProgress(len(prepared.prompt_token_ids), request.carries.num_prompt_logprobs, num_received)
