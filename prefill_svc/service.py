"""The call of a worker that ships. Prefill owns one attempt: its sequence, its blocks and its shipment.

    request ─► queue by tier ─► chunks, each shipped while the next computes ─► first token ─► commit ─► done

`task.py` decides, this shell performs. Whatever ends the call ends the shipment first, which reads the blocks, and then
frees them, between two steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry.trace import Span

from engine.constraint import Constraint, Constraints
from engine.loop import EngineLoop
from engine.mailboxes import Mailboxes
from engine.outputs import ChunkComputed, Output, SequenceStarted
from engine.sequence import Sequence
from engine.specs import sequence_from_spec
from kvferry.errors import FailedPrecondition, InvalidArgument, KvferryError, Unavailable
from kvferry.rpc import HeartbeatWriter
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.stats import ShipCounters
from kvferry.tasks import run_until_first
from kvferry.telemetry import Attributes, SpanNames, Telemetry, context_of
from kvferry.wire import finish_to_pb, logprob_to_pb, prompt_logprobs_to_pb, spec_from_pb
from kvferry.worker import check_progress_timeout
from kvtransfer.budget import ShipRank
from kvtransfer.faults import CommittedFault, log_fault
from kvtransfer.grpc_transport import GrpcShipment
from kvtransfer.messages import Offer
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.transport import FirstToken, SendOptions, ShipEvent, TokensComputed
from prefill_svc.peers import DecodePeers
from prefill_svc.task import (
    CancelShipment,
    FailAttempt,
    OpenShipment,
    PrefillTask,
    ReportDone,
    ReportFirstToken,
    ReportPromptComputed,
    ReportPromptLogprobs,
    ShipFirstTokens,
    ShipRestored,
    ShipTokens,
    TaskAction,
)
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

    Context = ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse]
    Writer = HeartbeatWriter[worker_pb2.PrefillResponse]


class PoolSource:
    """Reads a sequence's blocks where they lie (`kvtransfer.transport.BlockSource`).

    `restored` is set when the sequence was parked and is computed again, with another block table. From `secure` on the
    table is complete, as far as it is read, and stays until the call ends.
    """

    def __init__(self, engine: EngineLoop, sequence: Sequence, restored: asyncio.Event, telemetry: Telemetry) -> None:
        self._engine = engine
        self._runner = engine.core.runner
        self._pool = engine.core.pool
        self._sequence = sequence
        self._restored = restored
        self._telemetry = telemetry

    async def secure(self) -> None:
        if self._sequence.hold.secure():
            return
        with self._telemetry.span(SpanNames.RESTORE):
            await self._engine.run(lambda core: core.recall(self._sequence))
            await self._restored.wait()

    def read(self, block_index: int, num_tokens: int) -> bytes | memoryview:
        block_id = self._sequence.block_table[block_index]
        if num_tokens < self._runner.layout.block_size:
            return self._runner.copy_partial(block_id, num_tokens)
        return self._runner.block_view(block_id)

    def digest(self, block_index: int) -> bytes | None:
        return self._pool.digest(self._sequence.block_table[block_index])


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """Prefill calls of one worker.

    Args:
        engine: the step loop; its scheduler preempts no sequence that is held, or will be.
        constraints: opens those of the calls.
        mailboxes: where the engine's outputs arrive.
        peers: channels to decode workers.
        admit: raises what keeps this worker from taking an attempt.
        telemetry: spans.
        options: how shipments are sent.
        is_alive: False while the step loop is stuck; no heartbeat is sent then.
    """

    def __init__(
        self,
        engine: EngineLoop,
        constraints: Constraints,
        mailboxes: Mailboxes,
        peers: DecodePeers,
        admit: Callable[[SequenceSpec], None],
        telemetry: Telemetry,
        options: SendOptions,
        is_alive: Callable[[], bool],
    ) -> None:
        self.engine = engine
        self.constraints = constraints
        self.mailboxes = mailboxes
        self.peers = peers
        self.admit = admit
        self.telemetry = telemetry
        self.options = options
        self.is_alive = is_alive
        self.counters = ShipCounters()
        self._num_arrived = 0
        self._running: set[AttemptId] = set()

    def count(self, summary: ShipSummary) -> None:
        """Counts one shipment, complete or not."""
        self.counters.num_blocks += summary.num_blocks_shipped
        self.counters.num_bytes += summary.shipped_bytes
        self.counters.num_nacks += summary.num_nacks

    async def Prefill(  # type: ignore[override]  # a coroutine that writes
        self, request: worker_pb2.PrefillRequest, context: Context
    ) -> None:
        timeout_s = request.progress_timeout_s
        check_progress_timeout("progress_timeout_s", timeout_s)
        spec = spec_from_pb(request.sequence)
        target = _target_of(request, spec)
        constraint = await self.constraints.open(spec.sampling)
        self.admit(spec)
        async with self._queued(spec, constraint, hold=target is not None) as sequence:
            run = _PrefillRun(self, spec, sequence, target, timeout_s)
            async with HeartbeatWriter(
                context.write, run.heartbeat, interval_s=timeout_s / 3, stall_timeout_s=timeout_s, peer="the router"
            ) as writer:
                await run.run(writer)

    async def close(self) -> None:
        """Ends its channels; shipments that still run are cancelled."""
        await self.peers.close()

    @asynccontextmanager
    async def _queued(
        self, spec: SequenceSpec, constraint: Constraint | None, *, hold: bool
    ) -> AsyncIterator[Sequence]:
        """The sequence in the engine for the length of the block."""
        if spec.id in self._running:
            raise FailedPrecondition(f"attempt {spec.id.seq_id} is running already")
        self._running.add(spec.id)
        self._num_arrived += 1
        core = self.engine.core
        sequence = sequence_from_spec(
            spec, core, arrival=self._num_arrived, hold_after_prefill=hold, constraint=constraint
        )
        try:
            core.check_fits(sequence)  # before hashing, which takes long where a prompt is far too long
            sequence.block_hashes(sequence.num_tokens // core.layout.block_size, core.layout.block_size)  # unshared
            yield sequence
        finally:
            self.mailboxes.close(sequence.seq_id)
            loop = asyncio.get_running_loop()
            removed = self.engine.submit(lambda core: core.remove(sequence.seq_id))
            # Until then outputs may be on their way, which another call of this name must not get.
            removed.add_done_callback(lambda _: loop.call_soon_threadsafe(self._running.discard, spec.id))


class _PrefillRun:
    """One attempt's prefill under way."""

    def __init__(
        self,
        service: PrefillServicer,
        spec: SequenceSpec,
        sequence: Sequence,
        target: worker_pb2.ShipTarget | None,
        timeout_s: float,
    ) -> None:
        self._service = service
        self._spec = spec
        self._sequence = sequence
        self._target = target
        self._timeout_s = timeout_s
        self._received_ns = time.time_ns()
        self._task = PrefillTask(
            has_target=target is not None, received_ns=self._received_ns, num_choices=spec.num_choices
        )
        self._outputs = service.mailboxes.open(sequence.seq_id)
        self._opened = asyncio.Event()
        self._restored = asyncio.Event()
        self._ship_events: asyncio.Queue[ShipEvent] = asyncio.Queue()  # one a chunk and one for the first token

    def heartbeat(self) -> worker_pb2.PrefillResponse:
        """What the router hears while nothing happens; raises when the step loop is stuck, and it hears nothing."""
        if not self._service.is_alive():
            raise Unavailable("the step loop is stuck")
        progress = worker_pb2.PrefillProgress(num_computed_tokens=self._task.num_computed_tokens)
        return worker_pb2.PrefillResponse(progress=progress)

    async def run(self, writer: Writer) -> None:
        """Returns when the prefill is complete and the router was told; raises what made it fail."""
        await self._service.engine.run(lambda core: core.add(self._sequence))
        await run_until_first(self._compute(writer), self._ship(writer))

    async def _compute(self, writer: Writer) -> None:
        """Follows the engine until nothing is left to do but ship."""
        while not self._task.is_over:
            output = await self._outputs.get()
            self._record(output)
            await self._perform(self._task.on_output(output), writer)

    async def _ship(self, writer: Writer) -> None:
        """Ships once there is something to offer; ends the run with the acknowledgement."""
        await self._opened.wait()
        assert self._target is not None, "a shipment is opened towards a target"
        telemetry, sender = self._service.telemetry, ShipSender(self._offer(self._target))
        with telemetry.span(SpanNames.SHIP, attributes={Attributes.SERVER_ADDRESS: self._target.address}) as span:
            try:
                async with self._service.peers.peer(self._target.address) as peer:
                    options = dataclasses.replace(
                        self._service.options, on_fault=partial(_note_fault, span), on_nack=partial(_note_nack, span)
                    )
                    shipment = GrpcShipment(peer.channel, peer.link, options, rank=self._rank, parent=context_of(span))
                    source = PoolSource(self._service.engine, self._sequence, self._restored, telemetry)
                    summary = await shipment.ship(sender, source, self._ship_events)
                    if (transport := peer.link.transport) is not None:
                        span.set_attribute(Attributes.TRANSPORT, transport.value)
            except KvferryError as error:
                self._drop_unsound(sender.unsound_block)
                await self._perform(self._task.on_ship_failed(error), writer)
                await asyncio.get_running_loop().create_future()  # the attempt is over: the computing side ends the run
            finally:
                self._service.count(sender.summary)
                span.set_attributes(_ship_attributes(sender.summary))
        self._service.counters.num_sequences += 1
        await self._perform(self._task.on_shipped(summary), writer)

    def _drop_unsound(self, block_index: int | None) -> None:
        """Nobody shall hit our copy again: whoever needs the prompt next computes it anew from that block on."""
        if block_index is not None:
            sequence = self._sequence
            self._service.engine.submit(lambda core: core.drop_cached_from(sequence, block_index))

    @property
    def _rank(self) -> ShipRank:
        priority = self._sequence.priority
        return ShipRank(priority.tier_rank, priority.deadline_unix_ms / 1e3 or math.inf)

    def _offer(self, target: worker_pb2.ShipTarget) -> Offer:
        layout = self._service.engine.core.layout
        num_tokens = self._sequence.num_given_tokens
        return Offer(
            id=self._spec.id,
            receiver_epoch=target.epoch,
            layout=layout,
            block_hashes=tuple(self._sequence.block_hashes(num_tokens // layout.block_size, layout.block_size)),
            num_tokens=num_tokens,
            progress_timeout_s=self._timeout_s,
        )

    async def _perform(self, actions: list[TaskAction], writer: Writer) -> None:
        for action in actions:
            match action:
                case OpenShipment():
                    self._opened.set()
                case ShipTokens(num_computed_tokens=num_tokens):
                    self._ship_events.put_nowait(TokensComputed(num_tokens))
                case ShipFirstTokens(token_ids=token_ids, logprobs=logprobs):
                    self._ship_events.put_nowait(FirstToken(token_ids, logprobs))
                case ShipRestored():
                    self._restored.set()
                case CancelShipment():
                    pass  # the run ends with the next action, and the Ship call with the run
                case ReportPromptLogprobs():
                    message = prompt_logprobs_to_pb(action.token_index, action.logprobs)
                    await writer.write(worker_pb2.PrefillResponse(prompt_logprobs=message))
                case ReportFirstToken():
                    await writer.write(_first_token_response(action))
                case ReportPromptComputed():
                    await writer.write(_prompt_computed_response(action))
                case ReportDone(summary=summary):
                    await writer.write(_done_response(summary))
                case FailAttempt(error=error):
                    raise error

    def _record(self, output: Output) -> None:
        """Spans of what the engine did."""
        tracer = self._service.telemetry.tracer
        match output:
            case SequenceStarted(at_ns=at_ns):
                tracer.start_span(SpanNames.QUEUE, start_time=self._received_ns).end(at_ns)
            case ChunkComputed():
                attributes = {Attributes.NUM_TOKENS: output.num_tokens}
                span = tracer.start_span(SpanNames.PREFILL_CHUNK, start_time=output.start_ns, attributes=attributes)
                span.end(output.end_ns)


def _target_of(request: worker_pb2.PrefillRequest, spec: SequenceSpec) -> worker_pb2.ShipTarget | None:
    """Where the blocks go; raises InvalidArgument where this call would have to decode, which is Decode's to do."""
    if request.HasField("target"):
        if not request.target.address:
            raise InvalidArgument("target.address", "must be host:port")
        return request.target
    if spec.beam is not None:
        raise InvalidArgument("target", "must be set: a beam search is decoded elsewhere")
    num_left = spec.sampling.max_tokens - (len(spec.token_ids) - spec.num_prompt_tokens)
    if num_left > 1:
        raise InvalidArgument("target", f"must be set: {num_left} tokens are to be made, this worker makes one")
    return None


def _note_fault(span: Span, fault: CommittedFault) -> None:
    log_fault(fault)
    span.add_event(
        "fault_committed", {Attributes.FAULT_KIND: fault.kind.value, Attributes.BLOCK_INDEX: fault.block_index}
    )


def _note_nack(span: Span, block_index: int) -> None:
    span.add_event("block_refused", {Attributes.BLOCK_INDEX: block_index})


def _ship_attributes(summary: ShipSummary) -> dict[str, int]:
    return {
        Attributes.NUM_BLOCKS: summary.num_blocks_shipped,
        Attributes.NUM_BLOCKS_REUSED: summary.num_blocks_reused,
        Attributes.NUM_BYTES: summary.shipped_bytes,
        Attributes.NUM_NACKS: summary.num_nacks,
    }


def _first_token_response(report: ReportFirstToken) -> worker_pb2.PrefillResponse:
    message = worker_pb2.FirstToken(
        token_id=report.token_id,
        token_index=report.token_index,
        finish=finish_to_pb(report.finish) if report.finish is not None else None,
        num_cached_tokens=report.num_cached_tokens,
        queue_s=report.queue_ns / 1e9,
        prefill_s=report.prefill_ns / 1e9,
        choice=report.choice,
        logprob=None if report.logprob is None else logprob_to_pb(report.logprob),
    )
    return worker_pb2.PrefillResponse(first_token=message)


def _prompt_computed_response(report: ReportPromptComputed) -> worker_pb2.PrefillResponse:
    message = worker_pb2.PromptComputed(
        num_cached_tokens=report.num_cached_tokens,
        queue_s=report.queue_ns / 1e9,
        prefill_s=report.prefill_ns / 1e9,
    )
    return worker_pb2.PrefillResponse(prompt_computed=message)


def _done_response(summary: ShipSummary) -> worker_pb2.PrefillResponse:
    done = worker_pb2.PrefillDone(
        num_blocks_shipped=summary.num_blocks_shipped,
        num_blocks_reused=summary.num_blocks_reused,
        shipped_bytes=summary.shipped_bytes,
        ship_s=summary.ship_s,
        num_nacks=summary.num_nacks,
    )
    return worker_pb2.PrefillResponse(done=done)
