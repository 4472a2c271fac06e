"""Block pool: states, reference counts, the hash index and eviction order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockCounts, BlockPool


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.counts == BlockCounts(free=1, cached=0, used=3)


def test_a_block_freed_too_often_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.free(blocks)


def test_published_blocks_stay_cached_and_are_evicted_in_the_order_they_were_freed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block_id in blocks:
        pool.publish(block_id, bytes([block_id]), [block_id])
    pool.free(reversed(blocks))  # deepest first
    assert pool.counts == BlockCounts(free=0, cached=3, used=0)
    assert pool.allocate(1) == [2]
    assert pool.lookup(bytes([2]), [2]) is None, "an evicted block must not be found (stale hash)"
    assert pool.lookup(bytes([0]), [0]) == 0
    assert pool.num_evictions == 1


def test_a_hash_collision_is_a_miss() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1) or [-1]
    pool.publish(block_id, b"same hash", [1, 2, 3])
    assert pool.lookup(b"same hash", [1, 2, 4]) is None
    assert pool.lookup(b"same hash", [1, 2, 3]) == block_id


def test_the_first_block_of_a_hash_stays_the_published_one() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or [-1, -1]
    pool.publish(first, b"h", [1])
    pool.publish(second, b"h", [1])
    pool.free([second])
    assert pool.counts == BlockCounts(free=1, cached=0, used=1)
    assert pool.lookup(b"h", [1]) == first


def test_only_blocks_in_use_can_be_published() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="not in use"):
        pool.publish(0, b"h", [1])


def test_flush_unpublishes_cached_and_used_blocks() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or [-1, -1]
    pool.publish(first, b"1", [1])
    pool.publish(second, b"2", [2])
    pool.free([first])
    assert pool.flush() == 2
    assert pool.counts == BlockCounts(free=1, cached=0, used=1)
    pool.check_integrity({second: 1})


Operation = tuple[str, int]
OPERATIONS = ("take", "share", "publish", "free", "hit", "unpublish")


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7))))
def test_every_operation_keeps_the_books(operations: list[Operation]) -> None:
    """A model of the pool in the test: holders by sequence; the pool's own check runs after every operation."""
    pool = BlockPool(6)
    held: list[list[int]] = []
    for name, argument in operations:
        if name == "take":
            blocks = pool.allocate(argument % 4)
            assert (blocks is None) == (argument % 4 > 6 - len({b for h in held for b in h}))
            held += [blocks] if blocks else []
        elif held:
            chosen = held[argument % len(held)]
            if name == "share":
                for block_id in chosen:
                    pool.touch(block_id)
                held.append(list(chosen))
            elif name == "publish":
                pool.publish(chosen[0], bytes([argument]), [argument])
            elif name == "unpublish":
                pool.unpublish(chosen[0])
            elif name == "free":
                pool.free(reversed(chosen))
                held.remove(chosen)
        if name == "hit":
            found = pool.lookup(bytes([argument]), [argument])
            if found is not None:
                pool.touch(found)
                held.append([found])
        pool.check_integrity(Counter(block_id for blocks in held for block_id in blocks))


def test_check_integrity_finds_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="count 1, holders 0"):
        pool.check_integrity({})
