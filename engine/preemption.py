"""How a preempted unit gives up its blocks: recompute or swap, by a cost model measured at start.

Recompute costs the time to compute again all tokens whose KV is dropped; swap costs copying the blocks out and in. What
the prefix cache may still hold later is not counted on: a unit is preempted because blocks are short.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

from engine.sequence import Sequence

PreemptionMode = Literal["auto", "recompute", "swap"]


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """The choice between recompute and swap.

    Attributes:
        mode: "auto" compares the costs, the others force one kind; a full host pool always means recompute.
        recompute_s_per_token: time of one token of a prefill chunk.
        swap_s_per_block: time to copy one block, one way.
    """

    mode: PreemptionMode = "recompute"
    recompute_s_per_token: float = 0.0
    swap_s_per_block: float = 0.0

    def prefers_swap(self, unit: SequenceOf[Sequence], block_size: int) -> bool:
        """Whether `unit` should be swapped if the host pool has room; what beams share is computed and copied once."""
        if self.mode != "auto":
            return self.mode == "swap"
        num_blocks = len({block_id for sequence in unit for block_id in sequence.held_blocks})
        num_tokens = min(sum(sequence.num_computed_tokens for sequence in unit), num_blocks * block_size)
        return 2 * num_blocks * self.swap_s_per_block < num_tokens * self.recompute_s_per_token


RECOMPUTE = PreemptionPolicy()
"""Never swap."""
