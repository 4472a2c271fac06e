"""Block pool: states, reference counts, the hash index and eviction order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import MAX_PINS, BlockCounts, BlockPool, BlockQuota, PoolCensus, Room, TenantBlocks
from kvferry.errors import ResourceExhausted


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


# -- quotas -----------------------------------------------------------------------------------------------------------


def cache(pool: BlockPool, num_blocks: int, first: int = 0, tenant: str = "") -> list[int]:
    """Takes blocks, publishes them under the hashes first, first + 1 …, and frees them, the deepest first."""
    blocks = pool.allocate(num_blocks, tenant)
    assert blocks is not None
    for index, block_id in enumerate(blocks, start=first):
        pool.publish(block_id, bytes([index]), [index])
    pool.free(reversed(blocks))
    return blocks


def test_a_tenant_takes_no_more_than_its_quota() -> None:
    pool = BlockPool(8, {"a": BlockQuota(max_used_blocks=3)})
    assert pool.allocate(4, "a") is None
    assert pool.allocate(3, "a") == [0, 1, 2]
    assert pool.allocate(1, "a") is None
    assert pool.room(1, tenant="a") is Room.OVER_QUOTA
    assert pool.room(5, tenant="b") is Room.ENOUGH
    assert pool.room(5, spare=1, tenant="b") is Room.NO_BLOCKS
    assert pool.max_used_blocks("a") == 3
    assert pool.max_used_blocks("b") == 8
    pool.free([2])
    assert pool.allocate(1, "a") == [2]


def test_revived_blocks_count_for_the_quota_of_whoever_revives_them() -> None:
    """Blocks shared by a salt: what one tenant goes on using is not charged to the other for ever."""
    pool = BlockPool(8, {"a": BlockQuota(max_used_blocks=3)})
    own = cache(pool, 2, first=0, tenant="a")
    foreign = cache(pool, 2, first=2, tenant="b")
    assert pool.room(1, revived=own, tenant="a") is Room.ENOUGH
    assert pool.room(2, revived=own, tenant="a") is Room.OVER_QUOTA
    assert pool.room(2, revived=foreign, tenant="a") is Room.OVER_QUOTA
    pool.touch(own[0], "b")
    assert pool.tenant(own[0]) == "b"
    assert pool.room(3, revived=own[:1], tenant="a") is Room.ENOUGH, "a block in use costs nothing more"
    pool.touch(foreign[0], "a")
    assert pool.allocate(3, "a") is None, "the revived block is charged"
    assert pool.allocate(2, "a") is not None
    pool.check_integrity({own[0]: 1, foreign[0]: 1, **{block_id: 1 for block_id in range(4, 6)}})


def test_beyond_the_quota_of_cached_blocks_the_oldest_is_dropped() -> None:
    pool = BlockPool(8, {"a": BlockQuota(max_cached_blocks=2)})
    cache(pool, 3, first=0, tenant="a")  # freed 2, 1, 0
    assert pool.lookup(bytes([2]), [2]) is None
    assert pool.lookup(bytes([0]), [0]) == 0
    cache(pool, 3, first=3, tenant="b")
    assert pool.counts == BlockCounts(free=3, cached=5, used=0)
    assert pool.num_evictions == 1
    pool.check_integrity({})


def test_a_quota_of_no_cached_blocks_caches_nothing() -> None:
    pool = BlockPool(2, {"a": BlockQuota(max_cached_blocks=0)})
    cache(pool, 2, tenant="a")
    assert pool.counts == BlockCounts(free=2, cached=0, used=0)


def test_flush_of_one_tenant_leaves_the_others_blocks() -> None:
    pool = BlockPool(8, {"a": BlockQuota(max_used_blocks=8)})
    cache(pool, 2, first=0, tenant="a")
    cache(pool, 3, first=2, tenant="b")
    assert pool.flush("a") == 2
    assert pool.counts == BlockCounts(free=5, cached=3, used=0)
    pool.check_integrity({})


def test_the_census_counts_by_tenant_and_by_holders() -> None:
    pool = BlockPool(8, {"a": BlockQuota(max_used_blocks=8)})
    cached = cache(pool, 2, first=0, tenant="a")
    shared, lone = pool.allocate(2, "b") or [-1, -1]
    pool.touch(shared)
    pool.pin("system", cached[:1], tenant="a")
    assert pool.census() == PoolCensus(
        {1: 2, 2: 1}, {"a": TenantBlocks(num_used=1, num_cached=1, num_pinned=1), "b": TenantBlocks(num_used=2)}
    )
    pool.check_integrity({shared: 2, lone: 1})


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_block_survives_eviction_until_it_is_unpinned() -> None:
    pool = BlockPool(4)
    first, _ = cache(pool, 2)
    assert pool.pin("system", [first]) == 1
    assert pool.num_pinned == 1
    taken = pool.allocate(3)
    assert taken is not None
    assert pool.allocate(1) is None
    assert pool.lookup(bytes([0]), [0]) == first
    assert pool.lookup(bytes([1]), [1]) is None
    assert pool.unpin("system") == 1
    assert pool.unpin("system") == 0
    assert pool.allocate(1) == [first]
    pool.check_integrity(dict.fromkeys([*taken, first], 1))


def test_pins_of_one_block_are_independent_and_a_name_grows() -> None:
    pool = BlockPool(8)
    blocks = cache(pool, 3)
    assert pool.pin("x", blocks[:1], tenant="a") == 1
    assert pool.pin("x", blocks[:2], tenant="b") == 2
    assert pool.pin("x", blocks[1:], tenant="a") == 3
    assert pool.num_pinned == 3
    assert pool.unpin("x", tenant="a") == 3
    assert pool.num_pinned == 2
    pool.check_integrity({})
    assert pool.unpin_all() == 2
    assert pool.counts.used == 0


def test_too_many_pinned_blocks_are_refused_with_the_numbers() -> None:
    pool = BlockPool(8, {"a": BlockQuota(max_used_blocks=3)})
    blocks = cache(pool, 6, tenant="b")
    pool.pin("x", blocks[:3])
    with pytest.raises(ResourceExhausted, match="2 more blocks beside 3 pinned ones are beyond 4"):
        pool.pin("y", blocks[2:5])
    assert pool.num_pinned == 3
    pool.unpin("x")
    pool.flush()
    own = cache(pool, 2, tenant="a")
    pool.allocate(2, "a")
    with pytest.raises(ResourceExhausted, match="2 more blocks beside 2 used ones are beyond 3, the quota of"):
        pool.pin("z", own)
    assert pool.num_pinned == 0


def test_the_number_of_pins_is_bounded() -> None:
    pool = BlockPool(4)
    (block_id,) = cache(pool, 1)
    for index in range(MAX_PINS):
        pool.pin(str(index), [block_id])
    with pytest.raises(ResourceExhausted, match=f"{MAX_PINS} pins"):
        pool.pin("one more", [block_id])
    assert pool.pin("0", [block_id]) == 1


def test_only_published_blocks_can_be_pinned() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    assert blocks is not None
    with pytest.raises(ValueError, match="not published"):
        pool.pin("x", blocks)


def test_unpublishing_ends_the_pins_of_a_block() -> None:
    pool = BlockPool(8)
    blocks = cache(pool, 3)
    pool.pin("x", blocks[:2])
    pool.pin("y", blocks[:1])
    pool.unpublish(blocks[0])
    assert pool.num_pinned == 1
    pool.check_integrity({})
    assert pool.flush() == 2
    assert pool.counts == BlockCounts(free=8, cached=0, used=0)
    assert pool.unpin("x") == 0


# -- everything at once -----------------------------------------------------------------------------------------------

TENANTS = ("", "a", "b", "c")
QUOTAS = {"a": BlockQuota(5, 3), "b": BlockQuota(None, 2), "c": BlockQuota(4, None)}


class PoolUser:
    """Random use of a small pool beside what it must answer, from its own books; the pool is checked after each act."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(12, QUOTAS)
        self.held: list[list[int]] = []
        self.refused: Counter[Room] = Counter()

    def act(self) -> None:
        acts = [self.take, self.take, self.hit, self.share, self.publish, self.publish, self.free, self.free]
        acts += [self.pin, self.unpin, self.unpublish] * (self.random.random() < 0.3)
        acts += [self.flush] * (self.random.random() < 0.05)
        self.random.choice(acts)()
        self.pool.check_integrity(Counter(block_id for blocks in self.held for block_id in blocks))

    def used_by(self, tenant: str) -> int:
        pool = self.pool
        return sum(pool.ref_count(i) > 0 and pool.tenant(i) == tenant for i in range(pool.num_blocks))

    def take(self) -> None:
        tenant, num_blocks = self.random.choice(TENANTS), self.random.randrange(5)
        limit = QUOTAS[tenant].max_used_blocks if tenant in QUOTAS else None
        over = limit is not None and self.used_by(tenant) + num_blocks > limit
        expected = Room.OVER_QUOTA if over else Room.ENOUGH
        if not over and num_blocks > self.pool.counts.available:
            expected = Room.NO_BLOCKS
        assert self.pool.room(num_blocks, tenant=tenant) is expected
        before = self.pool.counts
        blocks = self.pool.allocate(num_blocks, tenant)
        assert (blocks is None) == (expected is not Room.ENOUGH)
        self.refused[expected] += 1
        if blocks is None:
            assert self.pool.counts == before
        else:
            assert not {i for held in self.held for i in held} & set(blocks), "a block in use was given away"
            assert all(self.pool.tenant(block_id) == tenant for block_id in blocks)
            self.held.append(blocks)

    def hit(self) -> None:
        found = self.find()
        if found is not None:
            self.pool.touch(found)
            self.held.append([found])

    def find(self) -> int | None:
        content = self.random.randrange(20)
        return self.pool.lookup(bytes([content]), [content])

    def choose(self) -> list[int]:
        return self.random.choice(self.held) if self.held else []

    def share(self) -> None:
        chosen = list(self.choose())
        for block_id in chosen:
            self.pool.touch(block_id)
        self.held.append(chosen)

    def publish(self) -> None:
        for block_id in self.choose():
            content = self.random.randrange(20)
            self.pool.publish(block_id, bytes([content]), [content])

    def free(self) -> None:
        chosen = self.choose()
        if self.held:
            self.held.remove(chosen)
        self.pool.free(reversed(chosen))

    def pin(self) -> None:
        found = {block_id for block_id in (self.find() for _ in range(3)) if block_id is not None}
        before = self.pool.census()
        try:
            self.pool.pin(self.random.choice("xyz"), found, tenant=self.random.choice(TENANTS))
        except ResourceExhausted:
            assert self.pool.census() == before

    def unpin(self) -> None:
        self.pool.unpin(self.random.choice("xyz"), tenant=self.random.choice(TENANTS))

    def unpublish(self) -> None:
        found = self.find()
        if found is not None:
            self.pool.unpublish(found)

    def flush(self) -> None:
        tenant = self.random.choice([None, *TENANTS])
        self.pool.flush(tenant)
        assert not [i for i in self.pool._by_hash.values() if tenant in (None, self.pool.tenant(i))]


@pytest.mark.parametrize("seed", range(5))
def test_tens_of_thousands_of_random_acts_keep_the_books(seed: int) -> None:
    user = PoolUser(seed)
    for _ in range(20_000):
        user.act()
    assert min(user.refused[room] for room in Room) > 100, f"the run did not visit all answers: {user.refused}"
    assert user.pool.num_evictions > 100
    for blocks in user.held:
        user.pool.free(blocks)
    user.pool.unpin_all()
    user.pool.flush()
    assert user.pool.counts == BlockCounts(free=12, cached=0, used=0)


def _pinned_pool() -> tuple[BlockPool, list[int]]:
    """Eight blocks; tenant "a", who may use six, has pinned two cached ones."""
    pool = BlockPool(8, {"a": BlockQuota(max_used_blocks=6)})
    pinned = pool.allocate(2, "a")
    assert pinned is not None
    for number, block_id in enumerate(pinned):
        pool.publish(block_id, bytes([number]) * 32, [number])
    pool.free(pinned)
    pool.pin("system prompt", pinned, tenant="a")
    return pool, pinned


def test_pins_stay_while_their_tenant_holds_something_it_will_give_back() -> None:
    pool, _ = _pinned_pool()
    own = pool.allocate(3, "a")
    assert own is not None
    assert pool.room(2, tenant="a") is Room.OVER_QUOTA
    assert pool.yield_pins("a") == 0 and pool.num_pinned == 2
    pool.free(own)
    assert pool.room(5, tenant="a") is Room.OVER_QUOTA
    assert pool.yield_pins("a") == 2 and pool.room(5, tenant="a") is Room.ENOUGH


def test_pins_stay_while_a_sequence_holds_the_same_blocks() -> None:
    """To end them would give nothing back."""
    pool, pinned = _pinned_pool()
    pool.touch(pinned[0])
    assert pool.yield_pins("a") == 0 and pool.yield_pins() == 0
    pool.free([pinned[0]])
    assert pool.yield_pins("a") == 2


def test_all_pins_yield_only_where_nothing_else_is_held() -> None:
    pool, _ = _pinned_pool()
    other = pool.allocate(1, "b")
    assert other is not None
    assert pool.yield_pins() == 0
    pool.free(other)
    assert pool.yield_pins() == 2 and pool.num_pinned == 0
    assert pool.yield_pins() == 0
