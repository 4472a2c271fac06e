"""Faults that a sending end commits on purpose, for tests and for operators who rehearse failures. None by default."""

from __future__ import annotations

import dataclasses
import enum
import logging
from dataclasses import dataclass

from kvferry.config import FaultsConfig
from kvferry.spec import AttemptId
from kvferry.telemetry import log_event
from kvtransfer.messages import BlockFrame, Region

logger = logging.getLogger(__name__)


class FaultKind(enum.Enum):
    """What happens to a block on its way."""

    CORRUPT = "corrupt"  # a byte is flipped, the digest is not
    DROP = "drop"  # nothing is sent
    DELAY = "delay"  # it leaves `delay_s` later; heartbeats go on
    DUPLICATE = "duplicate"  # all its frames are sent twice
    STALL = "stall"  # neither it nor anything after it is sent, heartbeats included; the stream stays open


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `kind` for block `block_index`, on its nth sending (from 1), in attempt number `attempt`.

    Every block, sending or attempt where the number is None.
    """

    kind: FaultKind
    block_index: int | None = None
    nth: int | None = None
    delay_s: float = 0.0
    attempt: int | None = None

    def hits(self, id: AttemptId, block_index: int, nth: int) -> bool:
        """Whether it is committed on this sending."""
        return (
            self.block_index in (None, block_index) and self.nth in (None, nth) and self.attempt in (None, id.attempt)
        )


@dataclass(frozen=True, slots=True)
class CommittedFault:
    """A fault that happened: to what, and on which sending."""

    kind: FaultKind
    id: AttemptId
    block_index: int
    nth: int


@dataclass(frozen=True, slots=True)
class FaultyBlock:
    """What to do instead of sending the frames of a block at once: wait, then send these, or nothing any more.

    Attributes:
        delay_s: how long to wait.
        frames: what to send.
        stalls: whether nothing may be sent from now on.
        committed: what was done to the block.
    """

    delay_s: float
    frames: list[BlockFrame]
    stalls: bool = False
    committed: tuple[CommittedFault, ...] = ()


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one shipment."""

    faults: tuple[Fault, ...] = ()

    def apply(self, frames: list[BlockFrame], nth: int) -> FaultyBlock:
        """What becomes of the frames of one block, at least one, on its nth sending (from 1)."""
        id, block_index = frames[0].id, frames[0].block_index
        delay_s, stalls, committed = 0.0, False, []
        for fault in self.faults:
            if not fault.hits(id, block_index, nth):
                continue
            committed.append(CommittedFault(fault.kind, id, block_index, nth))
            match fault.kind:
                case FaultKind.CORRUPT:
                    frames = [_corrupted(frame) for frame in frames[:1]] + frames[1:]
                case FaultKind.DROP:
                    frames = []
                case FaultKind.DELAY:
                    delay_s += fault.delay_s
                case FaultKind.DUPLICATE:
                    frames = [*frames, *frames]
                case FaultKind.STALL:
                    frames, stalls = [], True
        return FaultyBlock(delay_s, frames, stalls, tuple(committed))


NO_FAULTS = Faults()


def faults_of(config: FaultsConfig) -> Faults:
    """Those that the configuration asks for."""
    return Faults(
        tuple(
            Fault(FaultKind(one.kind), one.block_index, one.nth, one.delay_s or 0.0, one.attempt)
            for one in config.shipping
        )
    )


def log_fault(fault: CommittedFault) -> None:
    """One event, so that whoever reads the log does not take what follows for a failure."""
    log_event(
        logger,
        "fault_committed",
        level=logging.WARNING,
        kind=fault.kind.value,
        block_index=fault.block_index,
        nth=fault.nth,
        request_id=fault.id.request_id,
        attempt=fault.id.attempt,
    )


def _corrupted(frame: BlockFrame) -> BlockFrame:
    assert not isinstance(frame.payload, Region), "faults are committed before a payload is staged"
    payload = bytearray(frame.payload)
    payload[len(payload) // 2] ^= 0x01
    return dataclasses.replace(frame, payload=bytes(payload))
