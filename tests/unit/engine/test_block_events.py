"""Changes of the published blocks, as one watcher takes them; `integration/test_block_events.py` adds the index."""

from __future__ import annotations

import pytest

from engine.block_events import MAX_PENDING_CHANGES, BlockEvents, PendingChanges
from engine.block_pool import BlockPool, BlockQuota


class Watcher:
    """Counts how often it is told that there is something to take."""

    def __init__(self, pool: BlockPool, *, max_changes: int = 100, events: BlockEvents | None = None) -> None:
        self.num_wakes = 0
        self.events = events or BlockEvents(pool)
        self.pending = PendingChanges(max_changes, self._wake)
        self.events.open(self.pending)

    def _wake(self) -> None:
        self.num_wakes += 1

    def take(self) -> tuple[bool, list[bytes], list[bytes]]:
        """Whether it is a reset, what was removed, what was stored."""
        changes = self.events.take(self.pending)
        return changes.is_reset, list(changes.removed), list(changes.stored)


def publish(pool: BlockPool, *names: bytes, tenant: str = "") -> list[int]:
    """Blocks that are published and then freed, the deepest first; their ids."""
    blocks = pool.allocate(len(names), tenant)
    assert blocks is not None
    for block_id, name in zip(blocks, names, strict=True):
        pool.publish(block_id, name, [1])
    pool.free(reversed(blocks))
    return blocks


def test_a_watch_begins_with_what_is_there_in_the_order_it_was_published() -> None:
    pool = BlockPool(8)
    publish(pool, b"a", b"b", b"c")
    watcher = Watcher(pool)
    assert watcher.take() == (True, [], [b"a", b"b", b"c"])
    assert watcher.take() == (False, [], [])
    assert watcher.num_wakes == 0, "it takes the first time by itself"


def test_publishing_evicting_and_unpublishing_are_told_once() -> None:
    pool = BlockPool(3)
    watcher = Watcher(pool)
    watcher.take()
    _, second = publish(pool, b"a", b"b")
    assert watcher.take() == (False, [], [b"a", b"b"])
    held = pool.allocate(2)  # the empty one and, of the cached ones, the last block of the prefix
    assert held is not None and second in held
    assert watcher.take() == (False, [b"b"], [])
    pool.publish(second, b"a", [1])  # known already: the first block keeps it
    assert watcher.take() == (False, [], [])
    pool.flush("nobody")
    assert watcher.take() == (False, [], [])
    assert watcher.num_wakes == 2


def test_a_quota_of_cached_blocks_tells_what_it_drops() -> None:
    pool = BlockPool(8, {"t": BlockQuota(max_cached_blocks=1)})
    watcher = Watcher(pool)
    watcher.take()
    publish(pool, b"a", b"b", tenant="t")
    assert watcher.take() == (False, [], [b"a"]), "b was freed first and dropped before anybody asked"


def test_changes_that_undo_each_other_are_none() -> None:
    pool = BlockPool(4)
    watcher = Watcher(pool)
    watcher.take()
    (block_id,) = publish(pool, b"a")
    pool.unpublish(block_id)
    assert watcher.take() == (False, [], [])
    (block_id,) = publish(pool, b"a")
    watcher.take()
    pool.unpublish(block_id)
    publish(pool, b"a")
    assert watcher.take() == (False, [], []), "removed and stored again"


def test_a_flush_of_everything_clears() -> None:
    pool = BlockPool(8)
    publish(pool, b"a", b"b")
    watcher = Watcher(pool, max_changes=1)
    watcher.take()
    pool.flush()
    publish(pool, b"c")
    assert watcher.take() == (True, [], [b"c"])
    assert watcher.num_wakes == 1
    pool.flush()
    assert watcher.take() == (True, [], []) and watcher.num_wakes == 2
    pool.flush()
    assert watcher.take() == (False, [], []), "there was nothing to flush"
    publish(pool, b"c")
    publish(pool, b"d", tenant="t")
    watcher.take()
    pool.flush("t")
    assert watcher.take() == (False, [b"d"], []), "somebody else's block is still there"


def test_too_many_changes_are_forgotten_for_a_snapshot() -> None:
    pool = BlockPool(8)
    watcher = Watcher(pool, max_changes=2)
    watcher.take()
    publish(pool, b"a", b"b", b"c")
    publish(pool, b"d")
    assert watcher.take() == (True, [], [b"a", b"b", b"c", b"d"])
    publish(pool, b"e", b"f")
    assert watcher.take() == (False, [], [b"e", b"f"]), "it is as before once it has taken the snapshot"
    assert watcher.num_wakes == 2


def test_what_is_kept_for_one_watcher_is_bounded() -> None:
    watcher = PendingChanges(10, lambda: None)
    watcher.take(BlockPool(1))
    for number in range(10_000):
        watcher.store(number.to_bytes(4, "big"))
        assert len(watcher._stored) + len(watcher._removed) <= 10
    assert not watcher._stored, "nothing is kept when a snapshot is due"


@pytest.mark.parametrize(("num_blocks", "max_changes"), [(64, 64), (MAX_PENDING_CHANGES * 2, MAX_PENDING_CHANGES)])
def test_the_bound_is_the_pool_or_a_number(num_blocks: int, max_changes: int) -> None:
    assert BlockEvents(BlockPool(num_blocks)).max_changes == max_changes


def test_a_pool_without_watchers_has_no_listener() -> None:
    pool = BlockPool(8)
    first = Watcher(pool)
    second = Watcher(pool, events=first.events)
    first.take()
    publish(pool, b"a")
    first.events.close(first.pending)
    publish(pool, b"b")
    assert second.take() == (True, [], [b"a", b"b"])
    assert list(first.pending.take(pool).stored) == [b"a"], "nothing is kept once it is closed"
    first.events.close(first.pending)
    assert pool.listener is not None
    first.events.close(second.pending)
    assert pool.listener is None
