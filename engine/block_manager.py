"""Owner of the block tables: matches prefixes, allocates, publishes and frees the blocks of sequences.

A sequence's path: `admit` (hits pinned, room for all known tokens) or `reserve` (the same for KV that arrives from
elsewhere), `grow` for each further token, `publish` when blocks are full and computed, `free` at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.block_pool import BlockPool
from engine.sequence import Sequence


class BlockManager:
    """Block tables over one pool.

    Args:
        pool: the blocks.
        block_size: tokens of one block.
        num_watermark_blocks: blocks that stay available when a sequence joins running ones, so that those can grow.
        prefix_caching: whether full blocks are published and looked up.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, num_watermark_blocks: int = 1, prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_watermark_blocks = num_watermark_blocks
        self.prefix_caching = prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Blocks of the longest published run of full blocks among the first `num_tokens` tokens; none is touched."""
        if not (self.prefix_caching and sequence.use_prefix_cache):
            return []
        hits: list[int] = []
        for index, block_hash in enumerate(sequence.block_hashes(num_tokens // self.block_size, self.block_size)):
            block_id = self.pool.lookup(block_hash, self._tokens_of_block(sequence, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _tokens_of_block(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def admit(self, sequence: Sequence, *, keep_watermark: bool) -> bool:
        """Gives `sequence` blocks for all its known tokens, or nothing.

        Hits stop one token short of the end: the last known token must be computed to sample the next one.
        """
        hits = self.match_prefix(sequence, sequence.num_tokens - 1)
        return self._take(sequence, hits, sequence.num_tokens, keep_watermark=keep_watermark)

    def reserve(self, sequence: Sequence, *, keep_watermark: bool) -> bool:
        """Like `admit`, for a sequence whose KV arrives from elsewhere: room for one token more, hits up to the end."""
        hits = self.match_prefix(sequence, sequence.num_tokens)
        return self._take(sequence, hits, sequence.num_tokens + 1, keep_watermark=keep_watermark)

    def _take(self, sequence: Sequence, hits: list[int], num_tokens: int, *, keep_watermark: bool) -> bool:
        if sequence.block_table:
            raise ValueError(f"sequence {sequence.seq_id} has blocks already")
        num_new = self.num_blocks_for(num_tokens) - len(hits)
        num_revived = sum(self.pool.ref_count(block_id) == 0 for block_id in hits)
        spare = self.num_watermark_blocks if keep_watermark else 0
        if self.pool.counts.available - num_revived < num_new + spare:
            return False
        for block_id in hits:
            self.pool.touch(block_id)
        new = self.pool.allocate(num_new)
        assert new is not None, "room was checked before"
        sequence.block_table = hits + new
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_published_blocks = len(hits)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the table to cover `num_tokens` tokens; False, and nothing changed, when there is no room."""
        num_missing = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        new = self.pool.allocate(num_missing)
        if new is None:
            return False
        sequence.block_table.extend(new)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Publishes the full blocks whose KV is computed."""
        if not (self.prefix_caching and sequence.use_prefix_cache):
            return
        num_full = sequence.num_computed_tokens // self.block_size
        hashes = sequence.block_hashes(num_full, self.block_size)
        for index in range(sequence.num_published_blocks, num_full):
            self.pool.publish(sequence.block_table[index], hashes[index], self._tokens_of_block(sequence, index))
        sequence.num_published_blocks = num_full

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks of `sequence` back, the deepest first; without blocks it does nothing."""
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the pool's counts are those of the block tables of `sequences`."""
        self.pool.check_integrity(Counter(block_id for sequence in sequences for block_id in sequence.block_table))
