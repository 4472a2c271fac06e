"""What every worker answers: the Watch stream that is its membership, what its prefix cache holds, and orders to drain.

`WatchBlocks` is a stream of its own: a snapshot of a large pool, or a router that reads slowly, never delays a status.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvferry.block_changes import BlockFeed
from kvferry.drain import WorkerDrain
from kvferry.sequence_fields import own_fields
from kvferry.wire import block_changes_to_pb
from kvferry.worker import WorkerIdentity, WorkerState, check_progress_timeout
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
BACKGROUND_METHODS = frozenset({"Watch", "WatchBlocks", "Drain"})
"""Streams that tell of the worker: its own end does not wait for them."""

MAX_STATUS_INTERVAL_S = 1.0
"""Load figures a router decides by are never older than this."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Sends statuses and changes of the published blocks to every router that watches, and drains.

    Args:
        identity: who this is.
        state: draining or not.
        drain: makes it drain.
        capabilities: what it serves.
        load: current figures; called once a status.
        is_alive: False while the step loop is stuck; then nothing is sent and the watchers' deadlines pass.
        blocks: the published blocks.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        state: WorkerState,
        drain: WorkerDrain,
        capabilities: types_pb2.Capabilities,
        load: Callable[[], worker_pb2.WorkerLoad],
        is_alive: Callable[[], bool],
        blocks: BlockFeed,
    ) -> None:
        self._identity = identity
        self._state = state
        self._drain = drain
        self._capabilities = capabilities
        self._sequence_fields = sorted(own_fields())
        self._load = load
        self._is_alive = is_alive
        self._blocks = blocks

    async def Watch(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.WatchRequest,
        context: ServicerContext[worker_pb2.WatchRequest, worker_pb2.WatchResponse],
    ) -> None:
        check_progress_timeout("progress_timeout_s", request.progress_timeout_s)
        interval_s = min(request.progress_timeout_s / 3, MAX_STATUS_INTERVAL_S)
        while True:
            number = self._state.changes.number
            if self._is_alive():
                await context.write(self._status())
            await self._state.changes.wait_beyond(number, interval_s)

    async def WatchBlocks(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.WatchBlocksRequest,
        context: ServicerContext[worker_pb2.WatchBlocksRequest, worker_pb2.WatchBlocksResponse],
    ) -> None:
        del request
        sequence_number = 0
        async with aclosing(self._blocks.watch()) as feed:
            async for changes in feed:
                for message in block_changes_to_pb(changes):
                    sequence_number += 1
                    message.epoch, message.sequence_number = self._identity.epoch, sequence_number
                    await context.write(message)

    async def Drain(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.DrainRequest,
        context: ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> None:
        self._drain.begin(request.grace_s if request.HasField("grace_s") else None)
        async for progress in self._drain.follow():
            await context.write(
                worker_pb2.DrainResponse(num_running=progress.num_running, grace_left_s=progress.grace_left_s)
            )

    async def Undrain(
        self,
        request: worker_pb2.UndrainRequest,
        context: ServicerContext[worker_pb2.UndrainRequest, worker_pb2.UndrainResponse],
    ) -> worker_pb2.UndrainResponse:
        del request, context
        return worker_pb2.UndrainResponse(was_draining=self._drain.undo())

    def _status(self) -> worker_pb2.WatchResponse:
        return worker_pb2.WatchResponse(
            worker_id=self._identity.worker_id,
            role=self._identity.role,
            pid=self._identity.pid,
            epoch=self._identity.epoch,
            capabilities=self._capabilities,
            sequence_fields=self._sequence_fields,
            draining=self._state.is_draining,
            load=self._load(),
        )
