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


@dataclass(frozen=True, slots=True)
class Needs:
    """What an attempt needs of each role; a pool must hold its whole sequence there."""

    prefill: bool
    decode: bool
    num_prefill_blocks: int = 0
    num_decode_blocks: int = 0


class PairSelector:
    """Chooses pairs among the members."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._turns = itertools.count()

    def choose(self, needs: Needs, *, excluding: frozenset[str], allow_excluded: bool = True) -> Pair:
        """The least loaded pair with room, without the addresses in `excluding` where others are ready.

        With `allow_excluded` an excluded worker serves where no other is ready. Where no ready prefill worker's pool
        can hold the tokens known by now (a resume has more of them than the prompt), decode computes them itself.

        Raises Unavailable naming the role, the addresses and why each is not ready. A role that is missing refuses the
        attempt even where it needs only the other, so that nothing reaches half a pair.
        """
        missing = self._membership.missing
        if missing:
            raise Unavailable("; ".join(missing), retry_after_s=1.0)
        turn = next(self._turns)
        prefill = None
        has_room = bool(self._with_room(Role.PREFILL, needs.num_prefill_blocks))
        if needs.prefill and has_room:
            prefill = self._best(Role.PREFILL, needs.num_prefill_blocks, excluding, allow_excluded, turn)
        decode = None
        if needs.decode or prefill is None:
            decode = self._best(Role.DECODE, needs.num_decode_blocks, excluding, allow_excluded, turn)
        return Pair(prefill, decode)

    def _with_room(self, role: Role, num_blocks: int) -> list[Worker]:
        return [worker for worker in self._membership.ready(role) if worker.num_blocks >= num_blocks]

    def _best(self, role: Role, num_blocks: int, excluding: frozenset[str], allow_excluded: bool, turn: int) -> Worker:
        ready = self._with_room(role, num_blocks)
        if not ready:
            raise Unavailable(f"no ready {role.value} worker has a pool of {num_blocks} blocks", retry_after_s=1.0)
        others = [worker for worker in ready if worker.address not in excluding]
        if not others and not allow_excluded:
            raise Unavailable(f"every ready {role.value} worker has failed this request before", retry_after_s=1.0)
        return _least_loaded(others or ready, turn)


def _least_loaded(workers: Sequence[Worker], turn: int) -> Worker:
    least = min(worker.load for worker in workers)
    tied = [worker for worker in workers if worker.load == least]
    return tied[turn % len(tied)]
