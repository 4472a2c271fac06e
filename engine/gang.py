"""Beams of one request: sequences that are stepped, preempted and resumed together, or not at all.

The core asks the runner for each beam's most likely tokens and hands them to `advance`: the search says which beams
live on, and the sequences follow it by forking from their parents, whose blocks they share.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from engine.beam import BeamSearch, BeamStep
from engine.forward_batch import Candidate
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.attempts import Attempts


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
    def owner_id(self) -> str:
        return self.members[0].owner_id

    @property
    def can_step(self) -> bool:
        """Whether every beam lacks exactly its last token's KV."""
        return all(member.num_uncomputed_tokens == 1 and member.prefix_is_computed() for member in self.members)

    def advance(self, candidates: SequenceOf[SequenceOf[Candidate]], attempts: Attempts) -> None:
        """Takes one step of the search: its beams are the members then. When it is over they are left as they are."""
        steps = self.search.advance(candidates)
        if self.search.is_finished:
            return
        parents = self.members
        self.members = [self._extend(parents, steps, index, attempts) for index in range(len(steps))]
        for step, member in zip(steps, self.members, strict=True):
            member.token_ids.append(step.token_id)
        for parent in parents:
            if parent not in self.members:
                attempts.leave(parent)

    def _extend(self, parents: list[Sequence], steps: SequenceOf[BeamStep], index: int, attempts: Attempts) -> Sequence:
        """The sequence of the new beam `index`: the last child of a parent takes its place, the others fork from it."""
        parent = parents[steps[index].parent]
        if all(step.parent != steps[index].parent for step in steps[index + 1 :]):
            return parent
        self._num_forks += 1
        fork = attempts.fork(parent, f"{parent.owner_id}#beam{self._num_forks}", parent.choice)
        attempts.start_beam(fork)
        return fork
