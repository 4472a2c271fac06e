"""Which full blocks can be hit, told as changes: from the engine that publishes them to routers that choose by them.

block pool ─► feed (`engine/block_feed.py`) ─► `WatchBlocks` (`worker_service.py`) ─► index (`router/block_index.py`)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Changes that belong together; no hash is both stored and removed.

    Attributes:
        is_reset: nothing that was told before holds any more.
        removed: chain hashes, 32 bytes each, of blocks that cannot be hit any more.
        stored: those of blocks that can be hit from now on.
    """

    is_reset: bool = False
    removed: Collection[bytes] = ()
    stored: Collection[bytes] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.is_reset or self.removed or self.stored)


@dataclass(frozen=True, slots=True)
class NumberedChanges:
    """What one message of a `WatchBlocks` stream says: changes of one kind.

    Attributes:
        epoch: life of the process.
        sequence_number: of the message in its stream, from 1.
    """

    epoch: int
    sequence_number: int
    changes: BlockChanges


class BlockFeed(Protocol):
    """The published blocks of one worker."""

    def watch(self) -> AsyncGenerator[BlockChanges, None]:
        """First a reset with what is there, then every change; a reset again where the reader was too slow.

        Whoever iterates closes it (`contextlib.aclosing`), which ends the book-keeping for this watcher.
        """
