"""The worker's end of cache administration: the router's calls, carried out by whoever owns the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvferry.spec import CachedPrefix
from kvferry.stats import MemorySnapshot
from kvferry.wire import memory_to_pb
from proto.kvferry.v1 import cache_pb2 as pb
from proto.kvferry.v1 import cache_pb2_grpc

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

WORKER_CACHE_SERVICE = pb.DESCRIPTOR.services_by_name["WorkerCacheService"].full_name


class MemoryAdmin(Protocol):
    """The KV memory of one worker."""

    async def snapshot(self) -> MemorySnapshot: ...

    async def flush(self, tenant: str | None) -> int:
        """Makes the blocks of `tenant` unfindable, all when None; returns how many were published."""

    async def pin(self, name: str, prefix: CachedPrefix) -> int:
        """Pins what is published of `prefix`; returns the blocks the pin holds. Raises ResourceExhausted."""

    async def unpin(self, name: str, tenant: str) -> int:
        """Ends a pin; returns the blocks it held."""


class WorkerCacheServicer(cache_pb2_grpc.WorkerCacheServiceServicer):
    """Serves routers."""

    def __init__(self, memory: MemoryAdmin) -> None:
        self._memory = memory

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: ServicerContext[pb.SnapshotRequest, pb.SnapshotResponse]
    ) -> pb.SnapshotResponse:
        del request, context
        return pb.SnapshotResponse(memory=memory_to_pb(await self._memory.snapshot()))

    async def Flush(
        self, request: pb.FlushRequest, context: ServicerContext[pb.FlushRequest, pb.FlushResponse]
    ) -> pb.FlushResponse:
        del context
        tenant = request.tenant if request.HasField("tenant") else None
        return pb.FlushResponse(num_blocks=await self._memory.flush(tenant))

    async def Pin(
        self, request: pb.PinRequest, context: ServicerContext[pb.PinRequest, pb.PinResponse]
    ) -> pb.PinResponse:
        del context
        prefix = CachedPrefix(
            tuple(request.token_ids),
            tenant=request.tenant,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            shared_salt=request.shared_salt,
        )
        return pb.PinResponse(num_blocks=await self._memory.pin(request.name, prefix))

    async def Unpin(
        self, request: pb.UnpinRequest, context: ServicerContext[pb.UnpinRequest, pb.UnpinResponse]
    ) -> pb.UnpinResponse:
        del context
        return pb.UnpinResponse(num_blocks=await self._memory.unpin(request.name, request.tenant))
