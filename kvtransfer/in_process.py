"""Both ends of a shipment in one event loop, joined by bounded queues: for tests and single-process use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.errors import FailedPrecondition
from kvferry.tasks import run_until_first
from kvtransfer.budget import ByteBudget, ShipRank
from kvtransfer.lane import InlineLane
from kvtransfer.messages import ReceiverMessage, Region, SenderMessage
from kvtransfer.receiver import ShipReceiver
from kvtransfer.receiving_end import run_receiving_end
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.sending_end import run_sending_end
from kvtransfer.staging import UncreditedBytes
from kvtransfer.transport import BlockSource, OpenHost, ReceiveOptions, SendOptions, ShipEvent

MAX_BYTES = 16 << 20
MAX_QUEUED_FRAMES = 4
"""A sender that is ahead waits, as it does on a network: each frame queued is memory held."""


class _Pipes:
    """The two directions, and both ends' views of them."""

    def __init__(self) -> None:
        self.to_receiver: asyncio.Queue[SenderMessage] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self.to_sender: asyncio.Queue[ReceiverMessage] = asyncio.Queue(MAX_QUEUED_FRAMES)


class _SendingPipe:
    def __init__(self, pipes: _Pipes) -> None:
        self.read = pipes.to_sender.get
        self.write = pipes.to_receiver.put


class _ReceivingPipe:
    def __init__(self, pipes: _Pipes) -> None:
        self.read = pipes.to_receiver.get
        self.write = pipes.to_sender.put

    @property
    def uncredited(self) -> UncreditedBytes:
        return UncreditedBytes(0)

    def staged(self, region: Region) -> memoryview:
        raise FailedPrecondition("staged frames, but there is no staging segment")


class InProcessShipment:
    """A `ShipTransport` to a receiving end in the same loop.

    Args:
        new_receiver: makes the state machine of each shipment's receiving end.
        open_host: finds the host of an offer.
    """

    def __init__(
        self,
        new_receiver: Callable[[], ShipReceiver],
        open_host: OpenHost,
        *,
        send_options: SendOptions | None = None,
        receive_options: ReceiveOptions | None = None,
    ) -> None:
        self._new_receiver = new_receiver
        self._open_host = open_host
        self._send_options = send_options or SendOptions()
        self._receive_options = receive_options or ReceiveOptions()

    async def ship(self, sender: ShipSender, source: BlockSource, events: asyncio.Queue[ShipEvent]) -> ShipSummary:
        """As `ShipTransport.ship`; whatever ends one end ends the other."""
        pipes = _Pipes()
        lane = InlineLane(ByteBudget(MAX_BYTES).peer(MAX_BYTES), ShipRank())
        sending = run_sending_end(_SendingPipe(pipes), sender, source, events, self._send_options, lane)
        return await run_until_first(sending, self._receive(_ReceivingPipe(pipes)))

    async def _receive(self, stream: _ReceivingPipe) -> ShipSummary:
        receiver = self._new_receiver()
        await run_receiving_end(stream, receiver, self._open_host, self._receive_options)
        # Committed: the sender learns it from the acknowledgement and ends both.
        for_ever: asyncio.Future[ShipSummary] = asyncio.get_running_loop().create_future()
        return await for_ever
