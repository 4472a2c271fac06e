"""One sequence: the mutable state of one choice of one request inside a worker.

Life: WAITING (in the queue) → RUNNING (in the batch) → FINISHED. A prefill worker's sequence goes from RUNNING to HELD:
its prompt is computed, its first token sampled, and its blocks are kept until the shipment is acknowledged. A decode
worker's sequence begins RESERVED: blocks are set aside for KV that is still on the way. Preemption leads from RUNNING
back to WAITING.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvferry.block_hash import hash_block
from kvferry.sampling import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is; see the module docstring."""

    RESERVED = "reserved"
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Priority:
    """Order among sequences: tier rank, then earliest deadline, then arrival. Smaller goes first."""

    tier_rank: int = 0
    deadline_unix_ms: int = 0  # 0: none
    arrival: int = 0

    @property
    def key(self) -> tuple[int, float, int]:
        return (self.tier_rank, self.deadline_unix_ms or math.inf, self.arrival)


class Sequence:
    """Tokens, blocks and progress of one choice.

    `token_ids` holds the prompt, then output tokens; those made before a resume are part of what is given at the start.
    `num_computed_tokens` of them have their KV in the blocks of `block_table`.
    """

    def __init__(
        self,
        seq_id: str,
        token_ids: SequenceOf[int],
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int | None = None,
        priority: Priority | None = None,
        hash_root: bytes = b"",
        hold_after_prefill: bool = False,
        use_prefix_cache: bool = True,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(token_ids)
        self.sampling = sampling
        self.num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self.num_given_tokens = len(token_ids)  # known at arrival: prompt and, on a resume, earlier output
        self.priority = priority or Priority()
        self.hold_after_prefill = hold_after_prefill
        self.use_prefix_cache = use_prefix_cache
        self.status = SequenceStatus.WAITING
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prefix-cache hits at first admission; None before it
        self.num_published_blocks = 0  # leading full blocks whose hash is in the pool
        self.num_preemptions = 0
        self._hash_root = hash_root
        self._block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the request, those before a resume counted."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens given at arrival still lack their KV (also after a preemption)."""
        return self.num_uncomputed_tokens > 1 or self.num_tokens == self.num_given_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV this sequence can ever hold; the last output token's KV is never computed."""
        if self.hold_after_prefill:
            return self.num_given_tokens
        return self.num_prompt_tokens + self.sampling.max_tokens - 1

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` full blocks; each is computed once."""
        while len(self._block_hashes) < num_blocks:
            parent = self._block_hashes[-1] if self._block_hashes else self._hash_root
            start = len(self._block_hashes) * block_size
            self._block_hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return self._block_hashes[:num_blocks]
