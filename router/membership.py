"""Which workers are there: one `Watch` stream for each configured address, for as long as the router runs.

A stream that breaks, or is silent for the progress timeout, means the worker is gone: nothing goes there from that
moment, and the router tries again with growing pauses. The first worker accepted says what this deployment serves; one
that differs is refused, both values named, and stays refused until it comes back as something else. The router starts
with any number of workers down.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Self

from opentelemetry.trace import Tracer

from kvferry.errors import KvferryError, Unavailable
from kvferry.rpc import RpcChannel, read_with_progress_deadline
from kvferry.telemetry import log_event
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from router.block_index import BlockIndex
from router.block_watch import BlockWatch
from router.worker import NOT_REACHED, MemberState, Role, ServedModel, Worker, WorkerStatus

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class Membership:
    """Watches all configured workers; use it as `async with`.

    Args:
        prefill: addresses of prefill workers; none where decode computes prompts itself.
        decode: addresses of decode workers.
        progress_timeout_s: silence after which a worker counts as lost.
        max_message_bytes: largest message a worker may send.
        vocab_size: ids of the router's tokenizer; a worker with another number is refused.
        tracer: for the calls of requests; watching leaves no spans.
        blocks: which blocks the accepted workers hold.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        progress_timeout_s: float,
        max_message_bytes: int,
        vocab_size: int,
        tracer: Tracer,
        blocks: BlockIndex,
    ) -> None:
        def worker(address: str, role: Role) -> Worker:
            channel = RpcChannel(address, tracer=tracer, max_message_bytes=max_message_bytes)
            return Worker(address, role, channel, blocks)

        self.prefill = tuple(worker(address, Role.PREFILL) for address in dict.fromkeys(prefill))
        self.decode = tuple(worker(address, Role.DECODE) for address in dict.fromkeys(decode))
        self.served: ServedModel | None = None
        self.blocks = blocks
        self._vocab_size = vocab_size
        self._progress_timeout_s = progress_timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._watch(worker)) for worker in self.workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            await worker.channel.close()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (*self.prefill, *self.decode)

    @property
    def local_prefill(self) -> bool:
        """No prefill workers are configured: decode computes prompts itself."""
        return not self.prefill

    def ready(self, role: Role) -> list[Worker]:
        """Workers of a role that take requests now."""
        workers = self.prefill if role is Role.PREFILL else self.decode
        return [worker for worker in workers if worker.state is MemberState.READY]

    @property
    def missing(self) -> tuple[str, ...]:
        """Why no request can be served now, one line a role; empty when one can."""
        roles = (Role.DECODE,) if self.local_prefill else (Role.PREFILL, Role.DECODE)
        return tuple(self.why_missing(role) for role in roles if not self.ready(role))

    def why_missing(self, role: Role) -> str:
        """For people: no worker of this role is ready, with the reason for each."""
        workers = self.prefill if role is Role.PREFILL else self.decode
        reasons = "; ".join(f"{worker.address} is {worker.state.value}: {worker.reason}" for worker in workers)
        return f"no {role.value} worker is ready ({reasons or 'none is configured'})"

    async def wait_changed(self) -> None:
        """Returns at the next change of any worker's state."""
        await self._changed.wait()

    async def _watch(self, worker: Worker) -> None:
        backoff_s = FIRST_BACKOFF_S
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
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

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
        worker.status = status
        refusal = self._refusal(worker, status)
        worker.was_accepted = not refusal
        if refusal:
            self._set(worker, MemberState.REFUSED, refusal)
            return
        self.served = self.served or status.served
        if status.draining:
            self._set(worker, MemberState.DRAINING, "it finishes what runs")
        else:
            self._set(worker, MemberState.READY, "")

    def _refusal(self, worker: Worker, status: WorkerStatus) -> str:
        if status.role is not worker.role:
            return f"it is a {status.role.value} worker, configured as {worker.role.value}"
        num_ids = status.served.vocab_size
        if num_ids != self._vocab_size:
            return f"vocab_size: {self._vocab_size} in the router's tokenizer, {num_ids} there"
        differences = self.served.differences(status.served) if self.served is not None else ()
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
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _is_own_cancel() -> bool:
    """Whether this task was asked to end, as opposed to a peer that ended its call with CANCELLED."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
