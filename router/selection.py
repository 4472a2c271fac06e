"""Which pair of workers serves the next attempt: of each role the least loaded that is ready, ties in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import Unavailable
from router.membership import Membership
from router.worker import Role, Worker


@dataclass(frozen=True, slots=True)
class Pair:
    """The chosen workers; a role that is not needed is None."""

    prefill: Worker | None
    decode: Worker | None


class PairSelector:
    """Chooses pairs among the members."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._turns = itertools.count()

    def choose(
        self, *, needs_prefill: bool, needs_decode: bool, excluding: frozenset[str], allow_excluded: bool = True
    ) -> Pair:
        """The least loaded pair, without the addresses in `excluding` where others are ready.

        With `allow_excluded` an excluded worker serves where no other is ready.

        Raises Unavailable naming the role, the addresses and why each is not ready. A role that is missing refuses the
        attempt even where it needs only the other, so that nothing reaches half a pair.
        """
        missing = self._membership.missing
        if missing:
            raise Unavailable("; ".join(missing), retry_after_s=1.0)
        turn = next(self._turns)
        return Pair(
            prefill=self._best(Role.PREFILL, excluding, allow_excluded, turn) if needs_prefill else None,
            decode=self._best(Role.DECODE, excluding, allow_excluded, turn) if needs_decode else None,
        )

    def _best(self, role: Role, excluding: frozenset[str], allow_excluded: bool, turn: int) -> Worker:
        ready = self._membership.ready(role)
        others = [worker for worker in ready if worker.address not in excluding]
        if not others and not allow_excluded:
            raise Unavailable(f"every ready {role.value} worker has failed this request before", retry_after_s=1.0)
        return _least_loaded(others or ready, turn)


def _least_loaded(workers: Sequence[Worker], turn: int) -> Worker:
    least = min(worker.load for worker in workers)
    tied = [worker for worker in workers if worker.load == least]
    return tied[turn % len(tied)]
