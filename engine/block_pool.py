"""All KV blocks of one device: who holds them, which are empty, which are cached.

Every block is in exactly one state: *used* (reference count above zero), *cached* (count zero, its contents may be hit)
or *free* (count zero, its contents mean nothing). Blocks are taken from the free ones first, then from the cached ones,
least recently freed first. A cached block is found by the hash of its content, and the token ids are compared on a hit:
even a collision of the hash cannot give one prompt another's KV. Torch-free; block contents live in the runner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the three add up to the pool's size."""

    free: int
    cached: int
    used: int

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return self.free + self.cached


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    block_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()


class BlockPool:
    """Allocation, reference counts and the index of published blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # eviction order, oldest first
        self._by_hash: dict[bytes, int] = {}

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free=free, cached=cached, used=self.num_blocks - free - cached)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes `num_blocks` blocks with reference count 1; None, and nothing changed, when there are not enough."""
        if num_blocks > len(self._free) + len(self._cached):
            return None
        return [self._take_one() for _ in range(num_blocks)]

    def _take_one(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
            self.num_evictions += 1
        self._blocks[block_id].ref_count = 1
        return block_id

    def touch(self, block_id: int) -> None:
        """Adds one holder; a cached block becomes used."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is free and cannot be touched")
            del self._cached[block_id]
        block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one holder of each block, in the order given: the first ones are evicted first."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                raise ValueError(f"block {block_id} is freed more often than it was taken")
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def publish(self, block_id: int, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Makes a used block, whose contents are complete, findable. A hash that is known already keeps its block."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            raise ValueError(f"block {block_id} is not in use and cannot be published")
        if block.block_hash is not None or block_hash in self._by_hash:
            return
        block.block_hash = block_hash
        block.token_ids = tuple(token_ids)
        self._by_hash[block_hash] = block_id

    def lookup(self, block_hash: bytes, token_ids: Sequence[int]) -> int | None:
        """The published block with this hash and these tokens; does not touch it."""
        block_id = self._by_hash.get(block_hash)
        if block_id is None or self._blocks[block_id].token_ids != tuple(token_ids):
            return None
        return block_id

    def unpublish(self, block_id: int) -> None:
        """Makes a block unfindable, for example because its contents proved wrong."""
        self._forget(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def flush(self) -> int:
        """Unpublishes every block; returns how many were published."""
        published = list(self._by_hash.values())
        for block_id in published:
            self.unpublish(block_id)
        return len(published)

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None
            block.token_ids = ()

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raises AssertionError unless free + cached + used = total and each count equals its holders."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks both free and cached: {sorted(free & cached)}"
        for block_id, block in enumerate(self._blocks):
            expected = holders.get(block_id, 0)
            assert block.ref_count == expected, f"block {block_id}: count {block.ref_count}, holders {expected}"
            assert (block.ref_count == 0) == (block_id in free or block_id in cached), f"block {block_id} is nowhere"
            if block_id in free:
                assert block.block_hash is None, f"free block {block_id} is published"
            if block_id in cached:
                assert block.block_hash is not None, f"cached block {block_id} is not published"
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) == block_id, f"index and block {block_id} disagree"
        assert len(self._by_hash) == sum(block.block_hash is not None for block in self._blocks)
