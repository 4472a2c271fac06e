"""What must happen to block contents before a step runs: copies on write, and swaps. Carried out in the order planned.

The order is what makes it right: a block that is freed and taken again within one round of scheduling is read before it
is written, because its reader was planned before its writer.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.runner import Runner
from engine.swap_space import SwapSpace


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy on write: `target` gets the contents of `source`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """The block's contents go to the host pool."""

    block_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class SwapIn:
    """The block gets its contents from the host pool."""

    slot: int
    block_id: int


MemoryOp = CopyBlock | SwapOut | SwapIn


def perform(ops: list[MemoryOp], runner: Runner, swap_space: SwapSpace) -> None:
    """Carries the operations out, in order."""
    for op in ops:
        match op:
            case CopyBlock(source, target):
                runner.block_view(target)[:] = runner.block_view(source)
            case SwapOut(block_id, slot):
                swap_space.store(runner, block_id, slot)
            case SwapIn(slot, block_id):
                swap_space.load(runner, slot, block_id)
