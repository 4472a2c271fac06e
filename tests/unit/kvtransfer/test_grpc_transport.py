"""Shipments over real gRPC: every ending releases once and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    KvferryError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel, RpcServer
from kvferry.spec import AttemptId
from kvtransfer.codec import sender_message_to_pb
from kvtransfer.faults import Fault, FaultKind, Faults
from kvtransfer.grpc_transport import GrpcShipment, ShipServicer
from kvtransfer.messages import Commit, Offer, SenderMessage
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.transport import (
    BlockSource,
    CancelShipment,
    CommitOutcome,
    FirstToken,
    ReceiveOptions,
    ReceiverHost,
    SendOptions,
    ShipEvent,
    TokensComputed,
)
from proto.kvferry.v1 import ship_pb2, ship_pb2_grpc
from tests.unit.kvtransfer.support import (
    ATTEMPT,
    EPOCH,
    LAYOUT,
    MemoryHost,
    MemorySource,
    frames_of,
    make_offer,
)

SHORT_S = 0.3
"""Progress timeout where silence is the subject."""
MANY_TOKENS = 4000
"""1,000 blocks of 128 bytes in frames of 50: a sender that writes for a while."""
LARGE_LAYOUT = dataclasses.replace(LAYOUT, head_dim=80_000)
"""2.56 MB a block: a few are more than HTTP/2 takes while nobody reads."""


async def start_server(
    open_host: Callable[[Offer], ReceiverHost], *, layout: KvLayout = LAYOUT, options: ReceiveOptions | None = None
) -> tuple[RpcServer, str]:
    """A decode worker whose hosts come from `open_host`, and its address."""
    server = RpcServer()
    servicer = ShipServicer(layout=layout, epoch=EPOCH, open_host=open_host, options=options)
    ship_pb2_grpc.add_ShipServiceServicer_to_server(servicer, server.grpc)
    return server, await server.start("127.0.0.1:0", ["kvferry.v1.ShipService"])


@asynccontextmanager
async def serving(
    open_host: Callable[[Offer], ReceiverHost], *, layout: KvLayout = LAYOUT, options: ReceiveOptions | None = None
) -> AsyncIterator[RpcChannel]:
    """A channel to such a worker."""
    server, address = await start_server(open_host, layout=layout, options=options)
    try:
        async with RpcChannel(address) as channel:
            yield channel
    finally:
        await server.grpc.stop(None)


def events_of(*events: ShipEvent) -> asyncio.Queue[ShipEvent]:
    queue: asyncio.Queue[ShipEvent] = asyncio.Queue()
    for event in events:
        queue.put_nowait(event)
    return queue


def computed(num_tokens: int = 10) -> asyncio.Queue[ShipEvent]:
    """The prefill is over."""
    return events_of(TokensComputed(num_tokens), FirstToken((5,)))


async def ship(
    channel: RpcChannel,
    *,
    offer: Offer | None = None,
    events: asyncio.Queue[ShipEvent] | None = None,
    faults: Iterable[Fault] = (),
    options: SendOptions | None = None,
    source: BlockSource | None = None,
) -> ShipSummary:
    options = options or SendOptions(max_frame_bytes=50)
    shipment = GrpcShipment(channel, dataclasses.replace(options, faults=Faults(tuple(faults))))
    return await shipment.ship(ShipSender(offer or make_offer()), source or MemorySource(), events or computed())


async def within(awaitable: Awaitable[Any], timeout_s: float = 5.0) -> Any:
    async with asyncio.timeout(timeout_s):
        return await awaitable


async def test_blocks_arrive_in_small_frames() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        summary = await ship(channel)
    assert host.is_complete
    assert host.first_token_ids == (5,)
    assert host.num_releases == 0
    assert summary.ship_s > 0
    assert dataclasses.replace(summary, ship_s=0.0) == ShipSummary(3, 0, 3 * LAYOUT.block_bytes, 0, False)


async def test_only_missing_blocks_cross() -> None:
    host = MemoryHost(held=frozenset({0}))
    async with serving(lambda offer: host) as channel:
        summary = await ship(channel)
    assert set(host.blocks) == {1, 2}
    assert (summary.num_blocks_shipped, summary.num_blocks_reused) == (2, 1)


async def test_first_block_arrives_before_the_prefill_ends() -> None:
    host = MemoryHost()
    events = events_of(TokensComputed(4))
    async with serving(lambda offer: host) as channel:
        shipping = asyncio.ensure_future(ship(channel, events=events))
        await within(host.writing.wait())
        events.put_nowait(FirstToken((5,)))
        await within(shipping)
    assert host.is_complete


async def test_large_blocks_in_full_frames() -> None:
    host = LargeHost(LARGE_LAYOUT.block_bytes)
    contents = random.Random(1).randbytes(LARGE_LAYOUT.block_bytes)
    async with serving(lambda offer: host, layout=LARGE_LAYOUT) as channel:
        sender = ShipSender(make_offer(9, layout=LARGE_LAYOUT))
        await GrpcShipment(channel).ship(sender, OneContents(contents), computed(9))
    assert [bytes(block) for block in host.blocks.values()] == [contents] * 3


class LargeHost(MemoryHost):
    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes

    async def grant(self, offer: Offer) -> Any:
        grant = await super().grant(offer)
        self.blocks = {index: bytearray(self._block_bytes) for index in grant.wanted}
        return grant


class OneContents:
    def __init__(self, contents: bytes) -> None:
        self._contents = contents

    def read(self, block_index: int, num_tokens: int) -> bytes:
        return self._contents

    def digest(self, block_index: int) -> None:
        return None


async def test_block_damaged_once_is_repaired() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        summary = await ship(channel, faults=[Fault(FaultKind.CORRUPT, 1, nth=1), Fault(FaultKind.CORRUPT, 2, nth=1)])
    assert host.is_complete
    assert host.num_releases == 0
    assert (summary.num_nacks, summary.shipped_bytes) == (2, 5 * LAYOUT.block_bytes)


async def test_block_damaged_always_is_data_loss() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        with pytest.raises(DataLoss) as caught:
            await ship(channel, faults=[Fault(FaultKind.CORRUPT, 1)])
        assert caught.value.field == "block[1]"
        await within(host.released.wait())
    assert host.num_releases == 1
    assert host.first_token_ids == ()


async def test_stored_digest_finds_a_block_that_changed_since() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        with pytest.raises(DataLoss):
            await ship(channel, source=MemorySource({0: bytes(16)}))


async def test_dropped_block_never_runs() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        with pytest.raises(FailedPrecondition, match="a Commit without block 1"):
            await ship(channel, faults=[Fault(FaultKind.DROP, 1)])
    assert host.num_releases == 1
    assert host.first_token_ids == ()


async def test_delayed_block_outlives_the_progress_timeout() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        offer = make_offer(progress_timeout_s=SHORT_S)
        await ship(channel, offer=offer, faults=[Fault(FaultKind.DELAY, 0, delay_s=2 * SHORT_S)])
    assert host.is_complete


async def test_status_reaches_a_sender_that_is_writing() -> None:
    source = OneContents(bytes(LARGE_LAYOUT.block_bytes))
    options = SendOptions(faults=Faults((Fault(FaultKind.DUPLICATE, 1),)))
    for _ in range(10):
        host = LargeHost(LARGE_LAYOUT.block_bytes)
        async with serving(lambda offer, host=host: host, layout=LARGE_LAYOUT) as channel:  # type: ignore[misc]
            sender = ShipSender(make_offer(80, layout=LARGE_LAYOUT))
            with pytest.raises(FailedPrecondition, match="block 1 again, which is verified"):
                await GrpcShipment(channel, options).ship(sender, source, computed(80))
        assert host.num_releases == 1


@pytest.mark.parametrize("grant_says", [True, False])
async def test_already_committed(grant_says: bool) -> None:
    outcome = CommitOutcome.COMMITTED if grant_says else CommitOutcome.ALREADY_COMMITTED
    host = MemoryHost(already_committed=grant_says, commit_outcome=outcome)
    async with serving(lambda offer: host) as channel:
        summary = await ship(channel)
    assert summary.already_committed
    assert summary.num_blocks_shipped == (0 if grant_says else 3)
    assert host.num_releases == (1 if grant_says else 0)


def refuse_unknown(offer: Offer) -> MemoryHost:
    if offer.id != ATTEMPT:
        raise NotFound(f"attempt {offer.id.seq_id} is not registered")
    return MemoryHost()


@pytest.mark.parametrize(
    ("offer", "error", "says"),
    [
        (make_offer(epoch=EPOCH - 1), FailedPrecondition, "7 here, 6 there"),
        (
            make_offer(layout=dataclasses.replace(LAYOUT, model_fingerprint="other")),
            FailedPrecondition,
            "model_fingerprint: model here, other there",
        ),
        (make_offer(id=AttemptId("request", 2)), NotFound, "request/2 is not registered"),
        (dataclasses.replace(make_offer(), block_hashes=()), InvalidArgument, "offer.block_hashes"),
    ],
)
async def test_wrong_offers_are_refused(offer: Offer, error: type[KvferryError], says: str) -> None:
    async with serving(refuse_unknown) as channel:
        with pytest.raises(error, match=says):
            await ship(channel, offer=offer)


async def test_refused_grant_tells_why_and_when_to_retry() -> None:
    host = MemoryHost(refusal=ResourceExhausted("no room", retry_after_s=2.5))
    async with serving(lambda offer: host) as channel:
        with pytest.raises(ResourceExhausted, match="no room") as caught:
            await ship(channel)
    assert caught.value.retry_after_s == 2.5
    assert host.num_releases == 1


async def test_cancel_event_ends_the_shipment() -> None:
    host = MemoryHost()
    events = events_of(TokensComputed(4))
    async with serving(lambda offer: host) as channel:
        shipping = asyncio.ensure_future(ship(channel, events=events))
        await within(host.writing.wait())
        events.put_nowait(CancelShipment())
        with pytest.raises(Cancelled):
            await within(shipping)
        await within(host.released.wait())
    assert host.num_releases == 1


@pytest.mark.parametrize("phase", ["granting", "writing", "committing"])
async def test_cancelled_task_releases_once_in_every_phase(phase: str) -> None:
    gate = asyncio.Event()
    host = MemoryHost(
        grant_gate=gate if phase == "granting" else None, commit_gate=gate if phase == "committing" else None
    )
    events = computed() if phase != "writing" else events_of(TokensComputed(4))
    async with serving(lambda offer: host) as channel:
        shipping = asyncio.ensure_future(ship(channel, events=events))
        await within({"granting": host.granting, "writing": host.writing, "committing": host.committing}[phase].wait())
        shipping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shipping
        await within(host.released.wait())
    assert host.num_releases == 1


async def test_sender_gone_in_the_middle_of_a_block() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        async with speaking(channel, make_offer(), *frames_of(0, max_frame_bytes=50)[:1]):
            await within(host.writing.wait())
        await within(host.released.wait())
    assert host.num_releases == 1


@asynccontextmanager
async def speaking(channel: RpcChannel, *messages: SenderMessage) -> AsyncIterator[Any]:
    """A peer that says `messages`, the Want once awaited, and then does as the body does."""
    stub = ship_pb2_grpc.ShipServiceStub(channel.grpc)
    async with channel.duplex(stub.Ship) as call:
        await call.write(sender_message_to_pb(messages[0]))
        await call.read()
        for message in messages[1:]:
            await call.write(sender_message_to_pb(message))
        yield call


async def test_half_closing_before_the_commit_is_refused() -> None:
    host = MemoryHost()
    async with serving(lambda offer: host) as channel:
        with pytest.raises(Unavailable, match="before its Commit"):
            async with speaking(channel, make_offer()) as call:
                await call.done_writing()
                while True:
                    await within(call.read())
    assert host.num_releases == 1


async def test_half_closing_after_the_commit_is_fine() -> None:
    host = MemoryHost()
    blocks = [*frames_of(0), *frames_of(1), *frames_of(2, 2)]
    async with (
        serving(lambda offer: host) as channel,
        speaking(channel, make_offer(), *blocks, Commit(ATTEMPT, (5,))) as call,
    ):
        await call.done_writing()
        answer = await within(call.read())
        assert answer.HasField("commit_ack")
    assert host.is_complete


async def test_silent_sender_is_given_up() -> None:
    host = MemoryHost()
    options = SendOptions(is_alive=lambda: False)  # an engine that hangs: the stream is open, nothing comes
    async with serving(lambda offer: host) as channel:
        with pytest.raises(Unavailable, match="the sender of the shipment was silent"):
            offer = make_offer(progress_timeout_s=SHORT_S)
            await within(ship(channel, offer=offer, events=events_of(), options=options), 10 * SHORT_S)
    assert host.num_releases == 1


async def test_stream_without_an_offer_is_given_up() -> None:
    async with serving(refuse_unknown, options=ReceiveOptions(offer_timeout_s=SHORT_S)) as channel:
        stub = ship_pb2_grpc.ShipServiceStub(channel.grpc)
        with pytest.raises(Unavailable):
            async with channel.duplex(stub.Ship) as call:
                while True:
                    await within(call.read(), 10 * SHORT_S)


async def test_hanging_receiving_engine_is_given_up() -> None:
    host = MemoryHost(grant_gate=asyncio.Event())
    async with serving(lambda offer: host, options=ReceiveOptions(is_alive=lambda: False)) as channel:
        with pytest.raises(Unavailable, match="the receiver of the shipment was silent"):
            await within(ship(channel, offer=make_offer(progress_timeout_s=SHORT_S)), 10 * SHORT_S)
        await within(host.released.wait())
    assert host.num_releases == 1


async def test_heartbeats_carry_a_long_grant() -> None:
    gate = asyncio.Event()
    host = MemoryHost(grant_gate=gate)
    async with serving(lambda offer: host) as channel:
        shipping = asyncio.ensure_future(ship(channel, offer=make_offer(progress_timeout_s=SHORT_S)))
        done, _ = await asyncio.wait([shipping], timeout=3 * SHORT_S)
        assert not done
        gate.set()
        await within(shipping)
    assert host.is_complete


class DeafServicer(ship_pb2_grpc.ShipServiceServicer):
    """Takes the offer; with `wants` it wants everything; then it reads nothing more. Beats if `beats`."""

    def __init__(self, *, wants: bool, beats: bool) -> None:
        self._wants = wants
        self._beats = beats

    async def Ship(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        request = await context.read()
        if self._wants:
            num_blocks = -(-request.offer.num_tokens // LAYOUT.block_size)
            await context.write(ship_pb2.ShipResponse(want=ship_pb2.Want(block_indices=range(num_blocks))))
        while True:
            await asyncio.sleep(SHORT_S / 4)
            if self._beats:
                await context.write(ship_pb2.ShipResponse(heartbeat={}))


@pytest.mark.parametrize(
    ("servicer", "says"),
    [
        (DeafServicer(wants=False, beats=False), "was silent"),
        (DeafServicer(wants=True, beats=False), "was silent|took nothing"),
        (DeafServicer(wants=True, beats=True), "took nothing"),
    ],
    ids=["no want", "no reading", "heartbeats but no reading"],
)
async def test_deaf_receiver_is_given_up(servicer: DeafServicer, says: str) -> None:
    server = grpc.aio.server()
    ship_pb2_grpc.add_ShipServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with RpcChannel(f"127.0.0.1:{port}") as channel:
        sender = ShipSender(make_offer(80, layout=LARGE_LAYOUT, progress_timeout_s=SHORT_S))
        source = OneContents(bytes(LARGE_LAYOUT.block_bytes))
        with pytest.raises(Unavailable, match=says):
            await within(GrpcShipment(channel).ship(sender, source, computed(80)), 10 * SHORT_S)
    await server.stop(None)


async def test_receiver_that_is_not_there() -> None:
    async with RpcChannel("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await within(ship(channel))


async def test_server_that_stops_releases() -> None:
    host = MemoryHost(grant_gate=asyncio.Event())
    server, address = await start_server(lambda offer: host)
    async with RpcChannel(address) as channel:
        shipping = asyncio.ensure_future(ship(channel))
        await within(host.granting.wait())
        await server.drain(0.0)
        with pytest.raises(Unavailable, match="shutting down"):
            await within(shipping)
    assert host.num_releases == 1


async def test_one_bad_shipment_harms_no_other() -> None:
    hosts = {f"request-{index}": MemoryHost() for index in range(8)}
    async with serving(lambda offer: hosts[offer.id.request_id]) as channel:
        ships = [
            ship(
                channel,
                offer=make_offer(id=AttemptId(name, 1)),
                faults=[Fault(FaultKind.CORRUPT, 0)] if index % 2 else [],
            )
            for index, name in enumerate(hosts)
        ]
        results = await asyncio.gather(*ships, return_exceptions=True)
        bad = [host for index, host in enumerate(hosts.values()) if index % 2]
        await within(asyncio.gather(*(host.released.wait() for host in bad)))
    assert [isinstance(result, DataLoss) for result in results] == [bool(index % 2) for index in range(8)]
    assert [host.is_complete for host in hosts.values()] == [not index % 2 for index in range(8)]
    assert [host.num_releases for host in hosts.values()] == [index % 2 for index in range(8)]


async def test_cancelled_shipments_leave_no_tasks() -> None:
    hosts: list[MemoryHost] = []

    def open_host(offer: Offer) -> MemoryHost:
        hosts.append(MemoryHost())
        return hosts[-1]

    dice = random.Random(3)
    async with serving(open_host) as channel:
        await ship(channel)  # whatever the library starts once is there
        num_before = len(asyncio.all_tasks())
        for _ in range(100):
            shipping = asyncio.ensure_future(ship(channel, offer=make_offer(MANY_TOKENS), events=computed(MANY_TOKENS)))
            await asyncio.wait([shipping], timeout=dice.uniform(0.0, 0.02))
            shipping.cancel()
            with suppress(asyncio.CancelledError):
                await shipping
        ended = [host for host in hosts if not host.first_token_ids]
        await within(asyncio.gather(*(host.released.wait() for host in ended)))
        async with asyncio.timeout(5):  # handlers that were told to end and are about to
            while len(tasks := asyncio.all_tasks()) > num_before:
                others = tasks - {asyncio.current_task()}
                await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    assert len(ended) > 10
    assert all(host.num_releases == (not host.first_token_ids) for host in hosts)
