"""The host pool that preempted sequences' blocks are copied to: bounded, all blocks of a unit or none.

The block manager plans (`take`, `give_back`), the operations are carried out in order with the others of the step
(`engine/memory_ops.py`). Torch-free: a block is its raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.runner import Runner


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """Where the blocks of one swapped sequence are: one slot for each block it held, in order of the table."""

    slots: tuple[int, ...]


class SwapSpace:
    """Slots of one block each; shared blocks of a unit lie in one slot.

    Args:
        num_slots: blocks it can hold; 0 switches swapping off. The memory is touched, and so taken, on first use.
        block_bytes: size of a block.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self._block_bytes = block_bytes
        self._memory = memoryview(np.zeros(num_slots * block_bytes, dtype=np.uint8).data)  # pages come when touched
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, num_slots: int) -> list[int] | None:
        """Slots for the blocks of one unit; None, and nothing changed, when there are not enough."""
        if num_slots > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_slots)]

    def give_back(self, slots: set[int]) -> None:
        """The contents of these slots are not needed any more."""
        assert not slots & set(self._free), "a slot is given back twice"
        self._free.extend(slots)

    def store(self, runner: Runner, block_id: int, slot: int) -> None:
        """Copies a block's bytes into a slot."""
        self._slot(slot)[:] = runner.block_view(block_id)

    def load(self, runner: Runner, slot: int, block_id: int) -> None:
        """Copies a slot's bytes into a block."""
        runner.block_view(block_id)[:] = self._slot(slot)

    def _slot(self, slot: int) -> memoryview:
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]
