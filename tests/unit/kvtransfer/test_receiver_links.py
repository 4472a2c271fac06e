"""The receiver's side of links: who is answered, whose memory it is, and that it goes with the call."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import FailedPrecondition, InvalidArgument, KvferryError, Unavailable
from kvferry.rpc import RpcChannel
from kvtransfer.handshake import Hello, Transport
from kvtransfer.link_codec import hello_to_pb, welcome_from_pb
from kvtransfer.receiver_links import ReceiverLinks
from kvtransfer.staging import HEADER_BYTES, StagingView
from kvtransfer.transport import ReceiveOptions
from proto.kvferry.v1 import ship_pb2, ship_pb2_grpc
from tests.support.staging import staging_traces
from tests.support.workers import until
from tests.unit.kvtransfer.pairs import MIB, SHORT_S, make_terms, running_receiver
from tests.unit.kvtransfer.support import EPOCH, LAYOUT, MemoryHost, put

EITHER = (Transport.SHARED_MEMORY, Transport.GRPC)
SEGMENT_BYTES = MIB + 2 * HEADER_BYTES


def make_hello(kind: str = "shm", *, timeout_s: float = 5.0, **changes: Any) -> Hello:
    return dataclasses.replace(make_terms(kind).hello("prefill", 1, timeout_s), **changes)


@asynccontextmanager
async def receiving(**terms: Any) -> AsyncIterator[tuple[ReceiverLinks, RpcChannel]]:
    """A receiver's links, and a channel to it."""
    options = ReceiveOptions(offer_timeout_s=SHORT_S)
    made = make_terms("grpc", **{"transports": EITHER, **terms})
    async with (
        running_receiver(lambda offer: MemoryHost(), made, options=options) as receiver,
        RpcChannel(receiver.address) as channel,
    ):
        yield receiver.servicer.links, channel


@asynccontextmanager
async def calling(channel: RpcChannel, *messages: ship_pb2.LinkRequest) -> AsyncIterator[Any]:
    """A Link call that says these and then does as the body does."""
    async with channel.duplex(ship_pb2_grpc.ShipServiceStub(channel.grpc).Link) as call:
        for message in messages:
            await call.write(message)
        yield call


def saying(hello: Hello) -> ship_pb2.LinkRequest:
    return ship_pb2.LinkRequest(hello=hello_to_pb(hello))


async def next_of(call: Any) -> Any:
    async with asyncio.timeout(5):
        return await call.read()


async def refusal(channel: RpcChannel, *messages: ship_pb2.LinkRequest) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        async with calling(channel, *messages) as call:
            while await next_of(call) is not grpc.aio.EOF:
                pass
    return caught.value


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_the_answer_says_what_was_agreed_on_and_where_the_memory_lies() -> None:
    async with receiving() as (links, channel), calling(channel, saying(make_hello(max_frame_bytes=9000))) as call:
        welcome = welcome_from_pb((await next_of(call)).welcome)
        assert (welcome.wire_version, welcome.epoch, welcome.max_frame_bytes) == (2, EPOCH, 9000)
        assert welcome.transport is Transport.SHARED_MEMORY and welcome.segment is not None
        assert welcome.segment.num_bytes == SEGMENT_BYTES and links.staging_bytes == MIB
        view = StagingView(welcome.segment, LAYOUT.block_bytes)
        segment = links.segment(welcome.link_id)
        assert segment is not None
        assert bytes(segment.payload(put(view, b"here"))) == b"here"
        view.close()


async def test_payloads_in_messages_need_no_memory() -> None:
    async with receiving() as (links, channel), calling(channel, saying(make_hello("grpc"))) as call:
        welcome = welcome_from_pb((await next_of(call)).welcome)
        assert (welcome.transport, welcome.segment) == (Transport.GRPC, None)
        assert links.segment(welcome.link_id) is None and links.staging_bytes == 0


@pytest.mark.parametrize("num_bytes", [1, 1000, MIB])
async def test_a_segment_holds_at_least_one_frame(num_bytes: int) -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=8000)  # 256,000 bytes a block
    hello = saying(make_hello(layout=layout))
    async with receiving(layout=layout, peer_bytes=num_bytes) as (_, channel), calling(channel, hello) as call:
        welcome = welcome_from_pb((await next_of(call)).welcome)
        assert welcome.segment is not None
        view = StagingView(welcome.segment, min(welcome.max_frame_bytes, layout.block_bytes))
        assert view.num_slots >= 1
        view.close()


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        ([ship_pb2.LinkRequest()], InvalidArgument, "must be `hello`"),
        ([ship_pb2.LinkRequest(heartbeat={})], InvalidArgument, "must be `hello`"),
        ([ship_pb2.LinkRequest(hello={})], InvalidArgument, "hello.progress_timeout_s"),
        ([], Unavailable, "made no progress"),
        (
            [saying(make_hello(layout=dataclasses.replace(LAYOUT, block_size=16)))],
            FailedPrecondition,
            "block_size: 4 here, 16 there",
        ),
        (
            [saying(make_hello(host_id="another"))],
            FailedPrecondition,
            "shared memory needs one machine, these are two",
        ),
    ],
)
async def test_what_is_refused_opens_nothing(
    messages: list[ship_pb2.LinkRequest], error: type[KvferryError], says: str
) -> None:
    before = staging_traces()
    async with receiving() as (links, channel):
        found = await refusal(channel, *messages)
        assert isinstance(found, error) and says in found.message
        assert (len(links), links.staging_bytes) == (0, 0)
        assert staging_traces() == before


async def test_half_closing_at_once_is_refused() -> None:
    async with receiving() as (_, channel):
        with pytest.raises(InvalidArgument, match="must be `hello`"):
            async with calling(channel) as call:
                await call.done_writing()
                await next_of(call)


async def test_a_second_hello_changes_nothing() -> None:
    hello = saying(make_hello())
    async with receiving() as (links, channel), calling(channel, hello, hello, hello) as call:
        assert (await next_of(call)).HasField("welcome")
        await asyncio.sleep(SHORT_S / 2)
        assert (len(links), links.staging_bytes) == (1, MIB)


# -- memory -----------------------------------------------------------------------------------------------------------


async def test_links_have_names_and_memory_of_their_own() -> None:
    async with receiving() as (links, channel):
        async with calling(channel, saying(make_hello())) as one, calling(channel, saying(make_hello())) as two:
            welcomes = [welcome_from_pb((await next_of(call)).welcome) for call in (one, two)]
            ids = [welcome.link_id for welcome in welcomes]
            assert 0 not in ids and ids[0] != ids[1]
            assert links.segment(ids[0]) is not links.segment(ids[1])
            assert (len(links), links.staging_bytes) == (2, 2 * MIB)
        await until(lambda: len(links) == 0)
        assert links.staging_bytes == 0
        for link_id in (*ids, 1):
            with pytest.raises(FailedPrecondition, match=f"link {link_id:x} is not open"):
                links.segment(link_id)


async def test_memory_of_all_links_is_bounded() -> None:
    async with receiving(max_staging_bytes=2 * MIB) as (links, channel):
        async with calling(channel, saying(make_hello())) as one, calling(channel, saying(make_hello())) as two:
            for call in (one, two):
                assert welcome_from_pb((await next_of(call)).welcome).segment is not None
            error = await refusal(channel, saying(make_hello()))
            assert isinstance(error, Unavailable)
            assert f"{2 * MIB} bytes, {2 * MIB} in use" in error.message
            async with calling(channel, saying(make_hello(transports=EITHER))) as three:
                assert welcome_from_pb((await next_of(three)).welcome).transport is Transport.GRPC
                assert (len(links), links.staging_bytes) == (3, 2 * MIB)
        await until(lambda: len(links) == 0)
        async with calling(channel, saying(make_hello())) as four:
            assert welcome_from_pb((await next_of(four)).welcome).segment is not None


async def test_no_memory_at_all_makes_it_grpc() -> None:
    hello = saying(make_hello(transports=EITHER))
    async with receiving(max_staging_bytes=0) as (_, channel), calling(channel, hello) as call:
        assert welcome_from_pb((await next_of(call)).welcome).transport is Transport.GRPC


# -- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["cancelled", "half-closed", "channel closed"])
async def test_memory_goes_with_the_call(ending: str) -> None:
    async with receiving() as (links, channel):
        before = staging_traces()
        own_channel = RpcChannel(channel.target)
        async with calling(own_channel, saying(make_hello())) as call:
            assert (await next_of(call)).HasField("welcome")
            assert links.staging_bytes == MIB and staging_traces() != before
            match ending:
                case "half-closed":
                    await call.done_writing()
                    while await next_of(call) is not grpc.aio.EOF:
                        pass
                case "channel closed":
                    await own_channel.close()
        await until(lambda: len(links) == 0)
        await own_channel.close()
        assert links.staging_bytes == 0 and staging_traces() == before


async def test_a_sender_that_falls_silent_loses_its_memory() -> None:
    async with receiving() as (links, channel):
        before = staging_traces()
        error = await refusal(channel, saying(make_hello(timeout_s=SHORT_S)))
        assert isinstance(error, Unavailable) and "made no progress" in error.message
        assert (len(links), links.staging_bytes) == (0, 0) and staging_traces() == before


async def test_heartbeats_keep_a_link() -> None:
    hello = saying(make_hello(timeout_s=SHORT_S))
    async with receiving() as (links, channel), calling(channel, hello) as call:
        assert (await next_of(call)).HasField("welcome")
        for _ in range(12):
            assert (await next_of(call)).HasField("heartbeat")  # four in every timeout
            await call.write(ship_pb2.LinkRequest(heartbeat={}))
        assert len(links) == 1
