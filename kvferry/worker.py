"""What prefill and decode workers share: who they are, and whether they take work."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from kvferry.errors import InvalidArgument, WorkerDraining
from kvferry.tasks import Changes

MIN_PROGRESS_TIMEOUT_S = 0.1
"""Heartbeats come three times as often; below this they would be the work."""
MAX_PROGRESS_TIMEOUT_S = 3600.0


def check_progress_timeout(field: str, timeout_s: float) -> None:
    """Raises InvalidArgument naming `field` and the limits."""
    if not MIN_PROGRESS_TIMEOUT_S <= timeout_s <= MAX_PROGRESS_TIMEOUT_S:
        allowed = f"{MIN_PROGRESS_TIMEOUT_S:g} … {MAX_PROGRESS_TIMEOUT_S:g} seconds"
        raise InvalidArgument(field, f"must be {allowed}, got {timeout_s:g}")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One life of one worker process; `epoch` is drawn at its start and never comes again."""

    worker_id: str
    role: str
    epoch: int
    pid: int

    @classmethod
    def new(cls, worker_id: str, role: str) -> WorkerIdentity:
        return cls(worker_id, role, epoch=secrets.randbits(63) | 1, pid=os.getpid())


class WorkerState:
    """Whether a worker takes new work, and the changes that its watchers wait for."""

    def __init__(self) -> None:
        self.is_draining = False
        self.is_ending = False
        self.changes = Changes()

    def drain(self) -> None:
        """No new work from now on."""
        self.is_draining = True
        self.changes.notify()

    def admit(self) -> None:
        """New work again."""
        self.is_draining = False
        self.changes.notify()

    def end(self) -> None:
        """No new work, and no way back: the process ends."""
        self.is_ending = True
        self.drain()

    def check_admits(self, identity: WorkerIdentity) -> None:
        """Raises WorkerDraining while draining."""
        if self.is_draining:
            raise WorkerDraining(f"worker {identity.worker_id} is draining")
