"""Shipments over `ShipService.Ship`: one bidirectional gRPC stream a shipment, payloads inside or beside its messages.

    GrpcShipment.ship ─► link agreed ─► Ship call ─► sending end ── ShipRequest ──► ShipServicer.Ship
                                                                 ◄─ ShipResponse ──  └► receiving end ─► host

Beside them means in the staging segment of the link, where the receiving end copies them from. Backpressure is
HTTP/2's, `write` waits while the receiver does not read, and the lane's, which bounds what is on its way.

When a status arrives while a write begins, grpc.aio may report INTERNAL and drop the status: measured, a bare client
that writes in a tight loop loses a third of them and more, this one none in 500 refusals. Such an end counts as
Unavailable here, which is retried.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry.context import Context

from kvferry.errors import FailedPrecondition, Unavailable
from kvferry.rpc import RpcChannel
from kvtransfer.budget import ShipRank
from kvtransfer.codec import (
    receiver_message_from_pb,
    receiver_message_to_pb,
    sender_message_from_bytes,
    sender_message_to_bytes,
)
from kvtransfer.handshake import LinkTerms
from kvtransfer.liveness import bounded_silence
from kvtransfer.messages import Offer, ReceiverMessage, Region, SenderMessage
from kvtransfer.receiver import ShipReceiver
from kvtransfer.receiver_links import ReceiverLinks
from kvtransfer.receiving_end import run_receiving_end
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.sender_link import Linked, SenderLink
from kvtransfer.sending_end import run_sending_end
from kvtransfer.staging import StagingSegment, UncreditedBytes
from kvtransfer.transport import BlockSource, OpenHost, ReceiveOptions, SendOptions, ShipEvent
from proto.kvferry.v1 import ship_pb2

if TYPE_CHECKING:  # subscripted at type-check time only; at run time these classes are not generic
    from grpc.aio import ServicerContext, StreamStreamCall

    LinkContext = ServicerContext[ship_pb2.LinkRequest, ship_pb2.LinkResponse]
    SendingCall = StreamStreamCall[bytes, ship_pb2.ShipResponse]
    ReceivingContext = ServicerContext[SenderMessage, ship_pb2.ShipResponse]

SHIP_SERVICE = ship_pb2.DESCRIPTOR.services_by_name["ShipService"].full_name
SHIP_METHOD = f"/{SHIP_SERVICE}/Ship"


class GrpcShipment:
    """A `ShipTransport` to the decode worker at the other end of `channel`, which the caller owns, as is `link`.

    `rank` orders it among the shipments of this process. `parent` is the trace context of the Ship call's span; the
    running task's where it is None.
    """

    def __init__(
        self,
        channel: RpcChannel,
        link: SenderLink,
        options: SendOptions | None = None,
        *,
        rank: ShipRank | None = None,
        parent: Context | None = None,
    ) -> None:
        self._channel = channel
        self._link = link
        self._options = options or SendOptions()
        self._rank = rank or ShipRank()
        self._parent = parent

    async def ship(self, sender: ShipSender, source: BlockSource, events: asyncio.Queue[ShipEvent]) -> ShipSummary:
        """As `ShipTransport.ship`. Cancelling it cancels the call, and the receiver releases its reservation."""
        peer = f"the receiver at {self._channel.target}"
        async with bounded_silence(sender.offer.progress_timeout_s, peer):
            linked = await self._link.agreed()
        max_frame_bytes = min(self._options.max_frame_bytes, linked.max_frame_bytes)
        options = dataclasses.replace(self._options, max_frame_bytes=max_frame_bytes)
        method: Any = self._channel.grpc.stream_stream(SHIP_METHOD, None, ship_pb2.ShipResponse.FromString)
        async with self._channel.duplex(method, parent=self._parent) as call:
            stream = _GrpcSendingStream(call, linked)
            return await run_sending_end(stream, sender, source, events, options, linked.lane(self._rank))


class ShipServicer:
    """Takes shipments in the life `epoch` of this process.

    Args:
        terms: what to agree on with senders; the layout is that of the pool.
        epoch: of this process.
        open_host: finds decode's side of an offer.
        options: how receiving ends behave.
    """

    def __init__(
        self,
        *,
        terms: LinkTerms,
        epoch: int,
        open_host: OpenHost,
        options: ReceiveOptions | None = None,
    ) -> None:
        self.links = ReceiverLinks(terms, epoch)
        self._layout = terms.layout
        self._epoch = epoch
        self._open_host = open_host
        self._options = options or ReceiveOptions()

    async def Link(self, _requests: object, context: LinkContext) -> None:
        """The pair's call: what is agreed on holds until it ends."""
        await self.links.serve(context, self._options.offer_timeout_s)

    async def Ship(self, _requests: object, context: ReceivingContext) -> None:
        """One shipment."""
        receiver = ShipReceiver(layout=self._layout, epoch=self._epoch, max_frame_bytes=self._options.max_frame_bytes)
        stream = _GrpcReceivingStream(context, self.links)
        await run_receiving_end(stream, receiver, self._open_host, self._options)


def add_ship_service(servicer: ShipServicer, server: grpc.aio.Server, *, links: bool = True) -> None:
    """Adds the service; by hand, because block frames are parsed by `codec.py`. Without `links` it is version 1's."""
    handlers: dict[str, Any] = {
        "Ship": grpc.stream_stream_rpc_method_handler(
            servicer.Ship, sender_message_from_bytes, ship_pb2.ShipResponse.SerializeToString
        ),
    }
    if links:
        handlers["Link"] = grpc.stream_stream_rpc_method_handler(
            servicer.Link, ship_pb2.LinkRequest.FromString, ship_pb2.LinkResponse.SerializeToString
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SHIP_SERVICE, handlers),))


class _GrpcSendingStream:
    """The sender's end of a Ship call; adds to the Offer what was agreed on."""

    def __init__(self, call: SendingCall, linked: Linked) -> None:
        self._call = call
        self._linked = linked

    async def write(self, message: SenderMessage) -> None:
        if isinstance(message, Offer):
            layout = dataclasses.replace(message.layout, wire_version=self._linked.wire_version)
            message = dataclasses.replace(message, layout=layout, link_id=self._linked.link_id)
        await _raising_lost_status(self._call.write(sender_message_to_bytes(message)))

    async def read(self) -> ReceiverMessage:
        message: Any = await _raising_lost_status(self._call.read())
        if message is grpc.aio.EOF:
            raise Unavailable("the receiver ended the shipment before its acknowledgement")
        return receiver_message_from_pb(message)


class _GrpcReceivingStream:
    """The receiver's end of a Ship call; knows where staged payloads lie."""

    def __init__(self, context: ReceivingContext, links: ReceiverLinks) -> None:
        self._context = context
        self._links = links
        self._segment: StagingSegment | None = None

    async def write(self, message: ReceiverMessage) -> None:
        await self._context.write(receiver_message_to_pb(message))

    async def read(self) -> SenderMessage | None:
        message: Any = await self._context.read()
        if message is grpc.aio.EOF:
            return None
        if isinstance(message, Offer):
            self._segment = self._links.segment(message.link_id)
        assert isinstance(message, SenderMessage)
        return message

    @property
    def uncredited(self) -> UncreditedBytes:
        return UncreditedBytes(0) if self._segment is None else self._segment.uncredited

    def staged(self, region: Region) -> memoryview:
        if self._segment is None:
            raise FailedPrecondition("staged frames, but the shipment's link has no staging segment")
        return self._segment.payload(region)


async def _raising_lost_status(operation: Coroutine[Any, Any, Any]) -> Any:
    """What `operation` of a call returns; Unavailable where the call broke and grpc.aio lost the status."""
    try:
        return await operation
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and "from Core" in (error.details() or ""):
            raise Unavailable("the receiver ended the shipment while it was being sent") from error
        raise
