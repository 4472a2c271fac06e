"""Shipments over real gRPC with a peer that does not behave: raw streams, silence, bytes that are no message."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import FailedPrecondition, InvalidArgument, KvferryError, Unavailable
from kvferry.kv_layout import KV_WIRE_VERSION
from kvtransfer import sender_link
from kvtransfer.codec import sender_message_to_bytes
from kvtransfer.grpc_transport import SHIP_SERVICE, GrpcShipment
from kvtransfer.messages import BlockFrame, Commit, Offer, Region, SenderMessage, StagedFrames
from kvtransfer.receiver_links import ReceiverLinks
from kvtransfer.sender import ShipSender
from kvtransfer.staging import HEADER_BYTES
from kvtransfer.transport import ReceiveOptions
from proto.kvferry.v1 import ship_pb2
from tests.support.shipping import ship_call
from tests.unit.kvtransfer.pairs import KINDS, SHORT_S, Pair, computed, joined, linked_to, make_terms, silent_listener
from tests.unit.kvtransfer.support import ATTEMPT, EPOCH, LAYOUT, MemoryHost, OneContents, frames_of, make_offer
from tests.unit.kvtransfer.test_transport import LARGE_LAYOUT, within


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A transport."""
    return str(request.param)


# -- peers that speak by hand -----------------------------------------------------------------------------------------


@asynccontextmanager
async def speaking(pair: Pair, *messages: SenderMessage | bytes) -> AsyncIterator[Any]:
    """A sender that says `messages`, the Want once awaited, and then does as the body does."""
    assert pair.channel is not None
    async with ship_call(pair.channel) as call:
        for number, message in enumerate(messages):
            if number == 1:
                await within(call.read())
            await call.write(message if isinstance(message, bytes) else sender_message_to_bytes(message))
        yield call


async def hear_the_end(pair: Pair, *messages: SenderMessage | bytes) -> None:
    """Raises what a sender that says `messages` is told."""
    async with speaking(pair, *messages) as call:
        while await within(call.read()) is not grpc.aio.EOF:
            pass


async def linked_offer(pair: Pair, **changes: Any) -> Offer:
    """An offer that names the pair's link."""
    assert pair.link is not None
    linked = await pair.link.agreed()
    return dataclasses.replace(make_offer(), link_id=linked.link_id, **changes)


def staged(*regions: tuple[int, int], frame: BlockFrame | None = None) -> StagedFrames:
    """Frames of the first block whose payloads lie at these offsets, so many bytes each."""
    frame = frame or frames_of(0)[0]
    return StagedFrames(
        tuple(dataclasses.replace(frame, payload=Region(offset, num_bytes)) for offset, num_bytes in regions)
    )


async def test_sender_gone_in_the_middle_of_a_block(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        async with speaking(pair, make_offer(), *frames_of(0, max_frame_bytes=50)[:1]):
            await within(host.writing.wait())
        await within(host.released.wait())
    assert host.num_releases == 1


async def test_half_closing_before_the_commit_is_refused(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(Unavailable, match="before its Commit"):
            async with speaking(pair, make_offer()) as call:
                await call.done_writing()
                while True:
                    await within(call.read())
    assert host.num_releases == 1


async def test_half_closing_after_the_commit_is_fine(kind: str) -> None:
    host = MemoryHost()
    blocks = [*frames_of(0), *frames_of(1), *frames_of(2, 2)]
    async with (
        joined(kind, lambda offer: host) as pair,
        speaking(pair, make_offer(), *blocks, Commit(ATTEMPT, (5,))) as call,
    ):
        await call.done_writing()
        answer = await within(call.read())
        assert answer.HasField("commit_ack")
    assert host.is_complete


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (dataclasses.replace(make_offer(), block_hashes=()), InvalidArgument, "offer.block_hashes"),
        (dataclasses.replace(make_offer(), progress_timeout_s=0.0), InvalidArgument, "offer.progress_timeout_s"),
        (dataclasses.replace(make_offer(), link_id=1), FailedPrecondition, "link 1 is not open"),
        (b"", InvalidArgument, "event"),
        (b"\x0a\xff", InvalidArgument, "not a valid message"),
        (b"\x12\x03\x22\x01", InvalidArgument, "not a valid message"),
        (sender_message_to_bytes(frames_of(0)[0])[:-1], InvalidArgument, "not a valid message"),
    ],
)
async def test_wrong_first_messages_are_refused(
    kind: str, wrong: SenderMessage | bytes, error: type[KvferryError], says: str
) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(error, match=says):
            await hear_the_end(pair, wrong)
        assert not host.granting.is_set()
        await within(pair.ship())
    assert host.is_complete


async def test_stream_without_an_offer_is_given_up(kind: str) -> None:
    async with joined(kind, lambda offer: MemoryHost(), options=ReceiveOptions(offer_timeout_s=SHORT_S)) as pair:
        with pytest.raises(Unavailable):
            await hear_the_end(pair)


# -- other versions ---------------------------------------------------------------------------------------------------


def of_version(version: int) -> Offer:
    return dataclasses.replace(make_offer(), layout=dataclasses.replace(LAYOUT, wire_version=version))


def as_the_library_writes(frame: BlockFrame) -> bytes:
    """Fields in the order of their numbers, the payload in the middle: so a sender of version 1 does it."""
    return ship_pb2.ShipRequest.FromString(sender_message_to_bytes(frame)).SerializeToString()


@pytest.mark.parametrize("version", [KV_WIRE_VERSION - 1, KV_WIRE_VERSION])
async def test_senders_of_this_version_and_the_one_before_are_served(kind: str, version: int) -> None:
    host = MemoryHost()
    frames = [*frames_of(0, max_frame_bytes=50), *frames_of(1), *frames_of(2, 2)]
    blocks = [as_the_library_writes(frame) for frame in frames]
    assert blocks[0] != sender_message_to_bytes(frames[0])
    async with (
        joined(kind, lambda offer: host) as pair,
        speaking(pair, of_version(version), *blocks, Commit(ATTEMPT, (5,))) as call,
    ):
        assert (await within(call.read())).HasField("commit_ack")
    assert host.is_complete


async def test_a_newer_version_is_for_the_link_to_agree_on(kind: str) -> None:
    """What a shipment of that version may hold, nobody here knows."""
    async with joined(kind, lambda offer: MemoryHost()) as pair:
        with pytest.raises(FailedPrecondition, match=f"{KV_WIRE_VERSION} at most here, {KV_WIRE_VERSION + 1} there"):
            await hear_the_end(pair, of_version(KV_WIRE_VERSION + 1))


@pytest.mark.parametrize("version", [KV_WIRE_VERSION - 2, KV_WIRE_VERSION + 2])
async def test_senders_two_versions_apart_are_refused_with_both_named(kind: str, version: int) -> None:
    async with joined(kind, lambda offer: MemoryHost()) as pair:
        with pytest.raises(FailedPrecondition, match=f"wire_version: {KV_WIRE_VERSION} here, {version} there"):
            await hear_the_end(pair, of_version(version))


# -- staged payloads --------------------------------------------------------------------------------------------------

SEGMENT_BYTES = 4096 + 2 * HEADER_BYTES


@pytest.mark.parametrize(
    ("frames", "error", "says"),
    [
        (staged((0, 128)), InvalidArgument, "bytes 0 … 128, 64 … 4224 allowed"),
        (staged((HEADER_BYTES - 1, 128)), InvalidArgument, "allowed"),
        (staged((SEGMENT_BYTES - 127, 128)), InvalidArgument, "allowed"),
        (staged((SEGMENT_BYTES, 128)), InvalidArgument, "allowed"),
        (staged((2**64 - 1, 128)), InvalidArgument, "allowed"),
        (staged((2**64 - 64, 128)), InvalidArgument, "allowed"),
        (staged((HEADER_BYTES, 2**32 - 1)), InvalidArgument, "a piece of 4294967295 bytes"),
        (staged((HEADER_BYTES, 129)), FailedPrecondition, "129 bytes, a block has 128"),
        (staged((HEADER_BYTES, 127)), FailedPrecondition, "digest"),
        (staged((HEADER_BYTES, 0)), InvalidArgument, "empty"),
        (staged((HEADER_BYTES, 128), (HEADER_BYTES, 128)), FailedPrecondition, "block 0 again"),
        (staged(*[(HEADER_BYTES, 128)] * 257), InvalidArgument, "staged.frames"),
    ],
)
async def test_staged_frames_that_cannot_be_right(frames: StagedFrames, error: type[KvferryError], says: str) -> None:
    host = MemoryHost()
    async with joined("shm", lambda offer: host, peer_bytes=4096) as pair:
        with pytest.raises(error, match=says):
            await hear_the_end(pair, await linked_offer(pair), frames)
        assert not host.writing.is_set()
        await within(host.released.wait())


async def test_staged_frames_without_a_segment_are_refused(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        offer = make_offer() if kind == "shm" else await linked_offer(pair)
        with pytest.raises(FailedPrecondition, match="no staging segment"):
            await hear_the_end(pair, offer, staged((HEADER_BYTES, 128)))
        await within(host.released.wait())


async def test_staged_garbage_is_found_and_asked_for_again() -> None:
    host = MemoryHost()
    async with joined("shm", lambda offer: host) as pair:
        async with speaking(pair, await linked_offer(pair), staged((HEADER_BYTES, 128))) as call:
            answers = [await within(call.read()) for _ in range(2)]
        await within(host.released.wait())
    assert {answer.WhichOneof("event") for answer in answers} == {"nack", "credit"}
    assert host.num_wrong == 1


async def test_payloads_in_messages_are_fine_on_a_link_with_memory() -> None:
    host = MemoryHost()
    blocks = [*frames_of(0), *frames_of(1), *frames_of(2, 2)]
    async with joined("shm", lambda offer: host) as pair:
        offer = await linked_offer(pair)
        async with speaking(pair, offer, *blocks, Commit(ATTEMPT, (5,))) as call:
            assert (await within(call.read())).HasField("commit_ack")
    assert host.is_complete


# -- receivers that do not read ---------------------------------------------------------------------------------------


class DeafServicer:
    """Agrees, takes the offer; with `wants` it wants everything; then it reads nothing more. Beats if `beats`."""

    def __init__(self, kind: str, *, wants: bool, beats: bool) -> None:
        self._links = ReceiverLinks(make_terms(kind, LARGE_LAYOUT, peer_bytes=4 << 20), EPOCH)
        self._wants = wants
        self._beats = beats

    async def Link(self, _requests: object, context: Any) -> None:
        await self._links.serve(context, 5.0)

    async def Ship(self, _requests: object, context: Any) -> None:
        request = await context.read()
        if self._wants:
            num_blocks = -(-request.offer.num_tokens // LAYOUT.block_size)
            await context.write(ship_pb2.ShipResponse(want=ship_pb2.Want(block_indices=range(num_blocks))))
        while True:
            await asyncio.sleep(SHORT_S / 4)
            if self._beats:
                await context.write(ship_pb2.ShipResponse(heartbeat={}))

    def handlers(self, *, links: bool) -> grpc.GenericRpcHandler:
        methods = {"Ship": (self.Ship, ship_pb2.ShipRequest, ship_pb2.ShipResponse)}
        if links:
            methods["Link"] = (self.Link, ship_pb2.LinkRequest, ship_pb2.LinkResponse)  # type: ignore[assignment]
        return grpc.method_handlers_generic_handler(
            SHIP_SERVICE,
            {
                name: grpc.stream_stream_rpc_method_handler(behavior, request.FromString, response.SerializeToString)
                for name, (behavior, request, response) in methods.items()
            },
        )


@pytest.mark.parametrize(
    ("wants", "beats", "says"),
    [(False, False, "was silent"), (True, False, "was silent|took nothing"), (True, True, "took nothing")],
    ids=["no want", "no reading", "heartbeats but no reading"],
)
async def test_deaf_receiver_is_given_up(kind: str, wants: bool, beats: bool, says: str) -> None:
    server = grpc.aio.server()
    deaf = DeafServicer(kind, wants=wants, beats=beats)
    server.add_generic_rpc_handlers((deaf.handlers(links=kind != "version 1"),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    terms = make_terms(kind, LARGE_LAYOUT, peer_bytes=4 << 20)
    try:
        async with linked_to(f"127.0.0.1:{port}", terms) as (channel, link):
            sender = ShipSender(make_offer(80, layout=LARGE_LAYOUT, progress_timeout_s=SHORT_S))
            source = OneContents(bytes(LARGE_LAYOUT.block_bytes))
            with pytest.raises(Unavailable, match=says):
                await within(GrpcShipment(channel, link).ship(sender, source, computed(80)), 10 * SHORT_S)
    finally:
        await server.stop(None)


async def test_receiver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_link, "CONNECT_TIMEOUT_S", SHORT_S)
    async with linked_to("127.0.0.1:1", make_terms("grpc")) as (channel, link):
        with pytest.raises(Unavailable):
            await within(GrpcShipment(channel, link).ship(ShipSender(make_offer()), OneContents(b""), computed()))


async def test_receiver_that_never_says_a_word_is_given_up() -> None:
    with silent_listener() as address:
        async with linked_to(address, make_terms("shm"), timeout_s=SHORT_S) as (channel, link):
            sender = ShipSender(make_offer(progress_timeout_s=SHORT_S))
            with pytest.raises(Unavailable):
                await within(GrpcShipment(channel, link).ship(sender, OneContents(b""), computed()), 10 * SHORT_S)
