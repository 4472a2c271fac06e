"""Both ends in one loop leave nothing behind. What they do is in `test_transport.py`, with all transports."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.faults import Fault, Faults
from kvtransfer.in_process import InProcessShipment
from kvtransfer.receiver import ShipReceiver
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.transport import FirstToken, SendOptions, ShipEvent
from tests.unit.kvtransfer.support import EPOCH, LAYOUT, MemoryHost, MemorySource, make_offer


async def ship(host: MemoryHost, *faults: Fault) -> ShipSummary:
    events: asyncio.Queue[ShipEvent] = asyncio.Queue()
    events.put_nowait(FirstToken((5,)))
    transport = InProcessShipment(
        lambda: ShipReceiver(layout=LAYOUT, epoch=EPOCH),
        lambda offer: host,
        send_options=SendOptions(max_frame_bytes=50, faults=Faults(faults)),
    )
    return await transport.ship(ShipSender(make_offer(30)), MemorySource(), events)


async def test_cancel_releases_and_leaves_no_task() -> None:
    host = MemoryHost(grant_gate=asyncio.Event())
    before = asyncio.all_tasks()
    shipping = asyncio.ensure_future(ship(host))
    await host.granting.wait()
    shipping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shipping
    assert host.num_releases == 1
    assert asyncio.all_tasks() == before
