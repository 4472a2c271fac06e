"""Beams of one request: sequences that are stepped, preempted and resumed together, or not at all."""

from __future__ import annotations

from engine.beam import BeamSearch
from engine.sequence import Sequence


class Gang:
    """The live beams, in the order of the search.

    Attributes:
        search: decides which beams live on.
        members: one sequence a live beam; each has the gang as its `gang`.
    """

    def __init__(self, search: BeamSearch, members: list[Sequence]) -> None:
        self.search = search
        self.members = members
        self._num_forks = 0
        for member in members:
            member.gang = self

    @property
    def can_step(self) -> bool:
        """Whether every beam lacks exactly its last token's KV."""
        return all(member.num_uncomputed_tokens == 1 and member.prefix_is_computed() for member in self.members)

    def next_id(self) -> str:
        """A name for a new beam, never used before in this search."""
        self._num_forks += 1
        return f"{self.members[0].owner_id}#beam{self._num_forks}"
