"""Shipments over `ShipService.Ship`: one bidirectional gRPC stream a shipment.

    GrpcShipment.ship ─► RpcChannel.duplex ─► sending end ── ShipRequest ──► ShipServicer.Ship ─► receiving end ─► host
                                                          ◄─ ShipResponse ──

Backpressure is HTTP/2's: `write` waits while the receiver does not read. One thing is ours. When a status arrives while
the sender's write is on its way, grpc.aio reports INTERNAL and drops the status (nine times out of ten, measured). So a
receiver that refuses first sends Halt; the sender half-closes and then reads the status in peace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry.context import Context

from kvferry.errors import KvferryError, Unavailable
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

HALT_TIMEOUT_S = 1.0
"""How long a receiver that refuses waits for the sender to fall silent before it sends the status anyway."""


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
        stream = _GrpcReceivingStream(context)
        try:
            await run_receiving_end(stream, receiver, self._open_host, self._options)
        except KvferryError:
            await stream.halt()
            raise
        finally:
            await stream.close()


class _GrpcSendingStream:
    """The sender's end of a Ship call."""

    def __init__(self, call: StreamStreamCall[ship_pb2.ShipRequest, ship_pb2.ShipResponse]) -> None:
        self._call = call
        self._write_lock = asyncio.Lock()  # half-closing must not overtake a write
        self._is_halted = False

    async def write(self, message: SenderMessage) -> None:
        async with self._write_lock:
            if self._is_halted:
                await asyncio.get_running_loop().create_future()  # the status that `read` raises ends this
            await _raising_lost_status(self._call.write(sender_message_to_pb(message)))

    async def read(self) -> ReceiverMessage:
        while True:
            message: Any = await _raising_lost_status(self._call.read())
            if message is grpc.aio.EOF:
                raise Unavailable("the receiver ended the shipment before its acknowledgement")
            if message.WhichOneof("event") != "halt":
                return receiver_message_from_pb(message)
            async with self._write_lock:
                self._is_halted = True
                await self._call.done_writing()


class _GrpcReceivingStream:
    """The receiver's end of a Ship call. A read that is interrupted goes on, because gRPC cannot take it back."""

    def __init__(self, context: ServicerContext[ship_pb2.ShipRequest, ship_pb2.ShipResponse]) -> None:
        self._context = context
        self._reading: asyncio.Task[Any] | None = None

    async def write(self, message: ReceiverMessage) -> None:
        await self._context.write(receiver_message_to_pb(message))

    async def read(self) -> SenderMessage | None:
        message = await self._read_pb()
        return None if message is grpc.aio.EOF else sender_message_from_pb(message)

    async def halt(self) -> None:
        """Asks the sender for silence and waits a while for it."""
        with suppress(TimeoutError, grpc.aio.BaseError):
            async with asyncio.timeout(HALT_TIMEOUT_S):
                await self._context.write(ship_pb2.ShipResponse(halt=ship_pb2.Halt()))
                while await self._read_pb() is not grpc.aio.EOF:
                    pass

    async def close(self) -> None:
        """Ends a read that still goes on."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_pb(self) -> Any:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        await asyncio.wait([self._reading])
        reading, self._reading = self._reading, None
        return reading.result()


async def _raising_lost_status(operation: Coroutine[Any, Any, Any]) -> Any:
    """What `operation` of a call returns; Unavailable where the call broke and grpc.aio lost the status."""
    try:
        return await operation
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and "from Core" in (error.details() or ""):
            raise Unavailable("the receiver ended the shipment while it was being sent") from error
        raise
