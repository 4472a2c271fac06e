"""Cache administration: a call comes in, is checked against its tenant, and goes to every worker at the same time.

One worker's failure is its entry's `error`, never the call's: the others have done what was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvferry.config import Config
from kvferry.errors import InvalidArgument, KvferryError, Unavailable
from proto.kvferry.v1 import cache_pb2 as pb
from proto.kvferry.v1 import cache_pb2_grpc, inference_pb2
from router.auth import Authenticator, Tenant, without_places
from router.membership import Membership
from router.models import Models
from router.validation import Limits, Request, validate
from router.worker import MemberState, Worker

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext, UnaryUnaryMultiCallable

    from proto.kvferry.v1.cache_pb2_grpc import WorkerCacheServiceAsyncStub

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheService"].full_name

WORKER_TIMEOUT_S = 10.0
"""A worker answers between two steps; one that takes longer than this is reported as such."""
MAX_PIN_NAME_CHARS = 128

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")
_Entry = TypeVar("_Entry", pb.WorkerMemory, pb.WorkerBlocks)


class _Counted(Protocol):
    """What a worker answers to Flush, Pin and Unpin."""

    num_blocks: int


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Serves operators and tenants.

    Args:
        config: tiers and tenants.
        membership: all workers.
        models: what a prefix may be of.
    """

    def __init__(self, config: Config, membership: Membership, models: Models) -> None:
        self._config = config
        self._authenticator = Authenticator(config)
        self._membership = membership
        self._models = models
        self._tier_names = {tier.rank: tier.name for tier in config.tiers}

    async def GetMemory(
        self, request: pb.GetMemoryRequest, context: ServicerContext[pb.GetMemoryRequest, pb.GetMemoryResponse]
    ) -> pb.GetMemoryResponse:
        del request
        tenant = self._authenticator.tenant(context.invocation_metadata())

        async def ask(worker: Worker) -> pb.WorkerMemory:
            response = await _call(worker, lambda stub: stub.Snapshot, pb.SnapshotRequest())
            return pb.WorkerMemory(memory=self._shown_to(tenant, response.memory))

        return pb.GetMemoryResponse(workers=await self._of(self._membership.workers, tenant, ask, pb.WorkerMemory))

    async def FlushPrefixCache(
        self,
        request: pb.FlushPrefixCacheRequest,
        context: ServicerContext[pb.FlushPrefixCacheRequest, pb.FlushPrefixCacheResponse],
    ) -> pb.FlushPrefixCacheResponse:
        tenant = self._authenticator.tenant(context.invocation_metadata())
        everybody = tenant.is_admin and not request.tenant
        owner = self._authenticator.acting_for(tenant, request.tenant)
        flush = pb.FlushRequest(tenant=None if everybody else owner)
        return pb.FlushPrefixCacheResponse(
            workers=await self._blocks_of(
                self._membership.workers, tenant, lambda worker: _call(worker, lambda stub: stub.Flush, flush)
            )
        )

    async def PinPrefix(
        self, request: pb.PinPrefixRequest, context: ServicerContext[pb.PinPrefixRequest, pb.PinPrefixResponse]
    ) -> pb.PinPrefixResponse:
        tenant = self._authenticator.tenant(context.invocation_metadata())
        owner = self._authenticator.acting_for(tenant, request.tenant)
        _check_pin_name(request.name)
        model = self._models.find(request.model)
        with self._authenticator.answering(context.invocation_metadata()):
            limits = model.limits(self._config)
        prefix = _validated(request, limits)
        token_ids = await model.tokenize(prefix.prompt, limits)
        workers = [worker for worker in self._membership.workers if worker.model in ("", model.name)]
        pin = pb.PinRequest(
            name=request.name,
            tenant=owner,
            token_ids=token_ids,
            adapter=prefix.adapter,
            cache_salt=prefix.cache_salt,
            shared_salt=prefix.shared_salt,
        )
        return pb.PinPrefixResponse(
            num_tokens=len(token_ids),
            num_full_blocks=len(token_ids) // limits.block_size,
            workers=await self._blocks_of(workers, tenant, lambda worker: _call(worker, lambda stub: stub.Pin, pin)),
        )

    async def UnpinPrefix(
        self, request: pb.UnpinPrefixRequest, context: ServicerContext[pb.UnpinPrefixRequest, pb.UnpinPrefixResponse]
    ) -> pb.UnpinPrefixResponse:
        tenant = self._authenticator.tenant(context.invocation_metadata())
        owner = self._authenticator.acting_for(tenant, request.tenant)
        _check_pin_name(request.name)
        unpin = pb.UnpinRequest(name=request.name, tenant=owner)
        return pb.UnpinPrefixResponse(
            workers=await self._blocks_of(
                self._membership.workers, tenant, lambda worker: _call(worker, lambda stub: stub.Unpin, unpin)
            )
        )

    def _shown_to(self, tenant: Tenant, memory: pb.MemorySnapshot) -> pb.MemorySnapshot:
        """All of it to an administrator, tiers with their names; to others their own row: totals tell of neighbours."""
        if not tenant.is_admin:
            own = [row for row in memory.tenants if row.tenant == tenant.name]
            return pb.MemorySnapshot(num_blocks=memory.num_blocks, block_size=memory.block_size, tenants=own)
        shown = pb.MemorySnapshot()
        shown.CopyFrom(memory)
        for tier in shown.tiers:
            tier.tier = self._tier_names.get(tier.rank, "")
        return shown

    async def _blocks_of(
        self, workers: Iterable[Worker], tenant: Tenant, call: Callable[[Worker], Coroutine[Any, Any, _Counted]]
    ) -> list[pb.WorkerBlocks]:
        async def ask(worker: Worker) -> pb.WorkerBlocks:
            return pb.WorkerBlocks(num_blocks=(await call(worker)).num_blocks)

        return await self._of(workers, tenant, ask, pb.WorkerBlocks)

    async def _of(
        self,
        workers: Iterable[Worker],
        tenant: Tenant,
        ask: Callable[[Worker], Coroutine[Any, Any, _Entry]],
        make_entry: type[_Entry],
    ) -> list[_Entry]:
        """What each of them answers, with its name and, for administrators, address; an error where it does not."""

        async def entry(worker: Worker) -> _Entry:
            try:
                found = await ask(worker)
            except KvferryError as error:
                found = make_entry(error=error.message if tenant.is_admin else without_places(error.message))
            found.worker = worker.name if tenant.is_admin else worker.public_name
            found.role = worker.role.value
            found.address = worker.address if tenant.is_admin else ""
            return found

        return list(await asyncio.gather(*(entry(worker) for worker in workers)))


async def _call(
    worker: Worker,
    method: Callable[[WorkerCacheServiceAsyncStub], UnaryUnaryMultiCallable[_Question, _Answer]],
    request: _Question,
) -> _Answer:
    """Asks one worker; raises Unavailable for one that is not there or does not belong here."""
    if worker.state in (MemberState.CONNECTING, MemberState.REFUSED):
        raise Unavailable(f"{worker.state.value}: {worker.reason}")
    stub = cache_pb2_grpc.WorkerCacheServiceStub(worker.channel.grpc)
    return await worker.channel.unary(method(stub), request, timeout_s=WORKER_TIMEOUT_S)


def _validated(request: pb.PinPrefixRequest, limits: Limits) -> Request:
    """Prompt, adapter and salts are checked as those of a request that generates."""
    if request.cache.bypass_prefix_cache:
        raise InvalidArgument("cache.bypass_prefix_cache", "must not be set: there would be nothing to pin")
    message = inference_pb2.GenerateRequest(adapter=request.adapter, cache=request.cache)
    match request.WhichOneof("prompt"):
        case "text":
            message.text = request.text
        case "token_ids":
            message.token_ids.CopyFrom(request.token_ids)
        case "chat":
            message.chat.CopyFrom(request.chat)
    return validate(message, limits, lambda: 0)


def _check_pin_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_PIN_NAME_CHARS or not name.isprintable():
        raise InvalidArgument("name", f"must be 1 … {MAX_PIN_NAME_CHARS} printable characters, has {len(name)}")
