"""Both ends in one loop behave as over a network."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import DataLoss, FailedPrecondition
from kvtransfer.faults import Fault, FaultKind, Faults
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


async def test_blocks_arrive() -> None:
    host = MemoryHost(held=frozenset({1}))
    summary = await ship(host, Fault(FaultKind.CORRUPT, 0, nth=1))
    assert host.is_complete
    assert host.num_releases == 0
    assert (summary.num_blocks_shipped, summary.num_blocks_reused, summary.num_nacks) == (7, 1, 1)


async def test_damage_that_stays() -> None:
    host = MemoryHost()
    with pytest.raises(DataLoss):
        await ship(host, Fault(FaultKind.CORRUPT, 7))
    assert host.num_releases == 1


async def test_error_of_the_receiver_reaches_the_sender() -> None:
    host = MemoryHost()
    with pytest.raises(FailedPrecondition, match="without block 2"):
        await ship(host, Fault(FaultKind.DROP, 2))
    assert host.num_releases == 1


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
