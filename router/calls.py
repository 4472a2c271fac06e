"""The two calls of an attempt, each a task that owns its RPC: messages in become events, the end is always told.

A worker's stream that ends before its finish is a failure, never an end: a clean status alone means nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.context import Context

from kvferry.errors import Cancelled, Internal, KvferryError, TargetUnavailable, Unavailable
from kvferry.rpc import HeartbeatWriter, read_with_progress_deadline
from kvferry.sampling import TokenLogprob
from kvferry.telemetry import log_event
from kvferry.wire import finish_from_pb, logprob_from_pb
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from router.breaker import Verdict, verdict_on
from router.events import (
    BeamsFound,
    Committed,
    DecodeEnded,
    DecodeFailed,
    Event,
    FirstToken,
    Hypothesis,
    PrefillDone,
    PrefillFailed,
    PromptScored,
    Registered,
    Tokens,
)
from router.ledger import RequestLedger
from router.worker import Worker

logger = logging.getLogger(__name__)

HEARTBEATS_PER_TIMEOUT = 3


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call of an attempt is made with.

    Attributes:
        request_id: for the log.
        attempt: number of the attempt; its events carry it.
        parent: the attempt's span.
        timeout_s: rest of the client's deadline, None without one.
        progress_timeout_s: longest silence borne.
        wants_logprobs: every token must come with its log-probability.
        post: takes the events.
        ledger: takes the figures.
    """

    request_id: str
    attempt: int
    parent: Context
    timeout_s: float | None
    progress_timeout_s: float
    wants_logprobs: bool
    post: Callable[[Event], None]
    ledger: RequestLedger


class WorkerCall(ABC):
    """One call to one worker, running in a task of its own from `start` on."""

    def __init__(self, worker: Worker, context: CallContext) -> None:
        self._worker = worker
        self._context = context
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the call."""
        self._task = asyncio.create_task(self._run())

    @property
    def task(self) -> asyncio.Task[None]:
        assert self._task is not None
        return self._task

    def cancel(self) -> None:
        """Cancels the RPC; no event follows."""
        self.task.cancel()

    async def _run(self) -> None:
        try:
            with self._worker.used():
                await self._talk()
            self._worker.breaker.on_answer()
            return
        except KvferryError as error:
            failure = error
        except asyncio.CancelledError:
            if self.task.cancelling() > 0:
                raise
            # grpc.aio turns a status CANCELLED of the peer into this exception.
            failure = Cancelled(f"{self._worker.address} cancelled the call")
        except Exception as error:
            logger.exception("worker_call_failed", extra={"fields": {"worker": self._worker.name}})
            failure = Internal(f"the call to {self._worker.address} failed with {type(error).__name__}")
        self._judge(failure)
        log_event(
            logger,
            "attempt_call_failed",
            level=logging.WARNING,
            request=self._context.request_id,
            worker=self._worker.name,
            address=self._worker.address,
            role=self._worker.role.value,
            attempt=self._context.attempt,
            error=failure.message,
        )
        self._context.post(self._failed(failure))

    def _judge(self, failure: KvferryError) -> None:
        """A stream that brought tokens and then broke is a fault too: what came before does not excuse it."""
        verdict = verdict_on(failure)
        if verdict is Verdict.ANSWER:
            self._worker.breaker.on_answer()
        elif verdict is Verdict.FAULT:
            _count_fault(self._worker, failure)

    def _wanted_logprobs(self, logprobs: tuple[TokenLogprob, ...], num_tokens: int) -> tuple[TokenLogprob, ...]:
        """One a token, or none where they were not asked for; raises Internal where some are missing."""
        if not self._context.wants_logprobs:
            return ()
        if len(logprobs) != num_tokens:
            raise Internal(f"{self._worker.address} sent {num_tokens} tokens with {len(logprobs)} log-probabilities")
        return logprobs

    def _ended_early(self) -> Unavailable:
        return Unavailable(f"{self._worker.address} ended the call before its finish")

    @abstractmethod
    async def _talk(self) -> None:
        """The RPC from its opening to its end; raises what ended it before its finish."""

    @abstractmethod
    def _failed(self, error: KvferryError) -> Event:
        """The event that tells of the failure."""


def _count_fault(worker: Worker, failure: KvferryError) -> None:
    if worker.breaker.on_fault(time.monotonic()):
        log_event(
            logger,
            "breaker_open",
            level=logging.WARNING,
            worker=worker.name,
            role=worker.role.value,
            address=worker.address,
            error=failure.message,
        )


class PrefillCall(WorkerCall):
    """One attempt's prefill; `target` is the decode worker it ships to."""

    def __init__(
        self, worker: Worker, context: CallContext, request: worker_pb2.PrefillRequest, target: Worker | None
    ) -> None:
        super().__init__(worker, context)
        self._request = request
        self._target = target

    async def _talk(self) -> None:
        context, channel = self._context, self._worker.channel
        method = worker_pb2_grpc.PrefillServiceStub(channel.grpc).Prefill
        done = False
        async with channel.stream(method, self._request, timeout_s=context.timeout_s, parent=context.parent) as call:
            while True:
                message = await read_with_progress_deadline(call, context.progress_timeout_s, self._worker.address)
                if message is None:
                    break
                done = self._take(message) or done
        if not done:
            raise self._ended_early()

    def _take(self, message: worker_pb2.PrefillResponse) -> bool:
        """Whether this was the last message."""
        self._context.ledger.take_prefill(message)
        attempt = self._context.attempt
        match message.WhichOneof("event"):
            case "prompt_logprobs":
                self._context.post(_prompt_scored(attempt, message.prompt_logprobs))
            case "first_token":
                self._take_first_token(message.first_token)
            case "done":
                self._context.post(PrefillDone(attempt, message.done.num_blocks_shipped))
                return True
        return False

    def _take_first_token(self, first: worker_pb2.FirstToken) -> None:
        logprobs = self._wanted_logprobs((logprob_from_pb(first.logprob),) if first.HasField("logprob") else (), 1)
        self._context.post(
            FirstToken(
                self._context.attempt,
                first.token_index,
                first.token_id,
                finish=finish_from_pb(first.finish) if first.HasField("finish") else None,
                choice=first.choice,
                logprob=logprobs[0] if logprobs else None,
            )
        )

    def _judge(self, failure: KvferryError) -> None:
        """A shipment that does not get through is its receiver's fault: that its calls live says nothing of it."""
        super()._judge(failure)
        if isinstance(failure, TargetUnavailable) and self._target is not None:
            _count_fault(self._target, failure)

    def _failed(self, error: KvferryError) -> Event:
        return PrefillFailed(self._context.attempt, error)


class DecodeCall(WorkerCall):
    """One attempt's decode."""

    def __init__(self, worker: Worker, context: CallContext, start: worker_pb2.DecodeStart) -> None:
        super().__init__(worker, context)
        self._start = start
        self._stop_tasks: list[asyncio.Task[None]] = []  # at most one a choice
        self._writer: HeartbeatWriter[worker_pb2.DecodeRequest] | None = None

    def send_stop(self, choice: int, num_wanted_tokens: int) -> None:
        """Asks the worker to end a choice; after the last one its stream ends by itself."""
        stop = worker_pb2.DecodeStop(choice=choice, num_wanted_tokens=num_wanted_tokens)
        self._stop_tasks.append(asyncio.create_task(self._write_stop(worker_pb2.DecodeRequest(stop=stop))))

    async def _write_stop(self, stop: worker_pb2.DecodeRequest) -> None:
        assert self._writer is not None
        try:
            await self._writer.write(stop)
        except Exception as error:  # noqa: BLE001 - the stream has ended or will be cancelled: what a stop is for
            log_event(logger, "stop_not_sent", level=logging.DEBUG, error=type(error).__name__)

    async def _talk(self) -> None:
        context, channel = self._context, self._worker.channel
        method = worker_pb2_grpc.DecodeServiceStub(channel.grpc).Decode
        finished = False
        async with channel.duplex(method, timeout_s=context.timeout_s, parent=context.parent) as call:
            writer = HeartbeatWriter(
                call.write,
                lambda: worker_pb2.DecodeRequest(heartbeat=worker_pb2.Heartbeat()),
                interval_s=context.progress_timeout_s / HEARTBEATS_PER_TIMEOUT,
                stall_timeout_s=context.progress_timeout_s,
                peer=self._worker.address,
            )
            async with writer as self._writer:
                await writer.write(worker_pb2.DecodeRequest(start=self._start))
                while True:
                    message = await read_with_progress_deadline(call, context.progress_timeout_s, self._worker.address)
                    if message is None:
                        break
                    finished = self._take(message) or finished
        if not finished and not self._stop_tasks:
            raise self._ended_early()
        context.post(DecodeEnded(context.attempt))

    def _take(self, message: worker_pb2.DecodeResponse) -> bool:
        """Whether this message ended a choice."""
        self._context.ledger.take_decode(message)
        attempt = self._context.attempt
        match message.WhichOneof("event"):
            case "registered":
                registered = message.registered
                self._context.post(
                    Registered(attempt, registered.epoch, registered.ship_address, registered.keeps_blocks)
                )
            case "committed":
                self._context.post(Committed(message.committed.attempt))
            case "prompt_logprobs":
                self._context.post(_prompt_scored(attempt, message.prompt_logprobs))
            case "tokens":
                return self._take_tokens(message.tokens)
            case "beams":
                self._context.post(BeamsFound(attempt, tuple(map(_hypothesis, message.beams.beams))))
                return True
        return False

    def _take_tokens(self, tokens: worker_pb2.DecodeTokens) -> bool:
        token_ids = tuple(tokens.token_ids)
        logprobs = self._wanted_logprobs(tuple(map(logprob_from_pb, tokens.logprobs)), len(token_ids))
        finish = finish_from_pb(tokens.finish) if tokens.HasField("finish") else None
        attempt = self._context.attempt
        self._context.post(Tokens(attempt, tokens.token_index, token_ids, finish, tokens.choice, logprobs))
        return finish is not None

    def _failed(self, error: KvferryError) -> Event:
        return DecodeFailed(self._context.attempt, error)


def _prompt_scored(attempt: int, message: types_pb2.PromptLogprobs) -> PromptScored:
    return PromptScored(attempt, message.token_index, tuple(map(logprob_from_pb, message.logprobs)))


def _hypothesis(beam: worker_pb2.Beam) -> Hypothesis:
    return Hypothesis(tuple(beam.token_ids), finish_from_pb(beam.finish), beam.cumulative_logprob)
