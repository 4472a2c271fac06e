"""Changes of one pool's published blocks, kept for whoever watches until they take them.

    pool.publish ──► BlockEvents.on_published ──► PendingChanges of each watcher ──► take, between two steps
    pool.evict, flush, unpublish ──► on_unpublished, on_all_unpublished ──┘

All of it belongs to the engine's thread; `engine/block_feed.py` carries it to event loops. With no watcher the pool has
no listener and records nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from engine.block_pool import BlockPool
from kvferry.block_changes import BlockChanges

MAX_PENDING_CHANGES = 65_536
"""Changes kept for one watcher who does not take them, at most: about 10 MB, 2 MB on the wire. A pool with fewer blocks
keeps no more changes than it has blocks: beyond either number what is there now is the shorter way to say it."""


class _Base(enum.Enum):
    """What the kept changes build on."""

    TOLD = enum.auto()
    """What the watcher took before."""
    NOTHING = enum.auto()
    """All blocks were unpublished since."""
    SNAPSHOT = enum.auto()
    """The pool as it will be when the watcher takes it: no changes are kept."""


class PendingChanges:
    """Changes that one watcher has not taken yet; a store and a removal of the same hash are none.

    Args:
        max_changes: most changes that are kept; beyond it they are forgotten, and the next `take` is a snapshot.
        wake: called at the first change after a `take`; must not block.
    """

    def __init__(self, max_changes: int, wake: Callable[[], object]) -> None:
        self._max_changes = max_changes
        self._wake = wake
        self._base = _Base.SNAPSHOT
        self._stored: dict[bytes, None] = {}  # in order: a block comes after those it builds on
        self._removed: dict[bytes, None] = {}
        self._is_awake = True

    def store(self, block_hash: bytes) -> None:
        """The block with this hash, which was not findable, is now."""
        self._record(block_hash, self._stored, self._removed)

    def remove(self, block_hash: bytes) -> None:
        """The block with this hash, which was findable, is no more."""
        self._record(block_hash, self._removed, self._stored)

    def _record(self, block_hash: bytes, changes: dict[bytes, None], opposite: dict[bytes, None]) -> None:
        if self._base is _Base.SNAPSHOT:
            return
        if block_hash in opposite:
            del opposite[block_hash]
            return
        changes[block_hash] = None
        if len(self._stored) + len(self._removed) > self._max_changes:
            self._restart(_Base.SNAPSHOT)
        if not self._is_awake:
            self._is_awake = True
            self._wake()

    def clear(self) -> None:
        """All that was findable has been removed; the watcher need not be told each."""
        self._restart(_Base.NOTHING)

    def _restart(self, base: _Base) -> None:
        self._base, self._stored, self._removed = base, {}, {}

    def take(self, pool: BlockPool) -> BlockChanges:
        """What happened since the last `take`; the first one, and one after too many changes, tells all of `pool`."""
        base, stored, removed = self._base, self._stored, self._removed
        self._restart(_Base.TOLD)
        self._is_awake = False
        if base is _Base.SNAPSHOT:
            return BlockChanges(is_reset=True, stored=pool.published_hashes())
        return BlockChanges(is_reset=base is _Base.NOTHING, removed=removed.keys(), stored=stored.keys())


class BlockEvents:
    """The listener of one pool, for as long as somebody watches; see `engine.block_pool.BlockListener`."""

    def __init__(self, pool: BlockPool) -> None:
        self.max_changes = min(MAX_PENDING_CHANGES, pool.num_blocks)
        self._pool = pool
        self._watchers: list[PendingChanges] = []

    def open(self, watcher: PendingChanges) -> None:
        """Keeps changes for `watcher` from now on."""
        self._watchers.append(watcher)
        self._pool.listener = self

    def take(self, watcher: PendingChanges) -> BlockChanges:
        """What `watcher`, who is open, has not been told."""
        return watcher.take(self._pool)

    def close(self, watcher: PendingChanges) -> None:
        """Keeps nothing for `watcher` any more; does nothing where it is not open."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers:
            self._pool.listener = None

    def on_published(self, block_hash: bytes) -> None:
        for watcher in self._watchers:
            watcher.store(block_hash)

    def on_unpublished(self, block_hash: bytes) -> None:
        for watcher in self._watchers:
            watcher.remove(block_hash)

    def on_all_unpublished(self) -> None:
        for watcher in self._watchers:
            watcher.clear()
