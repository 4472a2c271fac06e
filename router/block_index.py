"""Which worker can hit which full blocks, as far as the workers told: a plain state machine fed by `block_watch.py`.

    numbered changes ─► take ─► the worker's set of hashes ─► longest_run(hashes of a prompt) ─► blocks a worker

A set a worker, and no map from hash to workers: most workers do not hold the first block of a prompt, so a look-up asks
each of them once and follows the few that do; that is half the memory, and a lost worker is forgotten at once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.block_changes import BlockChanges, NumberedChanges

MAX_KNOWN_BLOCKS = 1 << 20
"""Hashes over all workers: about 150 MB, and four pools of 262,144 blocks. Routers must not grow with their workers."""


class Outcome(enum.Enum):
    """What became of changes."""

    TAKEN = enum.auto()
    GAP = enum.auto()
    """Some before them are missing: the worker's entry is gone, and its stream must begin anew."""


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """What is known of one worker.

    Attributes:
        num_blocks: hashes in the index.
        is_partial: it published more; there was no room for them.
        epoch: the life of its process that told them; None where nothing is known.
    """

    num_blocks: int = 0
    is_partial: bool = False
    epoch: int | None = None


@dataclass(slots=True)
class _Entry:
    """One worker's blocks, and where its stream is."""

    epoch: int
    sequence_number: int = 0
    hashes: set[bytes] = field(default_factory=set)
    is_partial: bool = False


class BlockIndex:
    """The published blocks of all workers, by the key that the caller has for each.

    Args:
        max_blocks: most hashes, over all workers. What a worker publishes beyond it is not indexed, and the worker is
            partial until its stream begins anew; what is in the index stays right.
    """

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._entries: dict[str, _Entry] = {}
        self._num_free = max_blocks

    def take(self, worker: str, numbered: NumberedChanges) -> Outcome:
        """The next message of a worker's stream; number 1 begins a stream, another epoch a life that holds nothing."""
        entry = self._entries.get(worker)
        if numbered.sequence_number == 1:
            self.forget(worker)
            entry = self._entries[worker] = _Entry(numbered.epoch)
        elif entry is None or entry.epoch != numbered.epoch or entry.sequence_number + 1 != numbered.sequence_number:
            self.forget(worker)
            return Outcome.GAP
        entry.sequence_number = numbered.sequence_number
        self._apply(entry, numbered.changes)
        return Outcome.TAKEN

    def _apply(self, entry: _Entry, changes: BlockChanges) -> None:
        hashes = entry.hashes
        num_before = len(hashes)
        if changes.is_reset:
            hashes = entry.hashes = set()
            entry.is_partial = False
        hashes.difference_update(changes.removed)
        self._num_free += num_before - len(hashes)
        num_before = len(hashes)
        if len(changes.stored) <= self._num_free:
            hashes.update(changes.stored)
        else:
            self._add_while_there_is_room(entry, changes)
        self._num_free -= len(hashes) - num_before

    def _add_while_there_is_room(self, entry: _Entry, changes: BlockChanges) -> None:
        """The first ones: they come before those that build on them."""
        max_hashes = len(entry.hashes) + self._num_free
        for block_hash in changes.stored:
            if len(entry.hashes) < max_hashes:
                entry.hashes.add(block_hash)
            elif block_hash not in entry.hashes:
                entry.is_partial = True

    def forget(self, worker: str) -> None:
        """The worker is lost; does nothing where nothing is known of it."""
        entry = self._entries.pop(worker, None)
        if entry is not None:
            self._num_free += len(entry.hashes)

    def known(self, worker: str) -> KnownBlocks:
        """What is known of `worker`."""
        entry = self._entries.get(worker)
        return KnownBlocks() if entry is None else KnownBlocks(len(entry.hashes), entry.is_partial, entry.epoch)

    def longest_run(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many leading blocks of `hashes` each worker can hit; those that hold not even the first are left out."""
        if not hashes:
            return {}
        return {
            worker: _num_leading(hashes, entry.hashes)
            for worker, entry in self._entries.items()
            if hashes[0] in entry.hashes
        }


def _num_leading(hashes: Sequence[bytes], known: set[bytes]) -> int:
    for length, block_hash in enumerate(hashes):
        if block_hash not in known:
            return length
    return len(hashes)
