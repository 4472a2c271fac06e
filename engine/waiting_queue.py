"""Sequences that wait for blocks, in order of priority, with bounded bypassing.

A sequence that does not fit must not stop smaller ones behind it, and must not be overtaken for ever either: after
`max_bypasses` later sequences were let in before it, nothing behind it is tried until it fits. A preempted sequence is
never overtaken.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterator

from engine.sequence import Sequence


class Admission(enum.Enum):
    """What came of offering a waiting sequence."""

    TAKEN = "taken"
    NO_ROOM = "no_room"  # not this one, but a smaller one might fit
    DEFERRED = "deferred"  # it waits for something else than room: others go first without overtaking it
    OVER_QUOTA = "over_quota"  # the same, for its tenant's quota, and so do all later ones of that tenant
    CLOSED = "closed"  # none at all for now


class WaitingQueue:
    """A list kept in order of priority.

    Args:
        max_bypasses: how often one sequence may be overtaken by later ones.
        max_refusals: how many that do not fit are looked at in one go; bounds the cost of a step with a long queue.
        max_deferrals: the same for those that wait for something else.
    """

    def __init__(self, max_bypasses: int = 16, max_refusals: int = 8, max_deferrals: int = 64) -> None:
        self._max_bypasses = max_bypasses
        self._max_refusals = max_refusals
        self._max_deferrals = max_deferrals
        self._sequences: list[Sequence] = []
        self._num_bypasses: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=lambda other: other.priority.key)

    def remove(self, sequence: Sequence) -> None:
        """Takes `sequence` out; does nothing when it is not here."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
            self._num_bypasses.pop(sequence.seq_id, None)

    def admit(self, try_admit: Callable[[Sequence], Admission]) -> list[Sequence]:
        """Offers each sequence, in order, to `try_admit` and removes those it takes."""
        admitted: list[Sequence] = []
        refused: list[Sequence] = []
        num_deferred = 0
        over_quota: set[str] = set()  # tenants
        for sequence in list(self._sequences):
            if sequence.tenant in over_quota:
                continue
            outcome = try_admit(sequence)
            if outcome is Admission.CLOSED:
                break
            if outcome is Admission.TAKEN:
                admitted.append(sequence)
                self._count_bypass(refused)
            elif outcome is Admission.OVER_QUOTA:
                over_quota.add(sequence.tenant)
            elif outcome is Admission.DEFERRED:
                num_deferred += 1
            else:
                refused.append(sequence)
            if len(refused) >= self._max_refusals or any(not self._may_bypass(other) for other in refused):
                break
            if num_deferred >= self._max_deferrals:
                break
        for sequence in admitted:
            self.remove(sequence)
        return admitted

    def _may_bypass(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions == 0 and self._num_bypasses.get(sequence.seq_id, 0) < self._max_bypasses

    def _count_bypass(self, refused: list[Sequence]) -> None:
        for sequence in refused:
            self._num_bypasses[sequence.seq_id] = self._num_bypasses.get(sequence.seq_id, 0) + 1
