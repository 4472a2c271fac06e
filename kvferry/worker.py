"""What prefill and decode workers share: who they are, and the Watch stream that is their membership."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import InvalidArgument, Unavailable
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

MAX_STATUS_INTERVAL_S = 1.0
"""Load figures a router decides by are never older than this."""

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
    """Whether a worker takes new work, and the event that tells its watchers of a change."""

    def __init__(self) -> None:
        self.is_draining = False
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """No new work from now on."""
        self.is_draining = True
        self._changed.set()

    def check_admits(self, identity: WorkerIdentity) -> None:
        """Raises Unavailable while draining."""
        if self.is_draining:
            raise Unavailable(f"worker {identity.worker_id} is draining")

    async def wait_changed(self, timeout_s: float) -> None:
        """Returns at a change of the state, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Sends statuses to every router that watches.

    Args:
        identity: who this is.
        state: draining or not.
        capabilities: what it serves.
        load: current figures; called once a status.
        is_alive: False while the step loop is stuck; then nothing is sent and the watchers' deadlines pass.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        state: WorkerState,
        capabilities: types_pb2.Capabilities,
        load: Callable[[], worker_pb2.WorkerLoad],
        is_alive: Callable[[], bool],
    ) -> None:
        self._identity = identity
        self._state = state
        self._capabilities = capabilities
        self._load = load
        self._is_alive = is_alive

    async def Watch(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.WatchRequest,
        context: ServicerContext[worker_pb2.WatchRequest, worker_pb2.WatchResponse],
    ) -> None:
        check_progress_timeout("progress_timeout_s", request.progress_timeout_s)
        interval_s = min(request.progress_timeout_s / 3, MAX_STATUS_INTERVAL_S)
        while True:
            if self._is_alive():
                await context.write(self._status())
            await self._state.wait_changed(interval_s)

    def _status(self) -> worker_pb2.WatchResponse:
        return worker_pb2.WatchResponse(
            worker_id=self._identity.worker_id,
            role=self._identity.role,
            pid=self._identity.pid,
            epoch=self._identity.epoch,
            capabilities=self._capabilities,
            draining=self._state.is_draining,
            load=self._load(),
        )
