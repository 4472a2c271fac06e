"""One request running: performs the lifecycle's actions with real calls and feeds what happens back to it.

Events are handled where they arrive, one after another, so nothing queues between a worker's stream and the client's
outbox. The run owns its calls: however it ends, they have ended or are cancelled before it returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from kvferry.errors import DeadlineExceeded, Internal, KvferryError, Unavailable
from kvferry.sampling import Finish, SamplingParams
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.wire import spec_to_pb
from proto.kvferry.v1 import worker_pb2
from router.admission import RetryBudget
from router.calls import CallContext, DecodeCall, PrefillCall, WorkerCall
from router.events import (
    Abort,
    Action,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Emit,
    Event,
    Failed,
    Finished,
    NoWorkers,
    OpenDecode,
    OpenPrefill,
    SendStop,
    StopFound,
    TimeLimit,
    Tokens,
    WorkersChosen,
)
from router.ledger import RequestLedger
from router.lifecycle import RequestLifecycle
from router.membership import Membership
from router.output import ChoiceOutput
from router.selection import Needs, Pair, PairSelector
from router.tracing import AttemptSpans
from router.validation import Request

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""How long a retry waits for another worker before it takes one that failed it: time for a broken one to be noticed."""

CLOSING_GRACE_S = 0.25
"""After a good end, how long calls may take to end by themselves: the shipment's figures and overshoot come last."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What all runs share.

    Attributes:
        membership: the workers.
        selector: chooses pairs.
        retries: budget for attempts without progress.
        progress_timeout_s: longest silence of a worker's stream.
        recovery_wait_s: how long a request whose tokens are under way waits for a worker to come back.
        max_attempts: attempts in a row without progress.
        tracer: makes the attempts' spans.
        count_retry: called with the error that made an attempt necessary.
    """

    membership: Membership
    selector: PairSelector
    retries: RetryBudget
    progress_timeout_s: float
    recovery_wait_s: float
    max_attempts: int
    tracer: Tracer
    count_retry: Callable[[KvferryError], None]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to run.

    Attributes:
        id: made by the router, unique for ever.
        deadline_s: when the client's call ends, in `time.monotonic()`; None for never.
    """

    id: str
    request: Request
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float | None


class RequestRun:
    """Runs one request to its end; `run` once."""

    def __init__(
        self, prepared: PreparedRequest, cluster: Cluster, output: ChoiceOutput, ledger: RequestLedger, parent: Context
    ) -> None:
        self._prepared = prepared
        self._cluster = cluster
        self._output = output
        self._ledger = ledger
        self._spans = AttemptSpans(cluster.tracer, parent)
        self._lifecycle = RequestLifecycle(
            prepared.prompt_token_ids,
            prepared.sampling.max_tokens,
            local_prefill=cluster.membership.local_prefill,
            max_attempts=cluster.max_attempts,
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
        self.finish: Finish | None = None

    @property
    def prepared(self) -> PreparedRequest:
        return self._prepared

    @property
    def names(self) -> tuple[str, str]:
        """What an abort may call it: its id and its caller's label."""
        return (self._prepared.id, self._prepared.request.label)

    @property
    def phase(self) -> str:
        """Where the request is, or was when it ended; for metrics."""
        return self._phase

    async def run(self) -> Finish:
        """Serves the request; returns how its choice ended. Raises the error that ended it otherwise."""
        timers = self._start_timers()
        try:
            self._perform_all(self._lifecycle.start())
            self._handle_events()
            await self._ended.wait()
        finally:
            for timer in timers:
                timer.cancel()
            await self._close()
            self._spans.end(self._error)
        if self._error is not None:
            raise self._error
        assert self.finish is not None
        return self.finish

    def abort(self) -> None:
        """Ends the request with what there is."""
        self.post(Abort())

    def client_gone(self, error: KvferryError) -> None:
        """Cancels everything, within this call."""
        self.post(ClientGone(error))

    def post(self, event: Event) -> None:
        """Takes one event and performs what follows from it."""
        if self._lifecycle.ended:
            self._take_late(event)
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
        except Exception as error:
            logger.exception("request_failed", extra={"fields": {"request": self._prepared.id}})
            self._crashed(Internal(f"the router failed with {type(error).__name__}; its log has the details"))
        finally:
            self._handling = False

    def _crashed(self, error: KvferryError) -> None:
        """A fault of ours: a retry could lose tokens, so the request ends here."""
        self._events.clear()
        self._perform_all(self._lifecycle.handle(ClientGone(error)))
        self._error = self._error or error
        self._ended.set()

    def _take_late(self, event: Event) -> None:
        """After the end only overshoot is of interest: what decode made before it heard of the stop."""
        if isinstance(event, Tokens) and self._output.stop is not None and event.attempt == self._lifecycle.attempt:
            self._ledger.num_overshoot_tokens += len(event.token_ids)

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
                self._decode.send_stop(action.num_wanted_tokens)
            case Emit():
                self._emit(action)
            case Finished():
                self.finish = self._output.finish(action.finish)
                self._ended.set()
            case Failed():
                self._error = action.error
                self._ended.set()

    def _emit(self, action: Emit) -> None:
        self._ledger.tokens_sent()
        self._output.push(action.token_ids)
        self._ledger.num_overshoot_tokens = self._output.num_overshoot_tokens
        if self._output.stop is not None:
            self._events.append(StopFound(self._output.num_tokens, self._output.stop))

    # --- workers ---

    def _choose(self, action: ChooseWorkers) -> None:
        self._spans.begin(action.attempt, action.cause)
        self._ledger.num_attempts = action.attempt
        self._queued_at_s = time.monotonic()
        if action.cause is not None:
            self._cluster.count_retry(action.cause)
            if not action.is_resume and not self._cluster.retries.take():
                message = f"the retry budget is used up; the attempt before failed with: {action.cause.message}"
                self._events.append(NoWorkers(Unavailable(message, retry_after_s=1.0)))
                return
        try:
            self._chosen(self._try_choose(action, allow_excluded=False))
        except Unavailable as error:
            if action.cause is None:
                self._events.append(NoWorkers(error))
            else:
                self._waiting = asyncio.create_task(self._wait_for_pair(action, error))

    def _try_choose(self, action: ChooseWorkers, *, allow_excluded: bool) -> Pair:
        return self._cluster.selector.choose(
            self._needs(action), excluding=action.excluding, allow_excluded=allow_excluded
        )

    def _needs(self, action: ChooseWorkers) -> Needs:
        num_prompt_tokens, served = len(self._prepared.prompt_token_ids), self._cluster.membership.served
        num_known_tokens = num_prompt_tokens + self._lifecycle.num_emitted_tokens
        num_last_tokens = num_prompt_tokens + self._prepared.sampling.max_tokens - 1  # the last one's KV is not kept
        return Needs(
            prefill=action.needs_prefill,
            decode=action.needs_decode,
            num_prefill_blocks=served.layout.num_blocks_for(num_known_tokens) if served else 0,
            num_decode_blocks=served.layout.num_blocks_for(num_last_tokens) if served else 0,
        )

    def _chosen(self, pair: Pair) -> None:
        self._pair = pair
        self._spans.chosen()
        self._ledger.router_queue_s += time.monotonic() - self._queued_at_s
        names = [None if worker is None else worker.address for worker in (pair.prefill, pair.decode)]
        self.post(WorkersChosen(prefill=names[0], decode=names[1]))

    async def _wait_for_pair(self, action: ChooseWorkers, error: Unavailable) -> None:
        """Waits for a worker that has not failed this request; after a pause one that has will do.

        A client that has part of its answer waits up to `recovery_wait_s` for a worker to come back; one that has
        nothing yet is told soon, and may try again safely.
        """
        begin_s = time.monotonic()
        limit_s = self._cluster.recovery_wait_s if self._lifecycle.num_emitted_tokens > 0 else 0.0
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
                    await self._cluster.membership.wait_changed()
                    with suppress(Unavailable):
                        return self._try_choose(action, allow_excluded=allow_excluded)
        except TimeoutError:
            return None

    def _open_decode(self, action: OpenDecode) -> None:
        assert self._pair.decode is not None
        start = worker_pb2.DecodeStart(
            sequence=self._spec(action.attempt, action.token_ids),
            local_prefill=action.local_prefill,
            progress_timeout_s=self._cluster.progress_timeout_s,
        )
        self._decode = DecodeCall(self._pair.decode, self._call_context(action.attempt), start)
        self._start_call(self._decode)

    def _open_prefill(self, action: OpenPrefill) -> None:
        assert self._pair.prefill is not None
        request = worker_pb2.PrefillRequest(
            sequence=self._spec(action.attempt, action.token_ids),
            progress_timeout_s=self._cluster.progress_timeout_s,
        )
        if action.target is not None:
            request.target.address = action.target.address
            request.target.epoch = action.target.epoch
        self._prefill = PrefillCall(self._pair.prefill, self._call_context(action.attempt), request)
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
            timeout_s=self._rest_of_deadline_s(),
            progress_timeout_s=self._cluster.progress_timeout_s,
            post=self.post,
            ledger=self._ledger,
        )

    def _spec(self, attempt: int, token_ids: tuple[int, ...]) -> worker_pb2.SequenceSpec:
        request, rest_s = self._prepared.request, self._rest_of_deadline_s()
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
            )
        )

    def _rest_of_deadline_s(self) -> float | None:
        deadline_s = self._prepared.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    # --- time and end ---

    def _start_timers(self) -> list[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        rest_s = self._rest_of_deadline_s()
        if rest_s is not None:
            error = DeadlineExceeded("the call's deadline passed before the request ended")
            timers.append(loop.call_later(rest_s, self.client_gone, error))
        limit_s = self._prepared.request.time_limit_s
        if limit_s is not None:
            spent_s = time.monotonic() - self._ledger.received_at_s
            timers.append(loop.call_later(max(0.0, limit_s - spent_s), self.post, TimeLimit()))
        return timers

    async def _close(self) -> None:
        """Lets calls end by themselves after a good end, cancels what is left, and waits for all."""
        tasks = [call.task for call in self._calls]
        try:
            if tasks and self.finish is not None:
                await asyncio.wait(tasks, timeout=CLOSING_GRACE_S)
        finally:
            rest = [task for task in (*tasks, self._waiting) if task is not None and not task.done()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
