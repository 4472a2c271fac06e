"""Operating the workers: an administrator's order comes in, the worker it names gets it, and progress goes back.

    DrainWorker ─► whose call ─► which worker ─► is another one left ─► the worker's Drain ─► its progress

The worker does the draining and tells every router that watches it; this router learns of it like the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unavailable
from kvferry.rpc import read_with_progress_deadline
from kvferry.telemetry import log_event
from proto.kvferry.v1 import admin_pb2 as pb
from proto.kvferry.v1 import admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.auth import Authenticator
from router.membership import Membership
from router.worker import MemberState, Worker

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

    from router.auth import Metadata

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
BACKGROUND_METHODS = frozenset({"DrainWorker"})
"""Tells of a drain for as long as that takes; the end of the router does not wait for it."""

WORKER_TIMEOUT_S = 10.0
"""A worker tells of its drain every second; one that says nothing for this long is reported as such."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves administrators.

    Args:
        authenticator: whose call it is.
        membership: the workers.
    """

    def __init__(self, authenticator: Authenticator, membership: Membership) -> None:
        self._authenticator = authenticator
        self._membership = membership

    async def DrainWorker(  # type: ignore[override]  # a coroutine that writes
        self,
        request: pb.DrainWorkerRequest,
        context: ServicerContext[pb.DrainWorkerRequest, pb.DrainWorkerResponse],
    ) -> None:
        self._check_admin(context.invocation_metadata())
        worker = self._reachable(request.worker)
        if not request.force:
            self._check_not_last(worker)
        log_event(logger, "drain_ordered", worker=worker.name, address=worker.address, force=request.force)
        order = worker_pb2.DrainRequest(grace_s=request.grace_s if request.HasField("grace_s") else None)
        stub = worker_pb2_grpc.WorkerServiceStub(worker.channel.grpc)
        async with worker.channel.stream(stub.Drain, order) as call:
            num_running = -1
            while (progress := await read_with_progress_deadline(call, WORKER_TIMEOUT_S, worker.address)) is not None:
                num_running = progress.num_running
                await context.write(
                    pb.DrainWorkerResponse(
                        worker=worker.name,
                        role=worker.role.value,
                        num_running=num_running,
                        grace_left_s=progress.grace_left_s,
                    )
                )
        if num_running != 0:
            raise Unavailable(f"worker {worker.name} ended before its drain was complete")

    async def UndrainWorker(
        self,
        request: pb.UndrainWorkerRequest,
        context: ServicerContext[pb.UndrainWorkerRequest, pb.UndrainWorkerResponse],
    ) -> pb.UndrainWorkerResponse:
        self._check_admin(context.invocation_metadata())
        worker = self._reachable(request.worker)
        log_event(logger, "undrain_ordered", worker=worker.name, address=worker.address)
        stub = worker_pb2_grpc.WorkerServiceStub(worker.channel.grpc)
        answer = await worker.channel.unary(stub.Undrain, worker_pb2.UndrainRequest(), timeout_s=WORKER_TIMEOUT_S)
        return pb.UndrainWorkerResponse(worker=worker.name, role=worker.role.value, was_draining=answer.was_draining)

    def _check_admin(self, metadata: Metadata | None) -> None:
        tenant = self._authenticator.tenant(metadata)
        if not tenant.is_admin:
            raise PermissionDenied(f"only an administrator may drain workers; this API key is tenant {tenant.name!r}'s")

    def _reachable(self, name: str) -> Worker:
        """The worker of this name or address that answers.

        Raises:
            NotFound: there is none; names the known ones.
            InvalidArgument: there are several.
            Unavailable: it cannot be reached, or does not belong here.
        """
        workers = self._membership.workers
        found = [worker for worker in workers if name in (worker.name, worker.address)]
        if not found:
            raise NotFound(f"worker: there is no worker {name!r}; known workers: {_listed(workers)}", field="worker")
        if len(found) > 1:
            raise InvalidArgument("worker", f"several workers are called {name!r}, give an address: {_listed(found)}")
        worker = found[0]
        if worker.state in (MemberState.CONNECTING, MemberState.REFUSED):
            raise Unavailable(f"worker {worker.name} is {worker.state.value}: {worker.reason}")
        return worker

    def _check_not_last(self, worker: Worker) -> None:
        """Raises FailedPrecondition where no other worker of its role would take requests of its model."""
        ready = [other for other in self._membership.ready(worker.role) if other.model == worker.model]
        if ready == [worker]:
            raise FailedPrecondition(
                f"{worker.name} is the last ready {worker.role.value} worker: without it requests are refused; "
                "start or undrain another one, or drain it all the same by force (--force)",
                field="worker",
            )


def _listed(workers: Sequence[Worker]) -> str:
    """Name and address of each."""
    return ", ".join(f"{worker.name} ({worker.address})" for worker in workers) or "none"
