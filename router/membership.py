"""Which workers are there: whoever is listed, by configuration, a name or itself, is watched.

    listed (`discovery.py`, `join_service.py`) ─► one `Watch` stream each ─► status ─► accepted or refused
                                                  not listed any more, and lost ─► forgotten

A stream that breaks, or is silent for the progress timeout, means the worker is gone: nothing goes there from that
moment, and the router tries again with growing pauses while it is listed. A worker that is listed no more stays for as
long as its stream lives. Of each model the first worker accepted says what is served; one that differs is refused, both
values named, and stays refused until it comes back as something else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from opentelemetry.trace import Tracer

from kvferry.errors import KvferryError, Unavailable
from kvferry.rpc import RpcChannel, read_with_progress_deadline
from kvferry.tasks import Changes
from kvferry.telemetry import log_event
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from router.block_index import BlockIndex
from router.block_watch import BlockWatch
from router.worker import NOT_REACHED, MemberState, Role, ServedModel, Worker, WorkerStatus

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a worker's status must say for it to serve a model of this router.

    Attributes:
        name: what workers call it; one of `aliases` will do.
        vocab_size: ids of the router's tokenizer; a worker with another number is refused.
    """

    name: str
    vocab_size: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(slots=True)
class _Member:
    """A worker, who lists it, and the task that watches it."""

    worker: Worker
    sources: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class Membership:
    """Watches all workers; use it as `async with`.

    Args:
        models: those this router serves.
        local_prefill: decode workers compute prompts themselves.
        progress_timeout_s: silence after which a worker counts as lost.
        max_message_bytes: largest message a worker may send.
        tracer: for the calls of requests; watching leaves no spans.
        blocks: which blocks the accepted workers hold.

    Attributes:
        changes: told of every change of any worker's state.
    """

    def __init__(
        self,
        models: Iterable[ModelIdentity],
        *,
        local_prefill: bool,
        progress_timeout_s: float,
        max_message_bytes: int,
        tracer: Tracer,
        blocks: BlockIndex,
    ) -> None:
        self.local_prefill = local_prefill
        self.changes = Changes()
        self._models = {name: model for model in models for name in model.names}
        self._served: dict[str, ServedModel] = {}
        self.blocks = blocks
        self._progress_timeout_s = progress_timeout_s
        self._max_message_bytes = max_message_bytes
        self._tracer = tracer
        self._members: dict[tuple[Role, str], _Member] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        watches = [member.task for member in self._members.values() if member.task is not None]
        for task in (*watches, *self._closing):
            task.cancel()
        await asyncio.gather(*watches, *self._closing, return_exceptions=True)

    # -- who is there --------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them, prefill before decode, in the order they were listed."""
        return (*self.prefill, *self.decode)

    @property
    def prefill(self) -> tuple[Worker, ...]:
        return self._of_role(Role.PREFILL)

    @property
    def decode(self) -> tuple[Worker, ...]:
        return self._of_role(Role.DECODE)

    def _of_role(self, role: Role) -> tuple[Worker, ...]:
        return tuple(member.worker for member in self._members.values() if member.worker.role is role)

    def ready(self, role: Role) -> list[Worker]:
        """Workers of a role, whatever their model, that take requests now."""
        return [worker for worker in self._of_role(role) if worker.state is MemberState.READY]

    def served(self, model: str) -> ServedModel | None:
        """What the workers of a model agree on; None until one was accepted."""
        return self._served.get(model)

    # -- who is listed -------------------------------------------------------------------------------------------------

    def list_workers(self, source: str, role: Role, addresses: frozenset[str]) -> None:
        """`source` lists these workers of a role from now on, and no others."""
        for address in sorted(addresses):
            member = self._members.get((role, address)) or self._add(role, address)
            member.sources.add(source)
        for member in list(self._members.values()):
            if member.worker.role is role and source in member.sources and member.worker.address not in addresses:
                member.sources.discard(source)
                if member.worker.state not in (MemberState.READY, MemberState.DRAINING):
                    self._forget_if_unlisted(member)

    def _add(self, role: Role, address: str) -> _Member:
        channel = RpcChannel(address, tracer=self._tracer, max_message_bytes=self._max_message_bytes)
        member = _Member(Worker(address, role, channel, self.blocks))
        self._members[role, address] = member
        member.task = asyncio.create_task(self._watch(member))
        self.changes.notify()
        return member

    def _forget_if_unlisted(self, member: _Member) -> None:
        if member.sources:
            return
        worker = member.worker
        log_event(logger, "worker_left", worker=worker.name, role=worker.role.value, address=worker.address)
        del self._members[worker.role, worker.address]
        closing = asyncio.create_task(_close_when_unused(member))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.changes.notify()

    # -- watching ------------------------------------------------------------------------------------------------------

    async def _watch(self, member: _Member) -> None:
        worker, backoff_s = member.worker, FIRST_BACKOFF_S
        try:
            async with RpcChannel(worker.address) as channel:
                while True:
                    before = worker.status
                    try:
                        await self._follow(worker, channel)
                    except KvferryError as error:
                        reason = error.message
                    except asyncio.CancelledError:
                        if _is_own_cancel():
                            raise
                        reason = "the worker ended the watch"  # grpc.aio turns the peer's CANCELLED into this exception
                    if worker.status is not before:  # it was there in between
                        backoff_s = FIRST_BACKOFF_S
                    self._set(worker, MemberState.CONNECTING, reason)
                    self._forget_if_unlisted(member)
                    await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            if self._members.get((worker.role, worker.address)) is member:  # else it is closed when nothing uses it
                await worker.channel.close()

    async def _follow(self, worker: Worker, channel: RpcChannel) -> None:
        """Takes statuses until the stream ends; always raises."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel.grpc)
        request = worker_pb2.WatchRequest(progress_timeout_s=self._progress_timeout_s)
        watch = BlockWatch(channel, worker.address, self.blocks)
        async with channel.stream(stub.Watch, request) as call, watch as block_watch:
            while True:
                message = await read_with_progress_deadline(call, self._progress_timeout_s, worker.address)
                if message is None:
                    raise Unavailable(f"{worker.address} ended the watch")
                self._take(worker, WorkerStatus.from_pb(message))
                block_watch.follow(worker.was_accepted)

    def _take(self, worker: Worker, status: WorkerStatus) -> None:
        if worker.status is not None and worker.status.epoch != status.epoch:
            worker.breaker.on_answer()  # it is another process now
        model = self._models.get(status.served.model)
        if model is not None:  # it may go by an alias
            status = dataclasses.replace(status, served=dataclasses.replace(status.served, model=model.name))
        worker.status = status
        refusal = self._refusal(worker, status, model)
        worker.was_accepted = not refusal
        if refusal:
            self._set(worker, MemberState.REFUSED, refusal)
            return
        self._served.setdefault(status.served.model, status.served)
        if status.draining:
            self._set(worker, MemberState.DRAINING, "it finishes what runs")
        else:
            self._set(worker, MemberState.READY, "")

    def _refusal(self, worker: Worker, status: WorkerStatus, model: ModelIdentity | None) -> str:
        if status.role is not worker.role:
            return f"it is a {status.role.value} worker, configured as {worker.role.value}"
        if model is None:
            known = ", ".join(dict.fromkeys(model.name for model in self._models.values()))
            return f"model: {known} here, {status.served.model} there"
        num_ids = status.served.vocab_size
        if num_ids != model.vocab_size:
            return f"vocab_size: {model.vocab_size} in the router's tokenizer, {num_ids} there"
        served = self._served.get(model.name)
        differences = served.differences(status.served) if served is not None else ()
        return f"it differs from this deployment: {'; '.join(differences)}" if differences else ""

    def _set(self, worker: Worker, state: MemberState, reason: str) -> None:
        if (worker.state, worker.reason) == (state, reason):
            return
        is_lost = state is MemberState.CONNECTING
        was_never_there = worker.state is state and worker.reason == NOT_REACHED
        if worker.state is not state or was_never_there:
            level = logging.WARNING if is_lost or state is MemberState.REFUSED else logging.INFO
            event = "unreachable" if was_never_there else "lost" if is_lost else state.value
            log_event(
                logger,
                f"worker_{event}",
                level=level,
                worker=worker.name,
                role=worker.role.value,
                address=worker.address,
                reason=reason,
            )
        worker.state, worker.reason = state, reason
        self.changes.notify()


async def _close_when_unused(member: _Member) -> None:
    """Requests that run there end as they will; the watch ends now."""
    assert member.task is not None
    try:
        member.task.cancel()
        await asyncio.wait([member.task])
        await member.worker.unused()
    finally:
        await member.worker.channel.close()


def _is_own_cancel() -> bool:
    """Whether this task was asked to end, as opposed to a peer that ended its call with CANCELLED."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
