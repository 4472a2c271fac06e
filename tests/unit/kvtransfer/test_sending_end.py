"""What the sending end writes when the event loop is late."""

from __future__ import annotations

import asyncio
import time

from kvtransfer.messages import Alive, Offer, ReceiverMessage, SenderMessage
from kvtransfer.sender import ShipSender
from kvtransfer.sending_end import run_sending_end
from kvtransfer.transport import SendOptions, ShipEvent
from tests.unit.kvtransfer.support import MemorySource, make_offer


class RecordingStream:
    """Keeps what is written; nothing ever comes back."""

    def __init__(self) -> None:
        self.written: list[SenderMessage] = []
        self.has_two = asyncio.Event()

    async def write(self, message: SenderMessage) -> None:
        self.written.append(message)
        if len(self.written) == 2:
            self.has_two.set()

    async def read(self) -> ReceiverMessage:
        answer: asyncio.Future[ReceiverMessage] = asyncio.get_running_loop().create_future()
        return await answer


async def test_no_heartbeat_overtakes_the_offer() -> None:
    stream, events = RecordingStream(), asyncio.Queue[ShipEvent]()
    sender = ShipSender(make_offer(progress_timeout_s=0.2))
    shipping = asyncio.ensure_future(run_sending_end(stream, sender, MemorySource(), events, SendOptions()))
    asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # two heartbeats are due before the Offer's turn
    await stream.has_two.wait()
    shipping.cancel()
    await asyncio.gather(shipping, return_exceptions=True)
    assert [type(message) for message in stream.written[:2]] == [Offer, Alive]
