"""Figures of one engine: load and memory now, counters since its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class ShipCounters:
    """Of one worker since its start: sequences it shipped to the end, blocks it sent, or received and verified, bytes
    of their contents, wrong digests."""

    num_sequences: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_nacks: int = 0


@dataclass(slots=True)
class HitCounter:
    """Tokens of admitted prompts, and those of them found in the prefix cache; resumes do not count."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class MemoryCounters:
    """What one engine's memory management did since its start.

    Attributes:
        num_recompute_preemptions, num_swap_preemptions: sequences preempted, by kind.
        num_parked_prompts: finished prompts whose KV was dropped while they waited for a decode worker's grant.
        num_recomputed_tokens: tokens whose KV was dropped in one of these ways and not found in the prefix cache again.
        num_blocks_swapped_out, num_blocks_swapped_in: blocks copied to the host pool and back.
        swap_s: time those copies took.
        num_blocks_copied: copies on write.
        num_prefix_waits: admissions put off because another sequence was computing the same prefix.
        hits: by tenant.
    """

    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_parked_prompts: int = 0
    num_recomputed_tokens: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    swap_s: float = 0.0
    num_blocks_copied: int = 0
    num_prefix_waits: int = 0
    hits: dict[str, HitCounter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Blocks by state (free, cached and used add up to `num_blocks`), queues, and counters that only grow.

    Attributes:
        num_integrity_faults: times the books of the pool proved wrong when they were checked.
        num_unsound_hits: cached blocks whose contents had changed in memory when they were to be used.
        num_drafts, num_draft_tokens, num_accepted_tokens: of speculation: drafts verified, the tokens in them, and
            those of them that came out.
    """

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_prefill_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int
    num_evictions: int = 0
    num_pinned_blocks: int = 0
    num_integrity_faults: int = 0
    num_unsound_hits: int = 0
    max_running: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    memory: MemoryCounters = field(default_factory=MemoryCounters)


@dataclass(frozen=True, slots=True)
class TenantMemory:
    """Blocks charged to one tenant, its quotas (None: no bound) and its hits; the pinned blocks are among the used."""

    tenant: str
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_pinned_blocks: int = 0
    max_used_blocks: int | None = None
    max_cached_blocks: int | None = None
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The KV memory of one engine between two steps.

    Attributes:
        num_free_blocks, num_cached_blocks, num_used_blocks: add up to `num_blocks`.
        num_pinned_blocks: among the used.
        num_filled_slots: token slots of used blocks that hold KV; a shared block counts once.
        num_tail_slots: token slots of used blocks behind the last known token of every holder: the tail waste. Slots of
            known tokens whose KV is yet to come are neither.
        ref_counts: used blocks by number of holders, a pin being one.
        tenants: by name.
        tier_blocks: blocks held by sequences, by tier rank; one that several tiers hold counts for the first of them.
        num_swap_blocks, num_used_swap_blocks: size and fill of the host pool.
        counters: since the engine's start.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_pinned_blocks: int
    num_filled_slots: int
    num_tail_slots: int
    ref_counts: Mapping[int, int]
    tenants: tuple[TenantMemory, ...]
    tier_blocks: Mapping[int, int]
    num_swap_blocks: int
    num_used_swap_blocks: int
    num_evictions: int
    counters: MemoryCounters

    @property
    def fragmentation(self) -> float:
        """Share of the used blocks' token slots that hold no KV; 0 when no block is used."""
        num_slots = self.num_used_blocks * self.block_size
        return 1 - self.num_filled_slots / num_slots if num_slots else 0.0
