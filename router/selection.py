"""Which pair of workers serves the next attempt: of each role the least loaded that is ready and well, ties in turn.

A request of a session goes to the session's worker (`session.py`) unless that one is too busy.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.config import TenantConfig
from kvferry.errors import Unavailable
from router.model_workers import ModelWorkers
from router.session import Session
from router.worker import Role, Worker


@dataclass(frozen=True, slots=True)
class Pair:
    """The chosen workers; a role that is not needed is None."""

    prefill: Worker | None
    decode: Worker | None


@dataclass(frozen=True, slots=True)
class Needs:
    """What an attempt needs of each role; a pool, or its tenant's share of it, must hold its whole sequence there.

    Attributes:
        num_seats: places in decode's batch that it cannot go on without.
        tenant: whose quota counts.
        session: which it belongs to; None for none.
    """

    prefill: bool
    decode: bool
    num_prefill_blocks: int = 0
    num_decode_blocks: int = 0
    num_seats: int = 1
    tenant: str = ""
    session: Session | None = None


class PairSelector:
    """Chooses pairs among the workers of a model.

    Args:
        workers: those of the model.
        tenants: those with quotas.
        max_session_lead: how much more load than the least loaded a session's worker may have.
        count_session: told of each choice for a session its role, and whether it was the session's own worker.
    """

    def __init__(
        self,
        workers: ModelWorkers,
        tenants: Iterable[TenantConfig] = (),
        *,
        max_session_lead: int = 0,
        count_session: Callable[[Role, bool], None] | None = None,
    ) -> None:
        self._workers = workers
        self._max_session_lead = max_session_lead
        self._count_session = count_session
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._turns = itertools.count()

    def choose(self, needs: Needs, *, excluding: frozenset[str], allow_excluded: bool = True) -> Pair:
        """The least loaded pair with room, without the addresses in `excluding` where others are ready.

        With `allow_excluded` an excluded worker serves where no other is ready. Where no ready prefill worker's pool
        can hold the tokens known by now (a resume has more of them than the prompt), or no tenant's share of it can,
        decode computes them itself.

        Raises Unavailable naming the role, the addresses and why each is not ready. A role that is missing refuses the
        attempt even where it needs only the other, so that nothing reaches half a pair.
        """
        missing = self._workers.missing
        if missing:
            raise Unavailable("; ".join(missing), retry_after_s=1.0)
        turn = next(self._turns)
        prefill = None
        if needs.prefill and self._with_room(Role.PREFILL, needs):
            prefill = self._best(Role.PREFILL, needs, excluding, allow_excluded, turn)
        decode = None
        if needs.decode or prefill is None:
            decode = self._best(Role.DECODE, needs, excluding, allow_excluded, turn)
        return Pair(prefill, decode)

    def _with_room(self, role: Role, needs: Needs) -> list[Worker]:
        return [worker for worker in self._workers.ready(role) if self._has_room(worker, role, needs)]

    def _has_room(self, worker: Worker, role: Role, needs: Needs) -> bool:
        tenant = self._tenants.get(needs.tenant)
        quota = None if tenant is None else tenant.max_used_blocks(worker.num_blocks)
        num_usable = worker.num_blocks if quota is None else quota
        if role is Role.PREFILL:
            return num_usable >= needs.num_prefill_blocks
        has_seats = worker.max_running == 0 or worker.max_running >= needs.num_seats
        return has_seats and num_usable >= needs.num_decode_blocks

    def _best(self, role: Role, needs: Needs, excluding: frozenset[str], allow_excluded: bool, turn: int) -> Worker:
        ready = self._with_room(role, needs)
        if not ready:
            num_blocks = needs.num_prefill_blocks if role is Role.PREFILL else needs.num_decode_blocks
            raise Unavailable(f"no ready {role.value} worker has room for {num_blocks} blocks", retry_after_s=1.0)
        others = [worker for worker in ready if worker.address not in excluding]
        if not others and not allow_excluded:
            raise Unavailable(f"every ready {role.value} worker has failed this request before", retry_after_s=1.0)
        now_s = time.monotonic()
        candidates = others or ready
        well = [worker for worker in candidates if not worker.breaker.is_open(now_s)]
        chosen = self._of_session(role, needs.session, well or candidates) or _least_loaded(well or candidates, turn)
        chosen.breaker.on_chosen(now_s)
        return chosen

    def _of_session(self, role: Role, session: Session | None, workers: Sequence[Worker]) -> Worker | None:
        """The worker of the session; None where there is no session or its worker is too busy."""
        if session is None:
            return None
        address = session.preferred(worker.address for worker in workers)
        preferred = next(worker for worker in workers if worker.address == address)
        is_kept = not _is_too_busy(preferred, workers, self._max_session_lead)
        if self._count_session is not None:
            self._count_session(role, is_kept)
        return preferred if is_kept else None


def _least_loaded(workers: Sequence[Worker], turn: int) -> Worker:
    least = min(worker.load for worker in workers)
    tied = [worker for worker in workers if worker.load == least]
    return tied[turn % len(tied)]


def _is_too_busy(worker: Worker, workers: Sequence[Worker], max_lead: int) -> bool:
    """Whether `worker` should be passed over for another of `workers`, which it is one of.

    It is when its load is more than `max_lead` above the least, or its batch is full where another's is not: what a
    prefix cache saves is less than such a wait.
    """
    lead = worker.load - min(other.load for other in workers)
    return lead > max_lead or (_is_full(worker) and not all(map(_is_full, workers)))


def _is_full(worker: Worker) -> bool:
    return 0 < worker.max_running <= worker.load
