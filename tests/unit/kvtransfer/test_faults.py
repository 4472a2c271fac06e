"""Faults committed on purpose: what becomes of a block, where they are told of, and where they come from."""

from __future__ import annotations

import asyncio
import logging
from typing import get_args

import pytest

from kvferry.config import Config, FaultsConfig, ShippingFaultConfig
from kvferry.errors import Unavailable
from kvferry.spec import AttemptId
from kvtransfer.faults import NO_FAULTS, CommittedFault, Fault, FaultKind, Faults, faults_of, log_fault
from kvtransfer.in_process import InProcessShipment
from kvtransfer.receiver import ShipReceiver
from kvtransfer.sender import ShipSender
from kvtransfer.transport import FirstToken, SendOptions, ShipEvent
from tests.unit.kvtransfer.support import (
    ATTEMPT,
    EPOCH,
    LAYOUT,
    MemoryHost,
    MemorySource,
    contents_of,
    frames_of,
    make_offer,
)

STALL_S = 0.2
"""Progress timeout of a shipment that stalls."""


def test_no_faults_change_nothing() -> None:
    frames = frames_of(0)
    faulty = NO_FAULTS.apply(frames, 1)
    assert (faulty.frames, faulty.delay_s, faulty.stalls, faulty.committed) == (frames, 0.0, False, ())


def test_corruption_hits_one_sending_of_one_block() -> None:
    faults = Faults((Fault(FaultKind.CORRUPT, 0, nth=1),))
    frames = frames_of(0)
    (damaged,) = faults.apply(frames, 1).frames
    assert isinstance(damaged.payload, bytes)
    assert sum(left != right for left, right in zip(damaged.payload, contents_of(0), strict=True)) == 1
    assert damaged.digest == frames[0].digest
    assert faults.apply(frames, 2).frames == frames
    assert faults.apply(frames_of(1), 1).frames == frames_of(1)


def test_other_faults() -> None:
    frames = frames_of(0, max_frame_bytes=64)
    faulty = Faults((Fault(FaultKind.DELAY, 0, delay_s=0.5), Fault(FaultKind.DUPLICATE, 0))).apply(frames, 3)
    assert faulty.delay_s == 0.5
    assert faulty.frames == frames + frames
    assert Faults((Fault(FaultKind.DROP, 0),)).apply(frames, 1).frames == []
    stalled = Faults((Fault(FaultKind.STALL, 0),)).apply(frames, 1)
    assert stalled.stalls and stalled.frames == []


@pytest.mark.parametrize(
    ("fault", "hits"),
    [
        (Fault(FaultKind.DROP), {(1, 0, 1), (1, 0, 2), (1, 1, 1), (2, 0, 1)}),
        (Fault(FaultKind.DROP, 0), {(1, 0, 1), (1, 0, 2), (2, 0, 1)}),
        (Fault(FaultKind.DROP, nth=1), {(1, 0, 1), (1, 1, 1), (2, 0, 1)}),
        (Fault(FaultKind.DROP, attempt=1), {(1, 0, 1), (1, 0, 2), (1, 1, 1)}),
        (Fault(FaultKind.DROP, 0, nth=1, attempt=2), {(2, 0, 1)}),
    ],
    ids=["every", "one block", "one sending", "one attempt", "all three"],
)
def test_numbers_that_are_unset_mean_every_one(fault: Fault, hits: set[tuple[int, int, int]]) -> None:
    """Of (attempt, block, sending)."""
    sendings = {(1, 0, 1), (1, 0, 2), (1, 1, 1), (2, 0, 1)}
    assert {one for one in sendings if fault.hits(AttemptId("r", one[0]), one[1], one[2])} == hits


def test_what_was_committed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults((Fault(FaultKind.CORRUPT, 2), Fault(FaultKind.DROP, 3), Fault(FaultKind.DUPLICATE, 2)))
    committed = faults.apply(frames_of(2), 1).committed
    assert committed == tuple(CommittedFault(kind, ATTEMPT, 2, 1) for kind in (FaultKind.CORRUPT, FaultKind.DUPLICATE))
    log_fault(committed[0])
    (record,) = caplog.records
    assert (record.message, record.levelno) == ("fault_committed", logging.WARNING)
    fields = record.fields  # type: ignore[attr-defined]
    assert fields == {"kind": "corrupt", "block_index": 2, "nth": 1, "request_id": "request", "attempt": 1}


async def test_a_stalled_sender_is_silent_until_the_receiver_gives_it_up() -> None:
    """It sends nothing after the block, not even signs of life, which would keep the shipment for ever."""
    host, told = MemoryHost(), list[CommittedFault]()
    events: asyncio.Queue[ShipEvent] = asyncio.Queue()
    events.put_nowait(FirstToken((5,)))
    transport = InProcessShipment(
        lambda: ShipReceiver(layout=LAYOUT, epoch=EPOCH),
        lambda offer: host,
        send_options=SendOptions(faults=Faults((Fault(FaultKind.STALL, 1),)), on_fault=told.append),
    )
    shipping = transport.ship(ShipSender(make_offer(progress_timeout_s=STALL_S)), MemorySource(), events)
    with pytest.raises(Unavailable, match="the sender of the shipment was silent"):
        await shipping
    assert told == [CommittedFault(FaultKind.STALL, ATTEMPT, 1, 1)]
    assert not any(host.blocks[1]) and not any(host.blocks[2])
    assert host.num_releases == 1


def test_kinds_of_the_configuration_are_ours() -> None:
    annotation = ShippingFaultConfig.model_fields["kind"].annotation
    assert set(get_args(annotation)) == {kind.value for kind in FaultKind}


def test_faults_come_from_the_configuration() -> None:
    config = FaultsConfig(
        allow_faults=True,
        shipping=(
            ShippingFaultConfig(kind="delay", block_index=0, nth=2, attempt=3, delay_s=0.5),
            ShippingFaultConfig(kind="stall"),
        ),
    )
    delay = Fault(FaultKind.DELAY, 0, nth=2, attempt=3, delay_s=0.5)
    assert faults_of(config) == Faults((delay, Fault(FaultKind.STALL)))
    assert faults_of(Config().faults) == NO_FAULTS
