"""The decode worker's calls. Decode owns one attempt: its registration, its blocks and its tokens.

    Start ─► register ─► Registered ─► (shipment arrives, `attempt.py`) ─► Committed ─► tokens ─► finish
                    └─ local prefill: the sequence goes straight into the queue and computes its own prompt

Whatever ends the call (finish, stop, cancel, a silent router) ends the attempt: first its receiving end is closed, then
its blocks are freed, between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from decode_svc.admission import DecodeAdmission
from decode_svc.attempt import DecodeAttempt
from decode_svc.report import DecodeReporter
from engine.constraint import Constraint, Constraints
from engine.loop import EngineLoop
from engine.mailboxes import Mailboxes
from engine.outputs import GrantMade
from engine.specs import sequence_from_spec
from kvferry.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvferry.moves import MovedSequences, is_worth_moving
from kvferry.rpc import HeartbeatWriter, read_with_progress_deadline
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.stats import ShipCounters
from kvferry.tasks import run_until_first
from kvferry.telemetry import Telemetry
from kvferry.wire import spec_from_pb
from kvferry.worker import WorkerIdentity, WorkerState, check_progress_timeout
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

    Context = ServicerContext[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse]


START_TIMEOUT_S = 10.0
"""How long a call may stay open without saying what it wants."""


class Report(NamedTuple):
    """What a running attempt was asked for, and what it has told."""

    start: worker_pb2.DecodeStart
    reporter: DecodeReporter


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """Decode calls of one worker.

    Args:
        engine: the step loop.
        constraints: opens those of the calls.
        admission: registrations and grants; touched on the engine's thread only.
        mailboxes: where the engine's outputs arrive.
        identity: who this is.
        state: draining or not.
        moves: takes what is worth moving from here.
        telemetry: spans.
        is_alive: False while the step loop is stuck; no heartbeat is sent then.
    """

    def __init__(
        self,
        engine: EngineLoop,
        constraints: Constraints,
        admission: DecodeAdmission,
        mailboxes: Mailboxes,
        identity: WorkerIdentity,
        state: WorkerState,
        moves: MovedSequences,
        telemetry: Telemetry,
        is_alive: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._constraints = constraints
        self._admission = admission
        self._mailboxes = mailboxes
        self._identity = identity
        self._state = state
        self._moves = moves
        self._telemetry = telemetry
        self._is_alive = is_alive
        self._attempts: dict[AttemptId, DecodeAttempt] = {}
        self._reports: dict[AttemptId, Report] = {}  # of those attempts whose blocks are kept when they move
        self._num_arrived = 0
        self.counters = ShipCounters()
        self.ship_address = ""  # set once the server is bound

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def attempt(self, attempt_id: AttemptId) -> DecodeAttempt:
        """The registered attempt; raises NotFound when there is none (any more)."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            raise NotFound(f"attempt {attempt_id.seq_id} is not registered with worker {self._identity.worker_id}")
        return attempt

    async def Decode(  # type: ignore[override]  # a coroutine that writes
        self, _requests: AsyncIterator[worker_pb2.DecodeRequest], context: Context
    ) -> None:
        received_ns = time.time_ns()
        start = await self._read_start(context)
        timeout_s, spec = start.progress_timeout_s, spec_from_pb(start.sequence)
        constraint = await self._constraints.open(spec.sampling)
        keeps_blocks = start.min_moved_tokens > 0 and self._leaves_blocks(spec)
        async with (
            HeartbeatWriter(
                context.write, self._heartbeat, interval_s=timeout_s / 3, stall_timeout_s=timeout_s, peer="the router"
            ) as writer,
            self._registered(spec, constraint, is_local=start.local_prefill) as attempt,
        ):
            registered = worker_pb2.Registered(
                epoch=self._identity.epoch, ship_address=self.ship_address, keeps_blocks=keeps_blocks
            )
            await writer.write(worker_pb2.DecodeResponse(registered=registered))
            choices = range(spec.choice, spec.choice + spec.num_choices)
            reporter = DecodeReporter(self._telemetry, attempt.id, received_ns=received_ns, choices=choices)
            listening = self._listen(context, timeout_s, attempt, reporter)
            if keeps_blocks:
                self._reports[attempt.id] = Report(start, reporter)
            try:
                await run_until_first(self._report(attempt, reporter, writer), listening)
            finally:
                self._reports.pop(attempt.id, None)

    def _leaves_blocks(self, spec: SequenceSpec) -> bool:
        """Whether the full blocks of its choices can be hit here when it has ended."""
        uses_cache = self._engine.core.block_manager.prefix_caching and not spec.bypass_prefix_cache
        return uses_cache and spec.beam is None  # the tokens of beams are nobody's but ours

    def keep_moved(self) -> None:
        """The calls that run end next: keeps the choices that their routers will have shipped from here."""
        for attempt_id, (start, reporter) in self._reports.items():
            for choice, num_tokens in reporter.num_told_tokens.items():
                if is_worth_moving(num_tokens, start.sequence.sampling.max_tokens, start.min_moved_tokens):
                    self._moves.keep(attempt_id.request_id, choice, start.progress_timeout_s)

    async def _read_start(self, context: Context) -> worker_pb2.DecodeStart:
        self._state.check_admits(self._identity)
        first = await read_with_progress_deadline(context, START_TIMEOUT_S, "the router")
        if first is None or first.WhichOneof("event") != "start":
            raise InvalidArgument("event", "the first message of Decode must be `start`")
        check_progress_timeout("start.progress_timeout_s", first.start.progress_timeout_s)
        return first.start

    def _heartbeat(self) -> worker_pb2.DecodeResponse:
        if not self._is_alive():
            raise Unavailable("the step loop is stuck")
        return worker_pb2.DecodeResponse(heartbeat=worker_pb2.Heartbeat())

    @asynccontextmanager
    async def _registered(
        self, spec: SequenceSpec, constraint: Constraint | None, *, is_local: bool
    ) -> AsyncIterator[DecodeAttempt]:
        """The attempt in the books for the length of the block."""
        if spec.id in self._attempts:
            raise FailedPrecondition(f"attempt {spec.id.seq_id} is registered already")
        self._num_arrived += 1
        seq_id, arrival = spec.id.seq_id, self._num_arrived
        outputs = self._mailboxes.open(seq_id)
        attempt = DecodeAttempt(
            spec.id,
            len(spec.token_ids),
            self._engine,
            self._admission,
            outputs,
            self.counters,
            self._telemetry,
        )
        self._attempts[spec.id] = attempt
        sequence = sequence_from_spec(spec, self._engine.core, arrival=arrival, constraint=constraint)
        try:
            if is_local:
                await self._engine.run(lambda core: core.add(sequence))
            else:
                await self._engine.run(lambda core: self._admission.register(sequence))
            yield attempt
        finally:
            attempt.close()
            self._mailboxes.close(seq_id)
            loop = asyncio.get_running_loop()
            removed = self._engine.submit(lambda core: self._admission.unregister(seq_id))
            # Until then outputs may be on their way, which another call of this name must not get.
            removed.add_done_callback(lambda _: loop.call_soon_threadsafe(self._attempts.pop, spec.id))

    async def _report(
        self,
        attempt: DecodeAttempt,
        reporter: DecodeReporter,
        writer: HeartbeatWriter[worker_pb2.DecodeResponse],
    ) -> None:
        """Writes what the engine says, all of it that is there in one message, until the sequence ends."""
        with reporter:
            while not reporter.is_finished:
                outputs = [await attempt.outputs.get()]
                while not attempt.outputs.empty():
                    outputs.append(attempt.outputs.get_nowait())
                if any(isinstance(output, GrantMade) for output in outputs):
                    attempt.on_grant_made()
                for response in reporter.responses(outputs):
                    await writer.write(response)

    async def _listen(
        self, context: Context, timeout_s: float, attempt: DecodeAttempt, reporter: DecodeReporter
    ) -> None:
        """Ends choices the router has enough of, returns with the last one; raises when it is gone or silent."""
        while True:
            message = await read_with_progress_deadline(context, timeout_s, "the router")
            if message is None:
                raise Cancelled("the router closed the stream")
            if message.WhichOneof("event") == "stop":
                self._stop_choice(attempt, message.stop.choice)
                reporter.end_choice(message.stop.choice)
                if reporter.is_finished:
                    return
            if message.WhichOneof("event") == "start":
                raise InvalidArgument("event", "a second `start`")

    def _stop_choice(self, attempt: DecodeAttempt, choice: int) -> None:
        seq_id = attempt.id.seq_id
        self._engine.submit(lambda _: self._admission.stop_choice(seq_id, choice))
