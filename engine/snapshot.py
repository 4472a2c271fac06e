"""What an operator sees of one engine's KV memory, in one pass between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from engine.block_pool import BlockPool, BlockQuota, TenantBlocks
from engine.core import EngineCore
from engine.sequence import Sequence
from kvferry.stats import HitCounter, MemorySnapshot, TenantMemory


def memory_snapshot(core: EngineCore) -> MemorySnapshot:
    """The memory of `core` now; a copy that later steps do not change. Runs on the engine's thread."""
    pool, counters = core.pool, core.memory
    counts, census = pool.counts, pool.census()
    filling = _Filling(core.layout.block_size)
    filling.add_published(pool)
    for sequence in core.sequences.values():
        filling.add(sequence)
    return MemorySnapshot(
        num_blocks=pool.num_blocks,
        block_size=core.layout.block_size,
        block_bytes=core.layout.block_bytes,
        num_free_blocks=counts.free,
        num_cached_blocks=counts.cached,
        num_used_blocks=counts.used,
        num_pinned_blocks=pool.num_pinned,
        num_filled_slots=sum(filling.filled.values()),
        num_tail_slots=counts.used * core.layout.block_size - sum(filling.known.values()),
        ref_counts=census.ref_counts,
        tenants=tuple(_tenants(census.tenants, pool.quotas, counters.hits)),
        tier_blocks=dict(sorted(Counter(filling.tier_ranks.values()).items())),
        num_swap_blocks=core.swap_space.num_slots,
        num_used_swap_blocks=core.swap_space.num_used,
        num_evictions=pool.num_evictions,
        counters=replace(counters, hits={name: replace(hits) for name, hits in counters.hits.items()}),
    )


@dataclass(slots=True)
class _Filling:
    """Tokens in each used block, and the first tier that holds it; a shared block counts as its fullest holder says."""

    block_size: int
    filled: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    tier_ranks: dict[int, int] = field(default_factory=dict)

    def add_published(self, pool: BlockPool) -> None:
        """Published blocks are full, also where only a pin holds them."""
        for block_id in pool.published_blocks():
            if pool.ref_count(block_id) > 0:
                self.filled[block_id] = self.known[block_id] = self.block_size

    def add(self, sequence: Sequence) -> None:
        for index in range(sequence.num_dropped_blocks, len(sequence.block_table)):
            block_id, start = sequence.block_table[index], index * self.block_size
            for tokens, num_tokens in (
                (self.filled, sequence.num_computed_tokens),
                (self.known, sequence.num_tokens),
            ):
                num_here = min(max(num_tokens - start, 0), self.block_size)
                tokens[block_id] = max(tokens.get(block_id, 0), num_here)
            rank = sequence.priority.tier_rank
            self.tier_ranks[block_id] = min(self.tier_ranks.get(block_id, rank), rank)


def _tenants(
    blocks: Mapping[str, TenantBlocks], quotas: Mapping[str, BlockQuota], hits: Mapping[str, HitCounter]
) -> Iterable[TenantMemory]:
    for tenant in sorted({*blocks, *quotas, *hits}):
        own, quota = blocks.get(tenant, TenantBlocks()), quotas.get(tenant, BlockQuota())
        found = hits.get(tenant, HitCounter())
        yield TenantMemory(
            tenant,
            num_used_blocks=own.num_used,
            num_cached_blocks=own.num_cached,
            num_pinned_blocks=own.num_pinned,
            max_used_blocks=quota.max_used_blocks,
            max_cached_blocks=quota.max_cached_blocks,
            num_queried_tokens=found.num_queried_tokens,
            num_hit_tokens=found.num_hit_tokens,
        )
