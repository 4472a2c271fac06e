"""Faults that a sending end commits on purpose, for tests and for operators who rehearse failures. None by default."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from kvtransfer.messages import BlockFrame


class FaultKind(enum.Enum):
    """What happens to a block on its way."""

    CORRUPT = "corrupt"  # a byte is flipped, the digest is not
    DROP = "drop"  # nothing is sent
    DELAY = "delay"  # it leaves `delay_s` later; heartbeats go on
    DUPLICATE = "duplicate"  # all its frames are sent twice


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `kind` for block `block_index`, on its nth sending (from 1), or on every one where `nth` is None."""

    kind: FaultKind
    block_index: int
    nth: int | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultyBlock:
    """What to do instead of sending `frames` at once: wait, then send these."""

    delay_s: float
    frames: list[BlockFrame]


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one shipment."""

    faults: tuple[Fault, ...] = ()

    def apply(self, frames: list[BlockFrame], nth: int) -> FaultyBlock:
        """What becomes of the frames of one block on its nth sending (from 1)."""
        delay_s = 0.0
        for fault in self.faults:
            if not frames or fault.block_index != frames[0].block_index or fault.nth not in (None, nth):
                continue
            match fault.kind:
                case FaultKind.CORRUPT:
                    frames = [_corrupted(frames[0]), *frames[1:]]
                case FaultKind.DROP:
                    frames = []
                case FaultKind.DELAY:
                    delay_s += fault.delay_s
                case FaultKind.DUPLICATE:
                    frames = [*frames, *frames]
        return FaultyBlock(delay_s, frames)


NO_FAULTS = Faults()


def _corrupted(frame: BlockFrame) -> BlockFrame:
    payload = bytearray(frame.payload)
    payload[len(payload) // 2] ^= 0x01
    return dataclasses.replace(frame, payload=bytes(payload))
