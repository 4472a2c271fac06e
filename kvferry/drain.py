"""Draining a worker: it takes no new work, what runs may go on for a grace, and then is ended for others to go on with.

    Drain ─► no new work, every watcher is told ─► running calls end by themselves ─► empty: drained
                 └─ the grace passes ─► the rest ends with WorkerDraining: moved by its router ─► empty: drained
                                                   └─ what is worth it is kept, and shipped from here: Prefill calls

The process stays until SIGTERM, drained, or until `undo`; after SIGTERM what is moving has a time of its own. All this
lives in one process's memory: one that is started again takes work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.errors import FailedPrecondition, InvalidArgument, WorkerDraining
from kvferry.moves import MovedSequences
from kvferry.rpc.server import CallsInFlight
from kvferry.telemetry import log_event
from kvferry.worker import WorkerIdentity, WorkerState

logger = logging.getLogger(__name__)

WORK_METHODS = frozenset({"Prefill", "Decode"})
"""Calls that are a worker's work; the others serve these or tell of them."""

MOVED_METHODS = MappingProxyType({"prefill": frozenset({"Prefill"}), "decode": frozenset({"Decode"})})
"""Those of them that the end of the grace ends, by role: a Prefill call at a decode worker is a sequence that moves."""

MAX_GRACE_S = 86_400.0
"""A day: longer than any request runs; whoever gives more has the unit wrong."""

PROGRESS_INTERVAL_S = 1.0
"""Progress is told this often even where nothing changes, so that silence means a broken connection."""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain is: attempts that still run, and what is left of their grace."""

    num_running: int  # those that wait for their router to move them included
    grace_left_s: float


class WorkerDrain:
    """The drain of one worker.

    Args:
        identity: who this is.
        state: takes work or not.
        calls: what runs.
        moves: what has ended and is kept to be moved.
        keep_moved: called when what runs is about to end; puts into `moves` what is worth it.
        default_grace_s: the grace of a drain that names none.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        state: WorkerState,
        calls: CallsInFlight,
        moves: MovedSequences,
        keep_moved: Callable[[], None],
        default_grace_s: float,
    ) -> None:
        self._identity = identity
        self._state = state
        self._calls = calls
        self._moves = moves
        self._keep_moved = keep_moved
        self._default_grace_s = default_grace_s
        self._move_timer: asyncio.TimerHandle | None = None
        self._move_at_s = 0.0

    def begin(self, grace_s: float | None) -> None:
        """Takes no new work from now on; for a drain under way, changes the grace, where one is given.

        Raises InvalidArgument for a grace that cannot be.
        """
        if grace_s is not None and not 0.0 <= grace_s <= MAX_GRACE_S:
            raise InvalidArgument("grace_s", f"must be 0 … {MAX_GRACE_S:g} seconds, got {grace_s:g}")
        is_new = not self._state.is_draining
        if is_new or grace_s is not None:
            self._move_after(self._default_grace_s if grace_s is None else grace_s)
        if is_new:
            self._state.drain()

    def _move_after(self, grace_s: float) -> None:
        self._forget_timer()
        loop = asyncio.get_running_loop()
        self._move_at_s = loop.time() + grace_s
        self._move_timer = loop.call_later(grace_s, self._move)
        log_event(logger, "draining", grace_s=grace_s, num_running=self.progress.num_running)

    def _move(self) -> None:
        """Ends what still runs; whoever asked for it goes on elsewhere."""
        self._keep_moved()
        methods = MOVED_METHODS[self._identity.role]
        moved = self._calls.end(methods, WorkerDraining(f"worker {self._identity.worker_id} is draining; moved"))
        log_event(logger, "work_moved", num_moved=len(moved), num_kept=self._moves.num_kept)

    def undo(self) -> bool:
        """Takes new work again; says whether it did not. Raises FailedPrecondition while the process ends."""
        if self._state.is_ending:
            raise FailedPrecondition(f"worker {self._identity.worker_id} is ending; its drain cannot be undone")
        was_draining = self._state.is_draining
        self._forget_timer()
        self._state.admit()
        if was_draining:
            log_event(logger, "drain_undone", num_running=self.progress.num_running)
        return was_draining

    def _forget_timer(self) -> None:
        if self._move_timer is not None:
            self._move_timer.cancel()
            self._move_timer = None

    @property
    def progress(self) -> DrainProgress:
        left_s = max(0.0, self._move_at_s - asyncio.get_running_loop().time())
        return DrainProgress(self._num_left, left_s)

    @property
    def _num_left(self) -> int:
        return self._calls.num_running(WORK_METHODS) + self._moves.num_kept

    async def end(self, grace_s: float, move_s: float, hurry: asyncio.Event | None) -> None:
        """For the end of the process: what runs gets `grace_s`, and then to move `move_s`, or none once `hurry` is set.

        Whatever is left when this returns is for the caller to end.
        """
        await self._calls.wait_idle(grace_s, hurry)
        if not self._num_left or (hurry is not None and hurry.is_set()):
            return
        self._move()
        moving, hurried = asyncio.ensure_future(self._empty()), asyncio.ensure_future((hurry or asyncio.Event()).wait())
        try:
            await asyncio.wait([moving, hurried], timeout=move_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moving.cancel()
            hurried.cancel()

    async def _empty(self) -> None:
        while self._num_left:
            await self._calls.changes.wait_beyond(self._calls.changes.number)

    async def follow(self) -> AsyncIterator[DrainProgress]:
        """Progress at every change and at least once an interval; the last one has nothing running.

        Raises FailedPrecondition once the drain is undone.
        """
        while True:
            number, progress = self._calls.changes.number, self.progress
            yield progress
            if progress.num_running == 0:
                return
            await self._calls.changes.wait_beyond(number, PROGRESS_INTERVAL_S)
            if not self._state.is_draining:
                raise FailedPrecondition(f"worker {self._identity.worker_id} takes work again: the drain was undone")
