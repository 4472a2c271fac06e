"""A sending and a receiving process in the test's event loop, joined in each of the ways there are."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel, RpcServer
from kvtransfer.budget import ByteBudget, ShipRank
from kvtransfer.faults import Fault, Faults
from kvtransfer.grpc_transport import SHIP_SERVICE, GrpcShipment, ShipServicer, add_ship_service
from kvtransfer.handshake import LinkTerms, Transport
from kvtransfer.in_process import InProcessShipment
from kvtransfer.messages import Offer
from kvtransfer.receiver import ShipReceiver
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.sender_link import SenderLink
from kvtransfer.staging import host_id
from kvtransfer.transport import (
    BlockSource,
    FirstToken,
    ReceiveOptions,
    ReceiverHost,
    SendOptions,
    ShipEvent,
    ShipTransport,
    TokensComputed,
)
from tests.unit.kvtransfer.support import EPOCH, LAYOUT, MemorySource, make_offer

KINDS = ("grpc", "shm", "version 1")
"""Over a real server; a receiver of version 1 has no Link."""
EVERY_KIND = ("in process", *KINDS)
MIB = 1 << 20
SHORT_S = 0.3
"""Progress timeout where silence is the subject."""


def make_terms(kind: str, layout: KvLayout = LAYOUT, **changes: object) -> LinkTerms:
    """What both processes of a pair of this kind agree on; a segment is of 1 MiB unless `changes` say otherwise."""
    transport = Transport.SHARED_MEMORY if kind == "shm" else Transport.GRPC
    made = LinkTerms(layout=layout, transports=(transport,), host_id=host_id(), peer_bytes=MIB)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # field names are checked at run time


@dataclass(slots=True)
class Receiver:
    """A process that takes shipments."""

    server: RpcServer
    servicer: ShipServicer
    address: str

    @property
    def links(self) -> int:
        return len(self.servicer.links)


async def start_receiver(
    open_host: Callable[[Offer], ReceiverHost],
    terms: LinkTerms,
    *,
    links: bool = True,
    options: ReceiveOptions | None = None,
    epoch: int = EPOCH,
    listen: str = "127.0.0.1:0",
) -> Receiver:
    """Its hosts come from `open_host`. Ends with `server.grpc.stop`."""
    server = RpcServer(background_methods=frozenset({"Link"}))
    servicer = ShipServicer(terms=terms, epoch=epoch, open_host=open_host, options=options)
    add_ship_service(servicer, server.grpc, links=links)
    return Receiver(server, servicer, await server.start(listen, [SHIP_SERVICE]))


@asynccontextmanager
async def running_receiver(
    open_host: Callable[[Offer], ReceiverHost], terms: LinkTerms, **options: object
) -> AsyncIterator[Receiver]:
    """`start_receiver` for the length of the block."""
    receiver = await start_receiver(open_host, terms, **options)  # type: ignore[arg-type]
    try:
        yield receiver
    finally:
        await receiver.server.grpc.stop(None)


def make_link(
    channel: RpcChannel, terms: LinkTerms, *, timeout_s: float = 5.0, total: ByteBudget | None = None
) -> SenderLink:
    """The sender's side of a link with these terms."""
    return SenderLink(channel, terms.hello("prefill", 1, timeout_s), total or ByteBudget(64 * MIB), terms.peer_bytes)


@asynccontextmanager
async def linked_to(address: str, terms: LinkTerms, **options: object) -> AsyncIterator[tuple[RpcChannel, SenderLink]]:
    """A channel and a link, as `make_link` makes it, to a receiver for the length of the block."""
    async with RpcChannel(address) as channel:
        link = make_link(channel, terms, **options)  # type: ignore[arg-type]
        try:
            yield channel, link
        finally:
            await link.close()


class Pair:
    """The two, as whoever ships sees them.

    Attributes:
        channel, link, receiver: None in process.
    """

    def __init__(
        self,
        make_transport: Callable[[SendOptions, ShipRank], ShipTransport],
        channel: RpcChannel | None = None,
        link: SenderLink | None = None,
        receiver: Receiver | None = None,
        total: ByteBudget | None = None,
    ) -> None:
        self._make_transport = make_transport
        self._total = total
        self.channel, self.link, self.receiver = channel, link, receiver

    @property
    def num_inflight_bytes(self) -> int:
        """Payload on its way from the sender, as its budget counts it."""
        assert self._total is not None, "each shipment in process has its own"
        return self._total.num_bytes

    async def ship(
        self,
        offer: Offer | None = None,
        events: asyncio.Queue[ShipEvent] | None = None,
        *,
        faults: Iterable[Fault] = (),
        options: SendOptions | None = None,
        source: BlockSource | None = None,
        rank: ShipRank | None = None,
    ) -> ShipSummary:
        """One shipment; in frames of 50 bytes unless `options` are given."""
        options = dataclasses.replace(options or SendOptions(max_frame_bytes=50), faults=Faults(tuple(faults)))
        transport = self._make_transport(options, rank or ShipRank())
        return await transport.ship(ShipSender(offer or make_offer()), source or MemorySource(), events or computed())


@asynccontextmanager
async def joined(
    kind: str,
    open_host: Callable[[Offer], ReceiverHost],
    *,
    layout: KvLayout = LAYOUT,
    options: ReceiveOptions | None = None,
    **terms: object,
) -> AsyncIterator[Pair]:
    """A pair of this kind for the length of the block; `terms` as for `make_terms`."""
    if kind == "in process":
        yield _in_process(open_host, layout, options or ReceiveOptions())
        return
    agreed, total = make_terms(kind, layout, **terms), ByteBudget(64 * MIB)
    either = dataclasses.replace(agreed, transports=tuple(dict.fromkeys((*agreed.transports, Transport.GRPC))))
    async with (
        running_receiver(open_host, either, links=kind != "version 1", options=options) as receiver,
        linked_to(receiver.address, agreed, total=total) as (channel, link),
    ):

        def make_transport(options: SendOptions, rank: ShipRank) -> ShipTransport:
            return GrpcShipment(channel, link, options, rank=rank)

        yield Pair(make_transport, channel, link, receiver, total)


def _in_process(open_host: Callable[[Offer], ReceiverHost], layout: KvLayout, options: ReceiveOptions) -> Pair:
    def new_receiver() -> ShipReceiver:
        return ShipReceiver(layout=layout, epoch=EPOCH, max_frame_bytes=options.max_frame_bytes)

    return Pair(
        lambda send_options, rank: InProcessShipment(
            new_receiver, open_host, send_options=send_options, receive_options=options
        )
    )


@contextmanager
def silent_listener() -> Iterator[str]:
    """The address of a process that was stopped: the kernel takes connections, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def events_of(*events: ShipEvent) -> asyncio.Queue[ShipEvent]:
    queue: asyncio.Queue[ShipEvent] = asyncio.Queue()
    for event in events:
        queue.put_nowait(event)
    return queue


def computed(num_tokens: int = 10) -> asyncio.Queue[ShipEvent]:
    """The prefill is over."""
    return events_of(TokensComputed(num_tokens), FirstToken((5,)))
