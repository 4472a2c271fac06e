"""Shipments over `ShipService.Ship`: one bidirectional gRPC stream a shipment.

    GrpcShipment.ship ─► RpcChannel.duplex ─► sending end ── ShipRequest ──► ShipServicer.Ship ─► receiving end ─► host
                                                          ◄─ ShipResponse ──

Backpressure is HTTP/2's: `write` waits while the receiver does not read. When a status arrives while a write begins,
grpc.aio may report INTERNAL and drop the status: measured, a bare client that writes in a tight loop loses a third of
them and more, this one none in 500 refusals. Such an end counts as Unavailable here, which is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry.context import Context

from kvferry.errors import Unavailable
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel
from kvtransfer.codec import (
    receiver_message_from_pb,
    receiver_message_to_pb,
    sender_message_from_pb,
    sender_message_to_pb,
)
from kvtransfer.messages import ReceiverMessage, SenderMessage
from kvtransfer.receiver import ShipReceiver
from kvtransfer.receiving_end import run_receiving_end
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.sending_end import run_sending_end
from kvtransfer.transport import BlockSource, OpenHost, ReceiveOptions, SendOptions, ShipEvent
from proto.kvferry.v1 import ship_pb2, ship_pb2_grpc

if TYPE_CHECKING:  # subscripted at type-check time only; at run time these classes are not generic
    from grpc.aio import ServicerContext, StreamStreamCall


class GrpcShipment:
    """A `ShipTransport` to the decode worker at the other end of `channel`, which the caller owns.

    `parent` is the trace context of the Ship call's span; the running task's where it is None.
    """

    def __init__(
        self, channel: RpcChannel, options: SendOptions | None = None, *, parent: Context | None = None
    ) -> None:
        self._channel = channel
        self._stub = ship_pb2_grpc.ShipServiceStub(channel.grpc)
        self._options = options or SendOptions()
        self._parent = parent

    async def ship(self, sender: ShipSender, source: BlockSource, events: asyncio.Queue[ShipEvent]) -> ShipSummary:
        """As `ShipTransport.ship`. Cancelling it cancels the call, and the receiver releases its reservation."""
        async with self._channel.duplex(self._stub.Ship, parent=self._parent) as call:
            return await run_sending_end(_GrpcSendingStream(call), sender, source, events, self._options)


class ShipServicer(ship_pb2_grpc.ShipServiceServicer):
    """Takes shipments into a pool of `layout`, in the life `epoch` of this process; `open_host` is decode's side."""

    def __init__(
        self, *, layout: KvLayout, epoch: int, open_host: OpenHost, options: ReceiveOptions | None = None
    ) -> None:
        self._layout = layout
        self._epoch = epoch
        self._open_host = open_host
        self._options = options or ReceiveOptions()

    async def Ship(  # type: ignore[override]  # a coroutine that writes; the stubs know generators only
        self, request_iterator: object, context: ServicerContext[ship_pb2.ShipRequest, ship_pb2.ShipResponse]
    ) -> None:
        receiver = ShipReceiver(layout=self._layout, epoch=self._epoch, max_frame_bytes=self._options.max_frame_bytes)
        await run_receiving_end(_GrpcReceivingStream(context), receiver, self._open_host, self._options)


class _GrpcSendingStream:
    """The sender's end of a Ship call."""

    def __init__(self, call: StreamStreamCall[ship_pb2.ShipRequest, ship_pb2.ShipResponse]) -> None:
        self._call = call

    async def write(self, message: SenderMessage) -> None:
        await _raising_lost_status(self._call.write(sender_message_to_pb(message)))

    async def read(self) -> ReceiverMessage:
        message: Any = await _raising_lost_status(self._call.read())
        if message is grpc.aio.EOF:
            raise Unavailable("the receiver ended the shipment before its acknowledgement")
        return receiver_message_from_pb(message)


class _GrpcReceivingStream:
    """The receiver's end of a Ship call."""

    def __init__(self, context: ServicerContext[ship_pb2.ShipRequest, ship_pb2.ShipResponse]) -> None:
        self._context = context

    async def write(self, message: ReceiverMessage) -> None:
        await self._context.write(receiver_message_to_pb(message))

    async def read(self) -> SenderMessage | None:
        message: Any = await self._context.read()
        return None if message is grpc.aio.EOF else sender_message_from_pb(message)


async def _raising_lost_status(operation: Coroutine[Any, Any, Any]) -> Any:
    """What `operation` of a call returns; Unavailable where the call broke and grpc.aio lost the status."""
    try:
        return await operation
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and "from Core" in (error.details() or ""):
            raise Unavailable("the receiver ended the shipment while it was being sent") from error
        raise
