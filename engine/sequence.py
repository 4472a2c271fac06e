"""One sequence: the mutable state of one choice, or one beam, of one request inside a worker.

Life: WAITING (queued, or known and not offered yet) → RUNNING (in the batch) → FINISHED. A prefill worker's sequence
goes from RUNNING to HELD: its prompt is computed, its first tokens sampled, and its blocks are kept until the shipment
is acknowledged. While the shipment waits for its grant they may be taken: then it is PARKED, and with the grant WAITING
again, to be computed anew. A decode worker's sequence becomes RESERVED: blocks are set aside for KV that is still on
the way. Preemption leads from RUNNING back to WAITING. A prompt of several choices is one sequence until its first
tokens are known, then it forks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.constraint import Constraint
from engine.hold import Hold
from kvferry.block_hash import hash_block
from kvferry.sampling import BeamParams, SamplingParams
from kvferry.spec import PromptScoring

if TYPE_CHECKING:
    from engine.gang import Gang
    from engine.speculation import SequenceLookup
    from engine.swap_space import SwappedTable


class SequenceStatus(enum.Enum):
    """Where a sequence is; see the module docstring."""

    RESERVED = "reserved"
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    PARKED = "parked"
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
    `num_computed_tokens` of them have their KV in the blocks of `block_table`. `seq_id` is unique in the engine,
    `owner_id` names the attempt that all forks of one prompt belong to.
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
        owner_id: str | None = None,
        choice: int = 0,
        num_choices: int = 1,
        beam: BeamParams | None = None,
        tenant: str = "",
        scoring: PromptScoring | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.owner_id = owner_id or seq_id
        self.choice = choice
        self.num_choices = num_choices  # 1 again once it has forked
        self.stopped_choices: set[int] = set()  # choices that ended before it forked
        self.beam = beam
        self.tenant = tenant
        self.gang: Gang | None = None  # the beams it is stepped with
        self.token_ids = list(token_ids)
        self.sampling = sampling
        self.constraint = constraint  # the grammar that its output follows, its own
        self.num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self.num_given_tokens = len(token_ids)  # known at arrival: prompt and, on a resume, earlier output
        self.priority = priority or Priority()
        self.hold_after_prefill = hold_after_prefill
        self.hold = Hold()  # whether its blocks stay while it is held
        self.use_prefix_cache = use_prefix_cache
        self.status = SequenceStatus.WAITING
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prefix-cache hits at first admission; None before it
        self.num_published_blocks = 0  # leading full blocks whose hash is in the pool
        self.num_digested_blocks = 0  # leading full blocks that have a digest
        self.num_dropped_blocks = 0  # leading blocks that left the attention window and were given back
        self.num_preemptions = 0
        self.num_lost_tokens = 0  # computed tokens given up by the last preemption, or when it was parked
        self.was_started = False
        self.has_waited_for_prefix = False
        self.waits_for_quota = False  # it is its tenant's quota that keeps it waiting, not the pool
        self.scoring = scoring  # log-probabilities of the prompt that are still to be told; None: no more
        self.swapped: SwappedTable | None = None  # where its blocks are while it is swapped out
        self.lookup: SequenceLookup | None = None  # what its drafts are taken from, made when it first speculates
        self.prefix_leader: Sequence | None = None  # computes the blocks they share; a resumed beam waits for it
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
    def num_hittable_tokens(self) -> int:
        """Leading tokens whose KV may be taken from the prefix cache.

        The last known one must be computed to sample the next, and so must those whose logits say how likely the next
        prompt token is, where that is still to be told.
        """
        num_tokens = self.num_tokens - 1
        return num_tokens if self.scoring is None else min(num_tokens, self.scoring.first_index - 1)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of the table that it holds; entries before them are stale."""
        return self.block_table[self.num_dropped_blocks :]

    @property
    def unit(self) -> list[Sequence]:
        """The sequences that are scheduled and preempted with it, itself included."""
        return self.gang.members if self.gang is not None else [self]

    @property
    def num_forks(self) -> int:
        """Sequences that will fork from it once its first tokens are known."""
        if self.gang is not None or self.hold_after_prefill:
            return 0
        return self.beam.width - 1 if self.beam is not None else self.num_choices - 1

    @property
    def num_seats(self) -> int:
        """Places in the batch it cannot go on without: beams run together, choices wait for places one by one."""
        return 1 + self.num_forks if self.beam is not None else 1

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV this sequence can ever hold; the last output token's KV is never computed."""
        if self.hold_after_prefill:
            return self.num_given_tokens
        return self.num_prompt_tokens + self.sampling.max_tokens - 1

    def told_scores(self, num_scores: int) -> None:
        """The next log-probabilities of its prompt were told; a preemption will not bring them again."""
        assert self.scoring is not None
        first_index = self.scoring.first_index + num_scores
        self.scoring = replace(self.scoring, first_index=first_index) if first_index < self.num_prompt_tokens else None

    def prefix_is_computed(self) -> bool:
        """Whether the blocks that a resumed beam shares with its gang's first member are computed."""
        leader = self.prefix_leader
        if leader is not None and leader.num_computed_tokens >= self.num_computed_tokens:
            self.prefix_leader = leader = None
        return leader is None

    def fork(self, seq_id: str, choice: int) -> Sequence:
        """A sequence with the same tokens and the same table; the block manager counts it as a holder."""
        fork = Sequence(
            seq_id,
            self.token_ids,
            self.sampling,
            num_prompt_tokens=self.num_prompt_tokens,
            priority=self.priority,
            hash_root=self._hash_root,
            use_prefix_cache=self.use_prefix_cache,
            owner_id=self.owner_id,
            choice=choice,
            beam=self.beam,
            tenant=self.tenant,
            constraint=None if self.constraint is None else self.constraint.fork(),
        )
        fork.num_given_tokens = self.num_given_tokens
        fork.gang = self.gang
        fork.block_table = list(self.block_table)
        fork.num_computed_tokens = self.num_computed_tokens
        fork.num_cached_tokens = self.num_cached_tokens
        fork.num_published_blocks = self.num_published_blocks
        fork.num_digested_blocks = self.num_digested_blocks
        fork.num_dropped_blocks = self.num_dropped_blocks
        fork.num_preemptions = self.num_preemptions
        fork.was_started = self.was_started
        fork._block_hashes = list(self._block_hashes)
        return fork

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` full blocks; each is computed once."""
        while len(self._block_hashes) < num_blocks:
            parent = self._block_hashes[-1] if self._block_hashes else self._hash_root
            start = len(self._block_hashes) * block_size
            self._block_hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return self._block_hashes[:num_blocks]
