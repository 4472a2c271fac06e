"""Scripted prefill and decode workers: real gRPC servers that speak the internal protos and emit a given output.

    async with FakeNetwork(output=[…], num_prefill=2, num_decode=2) as network: …

A prefill worker "ships" by telling the decode worker object named by the target's address. On the way every call passes
named points (`Point`), where a test can hold it, fail it once or a number of times, or wait until it is there.
"""

from __future__ import annotations

import asyncio
import enum
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from kvferry.block_changes import BlockChanges
from kvferry.errors import FailedPrecondition, KvferryError
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcServer
from kvferry.sampling import Finish, TokenLogprob
from kvferry.sequence_fields import own_fields
from kvferry.spec import SequenceSpec
from kvferry.wire import block_changes_to_pb, finish_to_pb, layout_to_pb, logprob_to_pb, spec_from_pb
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

WATCH_INTERVAL_S = 0.05
LAYOUT = KvLayout(2, 1, 4, 16, "float32", "fingerprint-a")


class Point(enum.Enum):
    """Places every call passes, in order; token points carry the index of the token that comes next."""

    DECODE_START = enum.auto()
    PREFILL_START = enum.auto()
    FIRST_TOKEN_SENT = enum.auto()
    SHIPPED = enum.auto()
    COMMITTED = enum.auto()
    TOKEN = enum.auto()


@dataclass(slots=True)
class CallRecord:
    """One call a worker got; `ended` is set however it ends."""

    worker: FakeWorker
    spec: SequenceSpec
    cancelled: bool = False
    traceparent: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeNetwork:
    """The workers of one test and what they are to do.

    Attributes:
        output: the true output; a worker emits from it by index, whatever the prompt.
        outputs: those of further choices, by number; others have `output`.
        logprobs: of every token of a choice, by number; others have -1, None is left out.
        beams: what a beam search finds.
        calls: every call of every worker, in the order they came.
        layout, vocab_size, max_context, num_blocks: what the workers claim.
        tokens_per_message: how decode groups its tokens.
        overshoot: tokens decode sends after it was told to stop.
    """

    def __init__(
        self,
        output: Sequence[int],
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        vocab_size: int = 400,
        max_context: int = 256,
        num_blocks: int = 1000,
    ) -> None:
        self.output = list(output)
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, float | None] = {}
        self.beams: list[worker_pb2.Beam] = []
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.num_blocks = num_blocks
        self.tokens_per_message = 1
        self.overshoot = 0
        self.calls: list[CallRecord] = []
        self.prefill = [FakeWorker(self, "prefill", index) for index in range(num_prefill)]
        self.decode = [FakeWorker(self, "decode", index) for index in range(num_decode)]
        self._forever: list[asyncio.Future[None]] = []
        self._held: set[tuple[Point, int]] = set()
        self._num_passed: dict[tuple[Point, int], int] = defaultdict(int)
        self._passed = asyncio.Event()
        self._failures: dict[tuple[Point, int], list[KvferryError]] = defaultdict(list)

    async def __aenter__(self) -> Self:
        for worker in self.workers:
            await worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            await worker.stop()

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        return tuple(worker.address for worker in self.prefill)

    @property
    def decode_addresses(self) -> tuple[str, ...]:
        return tuple(worker.address for worker in self.decode)

    # --- what a test asks for ---

    def hold(self, point: Point, index: int = 0) -> None:
        """Calls that come to the point stay there until they are cancelled."""
        self._held.add((point, index))

    def release(self, point: Point, index: int = 0) -> None:
        """The next calls pass again; one that is held stays."""
        self._held.discard((point, index))

    def fail(self, point: Point, error: KvferryError, *, index: int = 0, times: int = 1) -> None:
        """The next calls that come to the point end with this error."""
        self._failures[point, index].extend([error] * times)

    async def reached(self, point: Point, index: int = 0, *, times: int = 1) -> None:
        """Returns once that many calls came to the point."""
        async with asyncio.timeout(10):
            while self._num_passed[point, index] < times:
                self._passed.clear()
                await self._passed.wait()

    async def all_ended(self, timeout_s: float = 5.0) -> None:
        """Returns once no call is open anywhere."""
        async with asyncio.timeout(timeout_s):
            for call in self.calls:
                await call.ended.wait()

    def token(self, choice: int, index: int) -> int:
        return self.outputs.get(choice, self.output)[index]

    def logprob(self, choice: int) -> float | None:
        return self.logprobs.get(choice, -1.0)

    def calls_of(self, role: str) -> list[CallRecord]:
        return [call for call in self.calls if call.worker.role == role]

    # --- what workers call ---

    async def pass_point(self, point: Point, index: int = 0) -> None:
        self._num_passed[point, index] += 1
        self._passed.set()
        if self._failures[point, index]:
            raise self._failures[point, index].pop(0)
        if (point, index) in self._held:
            forever = asyncio.get_running_loop().create_future()
            self._forever.append(forever)  # else nothing but a cycle would hold the waiting task
            await forever

    def decode_at(self, address: str) -> FakeWorker:
        return next(worker for worker in self.decode if worker.address == address)

    @contextmanager
    def record(self, worker: FakeWorker, spec: SequenceSpec, traceparent: str) -> Iterator[CallRecord]:
        call = CallRecord(worker, spec, traceparent=traceparent)
        self.calls.append(call)
        try:
            yield call
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        finally:
            call.ended.set()


class FakeWorker(
    worker_pb2_grpc.WorkerServiceServicer, worker_pb2_grpc.PrefillServiceServicer, worker_pb2_grpc.DecodeServiceServicer
):
    """One worker of either role.

    Attributes:
        layout: what it claims.
        draining: what it says.
        block_hashes: what it says that it can be hit for.
        num_block_watches: calls of WatchBlocks so far.
        watched: set while a router watches.
        sequence_fields: those of a sequence that it says it knows.
    """

    def __init__(self, network: FakeNetwork, role: str, index: int) -> None:
        self.network = network
        self.role = role
        self.name = f"{role}-{index}"
        self.address = ""
        self.epoch = 1000 + index
        self.layout = LAYOUT
        self.vocab_size = network.vocab_size
        self.draining = False
        self.sequence_fields = sorted(own_fields())
        self.block_hashes: list[bytes] = []
        self.num_block_watches = 0
        self.is_silent = False
        self.stops: list[tuple[int, int]] = []  # choices and how many tokens were wanted
        self._registered: dict[tuple[str, int], asyncio.Event] = {}
        self._server: RpcServer | None = None

    async def start(self) -> None:
        """Serves, on the address it had before if it was started before."""
        server = RpcServer(background_methods=frozenset({"Watch", "WatchBlocks"}))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server.grpc)
        if self.role == "prefill":
            worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, server.grpc)
        else:
            worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, server.grpc)
        self.address = await server.start(self.address or "127.0.0.1:0", ())
        self._server = server

    async def stop(self) -> None:
        """Ends with everything it runs; its address answers nobody then."""
        if self._server is not None:
            await self._server.grpc.stop(None)
            self._server = None

    # --- WorkerService ---

    async def Watch(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.WatchRequest,
        context: ServicerContext[worker_pb2.WatchRequest, worker_pb2.WatchResponse],
    ) -> None:
        while True:
            if not self.is_silent:
                await context.write(self._status())
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def WatchBlocks(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.WatchBlocksRequest,
        context: ServicerContext[worker_pb2.WatchBlocksRequest, worker_pb2.WatchBlocksResponse],
    ) -> None:
        self.num_block_watches += 1
        changes = BlockChanges(is_reset=True, stored=self.block_hashes)
        for number, message in enumerate(block_changes_to_pb(changes), start=1):
            message.epoch, message.sequence_number = self.epoch, number
            await context.write(message)
        await asyncio.Event().wait()

    async def Drain(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.DrainRequest,
        context: ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> None:
        self.draining = True
        await context.write(worker_pb2.DrainResponse())

    async def Undrain(
        self,
        request: worker_pb2.UndrainRequest,
        context: ServicerContext[worker_pb2.UndrainRequest, worker_pb2.UndrainResponse],
    ) -> worker_pb2.UndrainResponse:
        was_draining, self.draining = self.draining, False
        return worker_pb2.UndrainResponse(was_draining=was_draining)

    def _status(self) -> worker_pb2.WatchResponse:
        network = self.network
        capabilities = types_pb2.Capabilities(
            model="tiny",
            model_path="models/tiny",
            max_context=network.max_context,
            vocab_size=self.vocab_size,
            layout=layout_to_pb(self.layout),
        )
        load = worker_pb2.WorkerLoad(num_blocks=network.num_blocks, num_free_blocks=network.num_blocks)
        return worker_pb2.WatchResponse(
            worker_id=self.name,
            role=self.role,
            pid=4242,
            epoch=self.epoch,
            capabilities=capabilities,
            draining=self.draining,
            load=load,
            sequence_fields=self.sequence_fields,
        )

    # --- PrefillService ---

    async def Prefill(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.PrefillRequest,
        context: ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse],
    ) -> None:
        network, spec = self.network, spec_from_pb(request.sequence)
        with network.record(self, spec, _traceparent(context)):
            await context.write(worker_pb2.PrefillResponse(progress=worker_pb2.PrefillProgress()))
            await network.pass_point(Point.PREFILL_START)
            has_more = spec.beam is not None
            for choice in [] if spec.beam is not None else _choices(spec):
                first = self._first_token(spec, choice)
                has_more = has_more or not first.HasField("finish")
                await context.write(worker_pb2.PrefillResponse(first_token=first))
                await network.pass_point(Point.FIRST_TOKEN_SENT, choice)
            done = worker_pb2.PrefillDone()
            if has_more:
                if not request.HasField("target"):
                    raise FailedPrecondition("a prompt with more than one token to make has no target")
                network.decode_at(request.target.address).commit(spec, request.target.epoch)
                done = worker_pb2.PrefillDone(num_blocks_shipped=2, num_blocks_reused=1, shipped_bytes=64, ship_s=0.5)
                await network.pass_point(Point.SHIPPED)
            await context.write(worker_pb2.PrefillResponse(done=done))

    def _first_token(self, spec: SequenceSpec, choice: int) -> worker_pb2.FirstToken:
        index = _num_output_tokens(spec)
        finish = self._finish_at(spec, choice, index)
        return worker_pb2.FirstToken(
            token_id=self.network.token(choice, index),
            token_index=index,
            finish=None if finish is None else finish_to_pb(finish),
            num_cached_tokens=3,
            queue_s=0.25,
            prefill_s=0.125,
            choice=choice,
            logprob=self._logprob(spec, choice, self.network.token(choice, index)),
        )

    def _logprob(self, spec: SequenceSpec, choice: int, token_id: int) -> types_pb2.TokenLogprob | None:
        """With the ids above it as the most likely ones."""
        logprob = self.network.logprob(choice)
        if not spec.sampling.logprobs or logprob is None:
            return None
        others = range(token_id, token_id + spec.sampling.num_top_logprobs)
        top = tuple(TokenLogprob(other, logprob, 1) for other in others or spec.sampling.logprob_token_ids)
        return logprob_to_pb(TokenLogprob(token_id, logprob, 1, top))

    def _finish_at(self, spec: SequenceSpec, choice: int, index: int) -> Finish | None:
        return spec.sampling.finish_after(self.network.token(choice, index), index + 1)

    # --- DecodeService ---

    def commit(self, spec: SequenceSpec, epoch: int) -> None:
        """The shipment of an attempt is complete."""
        if epoch != self.epoch:
            raise FailedPrecondition(f"epoch {epoch} is not {self.epoch}")
        self._registered[spec.id.request_id, spec.id.attempt].set()

    async def Decode(  # type: ignore[override]  # a coroutine that writes
        self,
        request_iterator: AsyncIterator[worker_pb2.DecodeRequest],
        context: ServicerContext[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse],
    ) -> None:
        first = await context.read()
        assert isinstance(first, worker_pb2.DecodeRequest)
        network, spec = self.network, spec_from_pb(first.start.sequence)
        with network.record(self, spec, _traceparent(context)):
            await network.pass_point(Point.DECODE_START)
            committed = self._registered.setdefault((spec.id.request_id, spec.id.attempt), asyncio.Event())
            registered = worker_pb2.Registered(epoch=self.epoch, ship_address=self.address)
            await context.write(worker_pb2.DecodeResponse(registered=registered))
            next_indices = dict.fromkeys(_choices(spec), _num_output_tokens(spec))
            if not first.start.local_prefill:
                await committed.wait()
                await network.pass_point(Point.COMMITTED)
                message = worker_pb2.Committed(attempt=spec.id.attempt)
                await context.write(worker_pb2.DecodeResponse(committed=message))
                next_indices = {
                    choice: index + 1
                    for choice, index in next_indices.items()
                    if spec.beam is not None or self._finish_at(spec, choice, index) is None
                }
            if spec.beam is not None:
                beams = worker_pb2.Beams(beams=network.beams)
                await context.write(worker_pb2.DecodeResponse(beams=beams))
                return
            async with _stopping(context) as stops:
                await self._emit(spec, next_indices, context, stops)

    async def _emit(
        self,
        spec: SequenceSpec,
        next_indices: dict[int, int],
        context: ServicerContext[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse],
        stops: dict[int, int],
    ) -> None:
        """Choices take turns until all have ended."""
        while next_indices:
            for choice, index in list(next_indices.items()):
                await self.network.pass_point(Point.TOKEN, index)
                if choice in stops:
                    self.stops.append((choice, stops[choice]))
                    tokens = worker_pb2.DecodeTokens(
                        choice=choice, token_index=index, token_ids=[1] * self.network.overshoot
                    )
                    has_ended = True
                else:
                    tokens = self._tokens(spec, choice, index)
                    has_ended = tokens.HasField("finish")
                if tokens.token_ids:
                    await context.write(worker_pb2.DecodeResponse(tokens=tokens))
                next_indices[choice] = index + len(tokens.token_ids)
                if has_ended:
                    del next_indices[choice]
                await asyncio.sleep(0)

    def _tokens(self, spec: SequenceSpec, choice: int, index: int) -> worker_pb2.DecodeTokens:
        network = self.network
        tokens = worker_pb2.DecodeTokens(choice=choice, token_index=index)
        for _ in range(network.tokens_per_message):
            tokens.token_ids.append(network.token(choice, index))
            logprob = self._logprob(spec, choice, network.token(choice, index))
            if logprob is not None:
                tokens.logprobs.append(logprob)
            finish = self._finish_at(spec, choice, index)
            index += 1
            if finish is not None:
                tokens.finish.CopyFrom(finish_to_pb(finish))
                break
        return tokens


@asynccontextmanager
async def _stopping(
    context: ServicerContext[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse],
) -> AsyncIterator[dict[int, int]]:
    """By choice that the router asked to stop: the number of wanted tokens."""
    wanted: dict[int, int] = {}

    async def listen() -> None:
        while isinstance(message := await context.read(), worker_pb2.DecodeRequest):
            if message.HasField("stop"):
                wanted.setdefault(message.stop.choice, message.stop.num_wanted_tokens)

    task = asyncio.create_task(listen())
    try:
        yield wanted
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _choices(spec: SequenceSpec) -> range:
    return range(spec.choice, spec.choice + spec.num_choices)


def _num_output_tokens(spec: SequenceSpec) -> int:
    return len(spec.token_ids) - spec.num_prompt_tokens


def _traceparent(context: ServicerContext[Any, Any]) -> str:
    metadata = {key: value for key, value in context.invocation_metadata() or ()}
    return str(metadata.get("traceparent", ""))
