"""The sender's side of a link: opened once, kept, opened anew when lost; what it falls back to; nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvtransfer.sender_link
from kvferry.errors import FailedPrecondition, Internal, InvalidArgument, KvferryError, Unavailable
from kvferry.rpc import RpcChannel
from kvferry.spec import AttemptId
from kvtransfer.budget import ByteBudget
from kvtransfer.grpc_transport import SHIP_SERVICE, GrpcShipment
from kvtransfer.handshake import Transport, Welcome, WireVersions
from kvtransfer.link_codec import welcome_to_pb
from kvtransfer.messages import Offer
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.sender_link import SenderLink, _checked
from kvtransfer.staging import SegmentName
from kvtransfer.transport import FirstToken, SendOptions, TokensComputed
from proto.kvferry.v1 import ship_pb2
from tests.support.staging import num_open_files, staging_traces
from tests.support.workers import until
from tests.unit.kvtransfer.pairs import (
    MIB,
    SHORT_S,
    Receiver,
    computed,
    events_of,
    joined,
    linked_to,
    make_link,
    make_terms,
    running_receiver,
    silent_listener,
    start_receiver,
)
from tests.unit.kvtransfer.support import EPOCH, LAYOUT, MemoryHost, MemorySource, make_offer

EITHER = (Transport.SHARED_MEMORY, Transport.GRPC)


async def within(awaitable: Any, timeout_s: float = 5.0) -> Any:
    async with asyncio.timeout(timeout_s):
        return await awaitable


async def ship(channel: RpcChannel, link: SenderLink, offer: Offer | None = None, **options: Any) -> ShipSummary:
    events = options.pop("events", None) or computed()
    summary: ShipSummary = await within(
        GrpcShipment(channel, link, SendOptions(**options)).ship(
            ShipSender(offer or make_offer()), MemorySource(), events
        )
    )
    return summary


class Hosts:
    """A host for every offer, by the name of its request."""

    def __init__(self) -> None:
        self.by_name: dict[str, MemoryHost] = {}

    def open(self, offer: Offer) -> MemoryHost:
        return self.by_name.setdefault(offer.id.request_id, MemoryHost())


# -- one link for many shipments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpc", "shm"])
async def test_shipments_that_begin_together_share_one_link(kind: str) -> None:
    hosts = Hosts()
    async with joined(kind, hosts.open) as pair:
        assert pair.receiver is not None and pair.link is not None
        offers = [make_offer(id=AttemptId(f"r{index}", 1)) for index in range(20)]
        ships = [asyncio.ensure_future(pair.ship(offer)) for offer in offers]
        await within(asyncio.gather(*ships))
        first = await pair.link.agreed()
        await pair.ship(make_offer(id=AttemptId("later", 1)))
        assert await pair.link.agreed() is first
        assert pair.receiver.links == 1
    assert len(hosts.by_name) == 21 and all(host.is_complete for host in hosts.by_name.values())


async def test_one_that_gives_up_while_the_link_is_opened_harms_no_other() -> None:
    async with joined("shm", Hosts().open) as pair:
        assert pair.link is not None
        gives_up, stays = (asyncio.ensure_future(pair.link.agreed()) for _ in range(2))
        await asyncio.sleep(0)
        gives_up.cancel()
        assert (await within(stays)).transport is Transport.SHARED_MEMORY


async def test_a_link_lives_on_heartbeats_alone() -> None:
    async with (
        running_receiver(Hosts().open, make_terms("shm")) as receiver,
        linked_to(receiver.address, make_terms("shm"), timeout_s=SHORT_S) as (_, link),
    ):
        linked = await link.agreed()
        await asyncio.sleep(4 * SHORT_S)
        assert await link.agreed() is linked and receiver.links == 1


# -- what is agreed on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        ({"transports": EITHER}, {"transports": EITHER}, (2, Transport.SHARED_MEMORY)),
        ({"transports": EITHER}, {"transports": (Transport.GRPC,)}, (2, Transport.GRPC)),
        ({"transports": EITHER, "host_id": "another"}, {"transports": EITHER}, (2, Transport.GRPC)),
        ({"transports": EITHER}, {"transports": EITHER, "max_staging_bytes": MIB - 1}, (2, Transport.GRPC)),
        ({"versions": WireVersions(0, 1)}, {}, (1, Transport.GRPC)),
        ({"versions": WireVersions(2, 3)}, {}, (2, Transport.GRPC)),
    ],
)
async def test_what_both_can(sender: dict[str, Any], receiver: dict[str, Any], expected: tuple[int, Transport]) -> None:
    host = MemoryHost()
    async with (
        running_receiver(lambda offer: host, make_terms("grpc", **receiver)) as there,
        linked_to(there.address, make_terms("grpc", **sender)) as (channel, link),
    ):
        linked = await link.agreed()
        assert (linked.wire_version, linked.transport) == expected
        assert (linked.view is None) == (linked.transport is Transport.GRPC)
        await ship(channel, link)
    assert host.is_complete


async def test_a_receiver_without_link_is_spoken_to_in_version_1() -> None:
    host = MemoryHost()
    async with joined("version 1", lambda offer: host) as pair:
        assert pair.link is not None
        for _ in range(2):
            linked = await pair.link.agreed()
            assert (linked.wire_version, linked.link_id, linked.transport) == (1, 0, Transport.GRPC)
        await pair.ship()
    assert host.is_complete


async def test_forced_shared_memory_is_not_replaced() -> None:
    """Neither by a sender whose receiver knows no links, nor by a receiver whose sender made none."""
    forced = make_terms("shm")
    async with (
        running_receiver(lambda offer: MemoryHost(), make_terms("grpc"), links=False) as receiver,
        linked_to(receiver.address, forced) as (_, link),
    ):
        with pytest.raises(FailedPrecondition, match=r"transfer\.transport: .* speaks wire version 1"):
            await link.agreed()
    async with (
        running_receiver(lambda offer: MemoryHost(), forced) as receiver,
        RpcChannel(receiver.address) as channel,
        RpcChannel("127.0.0.1:1") as nowhere,
    ):
        link = make_link(nowhere, make_terms("grpc"))
        link._open_first_version(opened := asyncio.get_running_loop().create_future())
        link._opened = opened
        with pytest.raises(FailedPrecondition, match=r"transfer\.transport: shm here"):
            await ship(channel, link, make_offer())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wire_version": 99}, "the receiver chose 99"),
        ({"transport": Transport.SHARED_MEMORY}, "the receiver chose shm"),
        ({"link_id": 0}, "stands for no link"),
    ],
)
def test_an_answer_that_was_not_offered_is_refused(changes: dict[str, object], says: str) -> None:
    hello = make_terms("grpc").hello("prefill", 1, 5.0)
    welcome = Welcome(2, EPOCH, 7, Transport.GRPC, 4096)
    assert _checked(welcome, hello) is welcome
    with pytest.raises(FailedPrecondition, match=says):
        _checked(dataclasses.replace(welcome, **changes), hello)  # type: ignore[arg-type]


async def test_the_offer_tells_the_version_that_was_agreed_on() -> None:
    offers: list[Offer] = []

    def open_host(offer: Offer) -> MemoryHost:
        offers.append(offer)
        return MemoryHost()

    for kind in ("version 1", "grpc", "shm"):
        async with joined(kind, open_host) as pair:
            await pair.ship()
    assert [offer.layout.wire_version for offer in offers] == [1, 2, 2]
    assert [offer.link_id != 0 for offer in offers] == [False, True, True]


async def test_the_bound_for_a_peer_holds_over_all_links_without_staging() -> None:
    for kind in ("version 1", "grpc"):
        async with joined(kind, lambda offer: MemoryHost()) as pair:
            assert pair.link is not None and pair.receiver is not None
            first = await pair.link.agreed()
            await lose_links(pair.receiver)
            await until(lambda: pair.link is None or pair.link._opened is None)
            assert (await pair.link.agreed()).budget is first.budget


async def lose_links(receiver: Receiver) -> None:
    """It ends its Link calls, not its Ship calls."""
    tasks = receiver.server._calls.end(frozenset({"Link"}), Unavailable("ended by the test"))
    if tasks:
        await asyncio.wait(tasks)


@pytest.mark.parametrize(
    ("sender", "receiver", "says"),
    [
        ({"layout": dataclasses.replace(LAYOUT, num_layers=9)}, {}, "num_layers: 1 here, 9 there"),
        (
            {"layout": dataclasses.replace(LAYOUT, rope_digest="a")},
            {"layout": dataclasses.replace(LAYOUT, rope_digest="b")},
            "rope_digest: b here, a there",
        ),
        ({"versions": WireVersions(3, 4)}, {}, "wire version: 1 … 2 here, 3 … 4 there"),
        (
            {"transports": (Transport.SHARED_MEMORY,), "host_id": "another"},
            {"transports": EITHER},
            "transport: shm, grpc at the decode worker, shm at",
        ),
        ({"transports": (Transport.SHARED_MEMORY,)}, {}, "transport: grpc at the decode worker, shm at"),
    ],
)
async def test_what_does_not_go_together_is_refused_with_both_named(
    sender: dict[str, Any], receiver: dict[str, Any], says: str
) -> None:
    async with (
        running_receiver(Hosts().open, make_terms("grpc", **receiver)) as there,
        linked_to(there.address, make_terms("grpc", **sender)) as (channel, link),
    ):
        for _ in range(3):  # asked anew each time: the receiver may be another one by then
            with pytest.raises(FailedPrecondition, match=says):
                await ship(channel, link)
        assert there.links == 0 and there.servicer.links.staging_bytes == 0


async def test_forced_shared_memory_without_memory_is_refused_by_name() -> None:
    async with (
        running_receiver(Hosts().open, make_terms("shm", max_staging_bytes=MIB - 1)) as there,
        linked_to(there.address, make_terms("shm")) as (channel, link),
    ):
        with pytest.raises(Unavailable, match=r"transfer\.max_staging_bytes: 1048575 bytes, 0 in use"):
            await ship(channel, link)


async def test_whoever_comes_when_the_memory_is_used_up_uses_grpc() -> None:
    terms = make_terms("grpc", transports=EITHER, max_staging_bytes=2 * MIB + 4096)
    hosts = Hosts()
    async with running_receiver(hosts.open, terms) as there:
        async with (
            linked_to(there.address, terms) as one,
            linked_to(there.address, terms) as two,
            linked_to(there.address, terms) as three,
        ):
            found = [(await link.agreed()).transport for _, link in (one, two, three)]
            assert found == [Transport.SHARED_MEMORY, Transport.SHARED_MEMORY, Transport.GRPC]
            for number, (channel, link) in enumerate((one, two, three)):
                await ship(channel, link, make_offer(id=AttemptId(f"r{number}", 1)))
        await until(lambda: there.links == 0)
        assert there.servicer.links.staging_bytes == 0
        async with linked_to(there.address, terms) as (_, link):
            assert (await link.agreed()).transport is Transport.SHARED_MEMORY
    assert all(host.is_complete for host in hosts.by_name.values())


# -- receivers that answer strangely ----------------------------------------------------------------------------------


@asynccontextmanager
async def answering(*answers: ship_pb2.LinkResponse | None, beats: bool = True) -> AsyncIterator[str]:
    """A receiver whose nth Link call is answered with the nth of `answers` (the last one for ever), None ending it."""
    left = list(answers)

    async def link(_requests: object, context: Any) -> None:
        await context.read()
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is None:
            return
        await context.write(answer)
        while True:
            await asyncio.sleep(SHORT_S / 4)
            if beats:
                await context.write(ship_pb2.LinkResponse(heartbeat={}))

    handler = grpc.stream_stream_rpc_method_handler(
        link, ship_pb2.LinkRequest.FromString, ship_pb2.LinkResponse.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SHIP_SERVICE, {"Link": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def welcome(**changes: Any) -> ship_pb2.LinkResponse:
    made = dataclasses.replace(Welcome(2, EPOCH, 9, Transport.GRPC, MIB), **changes)
    return ship_pb2.LinkResponse(welcome=welcome_to_pb(made))


NOT_THERE = SegmentName(pid=2**31 - 1, fd=5, num_bytes=MIB, token=bytes(32))
STAGED = welcome(transport=Transport.SHARED_MEMORY, segment=NOT_THERE)


async def test_memory_that_cannot_be_opened_from_here_makes_it_grpc() -> None:
    """Two containers of one machine: the process id means something else."""
    terms = make_terms("grpc", transports=EITHER)
    async with answering(STAGED, welcome(link_id=10)) as address, linked_to(address, terms) as (_, link):
        linked = await within(link.agreed())
        assert (linked.transport, linked.link_id, linked.view) == (Transport.GRPC, 10, None)


async def test_forced_memory_that_cannot_be_opened_from_here_is_refused() -> None:
    async with answering(STAGED) as address, linked_to(address, make_terms("shm")) as (_, link):
        with pytest.raises(FailedPrecondition, match="shared memory cannot be opened"):
            await within(link.agreed())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, Unavailable),
        (ship_pb2.LinkResponse(), Unavailable),
        (ship_pb2.LinkResponse(heartbeat={}), Unavailable),
        (ship_pb2.LinkResponse(welcome={}), InvalidArgument),
        (ship_pb2.LinkResponse(welcome=ship_pb2.Welcome(transport=ship_pb2.TRANSPORT_GRPC)), InvalidArgument),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error(
    answer: ship_pb2.LinkResponse | None, error: type[KvferryError]
) -> None:
    async with answering(answer) as address, linked_to(address, make_terms("grpc")) as (_, link):
        for _ in range(2):
            with pytest.raises(error):
                await within(link.agreed())


async def test_an_error_that_nobody_thought_of_reaches_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(message: object) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(kvtransfer.sender_link, "welcome_from_pb", broken)
    async with answering(welcome()) as address, linked_to(address, make_terms("grpc")) as (_, link):
        waiting = [asyncio.ensure_future(link.agreed()) for _ in range(3)]
        for one in waiting:
            with pytest.raises(Internal, match="odd"):
                await within(one)


async def test_a_receiver_that_never_says_a_word_is_given_up() -> None:
    with silent_listener() as address:
        async with linked_to(address, make_terms("shm"), timeout_s=SHORT_S) as (_, link):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await within(link.agreed(), 10 * SHORT_S)


async def test_a_receiver_that_falls_silent_is_lost_and_asked_anew() -> None:
    answers = [welcome(link_id=1), welcome(link_id=2)]
    async with (
        answering(*answers, beats=False) as address,
        linked_to(address, make_terms("grpc"), timeout_s=SHORT_S) as (_, link),
    ):
        assert (await within(link.agreed())).link_id == 1
        await until(lambda: link._opened is None)
        assert (await within(link.agreed())).link_id == 2


# -- links that are lost ----------------------------------------------------------------------------------------------


async def test_a_receiver_that_was_restarted_at_its_address_is_linked_to_anew() -> None:
    terms, host = make_terms("shm"), MemoryHost()
    receiver = await start_receiver(Hosts().open, terms)
    async with linked_to(receiver.address, terms) as (channel, link):
        await ship(channel, link)
        first = await link.agreed()
        await receiver.server.grpc.stop(None)
        again = await start_receiver(lambda offer: host, terms, epoch=EPOCH + 1, listen=receiver.address)
        await until(lambda: link._opened is None)
        await ship(channel, link, make_offer(epoch=EPOCH + 1))
        second = await link.agreed()
        assert second is not first and second.link_id != first.link_id and again.links == 1
        await again.server.grpc.stop(None)
    assert host.is_complete


async def test_a_shipment_for_a_former_life_of_the_receiver_harms_no_other() -> None:
    hosts, events = Hosts(), events_of(TokensComputed(4))
    async with joined("shm", hosts.open) as pair:
        assert pair.link is not None
        under_way = asyncio.ensure_future(pair.ship(events=events))
        await within(hosts.open(make_offer()).writing.wait())
        linked = await pair.link.agreed()
        for _ in range(3):
            with pytest.raises(FailedPrecondition, match="another epoch: 7 here, 6 there"):
                await pair.ship(make_offer(id=AttemptId("late", 1), epoch=EPOCH - 1))
        assert await pair.link.agreed() is linked
        events.put_nowait(FirstToken((5,)))
        await within(under_way)
    assert hosts.by_name["request"].is_complete


Ending = Callable[[SenderLink, Receiver], Any]
ENDINGS: dict[str, Ending] = {
    "closed by the sender": lambda link, receiver: link.close(),
    "ended by the receiver": lambda link, receiver: lose_links(receiver),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_link_lost_in_mid_shipment_fails_its_shipments_alone(ending: str) -> None:
    """Another link of the same process goes on, and everything of the lost one is given back."""
    hosts, total, before = Hosts(), ByteBudget(64 * MIB), staging_traces()
    terms = make_terms("shm")
    async with (
        running_receiver(hosts.open, terms) as lost,
        running_receiver(hosts.open, terms) as kept,
        linked_to(lost.address, terms, total=total) as (lost_channel, lost_link),
        linked_to(kept.address, terms, total=total) as (kept_channel, kept_link),
    ):
        events = [events_of(TokensComputed(4)) for _ in range(6)]
        ships = [
            asyncio.ensure_future(
                ship(
                    kept_channel if index % 2 else lost_channel,
                    kept_link if index % 2 else lost_link,
                    make_offer(id=AttemptId(f"r{index}", 1)),
                    events=events[index],
                )
            )
            for index in range(6)
        ]
        names = [f"r{index}" for index in range(6)]
        await within(asyncio.gather(*(hosts.open(make_offer(id=AttemptId(name, 1))).writing.wait() for name in names)))
        await ENDINGS[ending](lost_link, lost)
        for queue in events:
            queue.put_nowait(FirstToken((5,)))
        results = await within(asyncio.gather(*ships, return_exceptions=True))
        assert [isinstance(result, Unavailable) for result in results] == [True, False] * 3, results
        await within(asyncio.gather(*(hosts.by_name[name].released.wait() for name in names[::2])))
        assert [hosts.by_name[name].is_complete for name in names] == [False, True] * 3
        assert [hosts.by_name[name].num_releases for name in names] == [1, 0] * 3
        assert total.num_bytes == 0
        await until(lambda: lost.links == 0)
        assert lost.servicer.links.staging_bytes == 0 and kept.links == 1
        await until(lambda: lost_link._opened is None)
        await ship(lost_channel, lost_link, make_offer(id=AttemptId("next", 1)))
        assert hosts.by_name["next"].is_complete
    await until(lambda: staging_traces() == before)


async def test_links_come_and_go_without_a_trace_in_the_kernel() -> None:
    terms, hosts = make_terms("shm"), Hosts()
    async with running_receiver(hosts.open, terms) as receiver, RpcChannel(receiver.address) as channel:
        await ship_once(channel, make_link(channel, terms), "warm")
        await until(lambda: receiver.links == 0)
        before = (num_open_files(), staging_traces())
        for number in range(30):
            link = make_link(channel, terms)
            await ship_once(channel, link, f"r{number}")
        await until(lambda: receiver.links == 0)
        assert num_open_files() <= before[0] and staging_traces() == before[1]
    assert all(host.is_complete for host in hosts.by_name.values())


async def ship_once(channel: RpcChannel, link: SenderLink, name: str) -> None:
    await ship(channel, link, make_offer(id=AttemptId(name, 1)))
    assert staging_traces().num_mappings >= 2
    await link.close()


async def test_closing_before_the_link_is_open_ends_those_who_wait() -> None:
    """At its first step, and while the receiver has not answered."""
    async with running_receiver(Hosts().open, make_terms("shm")) as receiver:
        for num_turns in range(6):
            async with linked_to(receiver.address, make_terms("shm")) as (_, link):
                waiting = asyncio.ensure_future(link.agreed())
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                if num_turns == 0:
                    waiting.cancel()
                await link.close()
                if num_turns:
                    with pytest.raises(Unavailable, match="the link was closed"):
                        await within(waiting)
        await until(lambda: receiver.links == 0)


async def test_a_channel_that_is_closed_fails_those_who_come() -> None:
    async with running_receiver(Hosts().open, make_terms("shm")) as receiver:
        channel = RpcChannel(receiver.address)
        link = make_link(channel, make_terms("shm"))
        await channel.close()
        with pytest.raises(KvferryError):
            await within(link.agreed())


async def test_the_link_is_no_part_of_the_trace_of_the_shipment_that_opened_it() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    async with (
        running_receiver(Hosts().open, make_terms("shm")) as receiver,
        RpcChannel(receiver.address, tracer=tracer) as channel,
    ):
        link = make_link(channel, make_terms("shm"))
        with tracer.start_as_current_span("request"):
            await ship(channel, link)
        await link.close()
    spans = {span.name.rpartition("/")[2]: span for span in exporter.get_finished_spans()}
    assert spans["Ship"].parent == spans["request"].context
    assert spans["Link"].parent is None
