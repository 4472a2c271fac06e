"""Keeps the index of one worker's published blocks up to date: its `WatchBlocks` stream, for as long as it is a member.

This is not the worker's membership: a stream that breaks, or misses a message, costs what was known and is begun anew
after a growing pause, while requests go there as before. A worker that falls silent is noticed by `membership.py`,
whose own stream ends this one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from types import TracebackType
from typing import Self

from kvferry.errors import KvferryError, Unavailable, UnsupportedField
from kvferry.rpc import RpcChannel
from kvferry.tasks import run_until_first
from kvferry.telemetry import log_event
from kvferry.wire import numbered_changes_from_pb
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from router.block_index import BlockIndex, Outcome

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class BlockWatch:
    """Owner of the stream of one worker; use it as `async with`, around the worker's membership.

    Args:
        channel: to the worker; leaves no spans.
        worker: its key in `index`, and its address for people.
        index: nothing of the worker is left there at the end.
    """

    def __init__(self, channel: RpcChannel, worker: str, index: BlockIndex) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel.grpc)
        self._channel = channel
        self._worker = worker
        self._index = index
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task = self._task
        self.follow(False)
        if task is not None:
            await asyncio.wait([task])

    def follow(self, is_member: bool) -> None:
        """Begins with a worker that is a member, ends with one that is not; else goes on as it is."""
        if is_member and self._task is None:
            self._task = asyncio.create_task(self._run())
        if not is_member and self._task is not None:
            self._task.cancel()
            self._task = None
            self._index.forget(self._worker)

    async def _run(self) -> None:
        backoff_s, clock = FIRST_BACKOFF_S, asyncio.get_running_loop().time
        while True:
            begin_s = clock()
            try:
                await run_until_first(self._read())
            except UnsupportedField:
                log_event(logger, "blocks_not_told", worker=self._worker)  # an earlier version: it stays so
                return
            except KvferryError as error:
                log_event(logger, "block_watch_ended", worker=self._worker, reason=error.message)
            finally:
                self._index.forget(self._worker)
            if clock() - begin_s > MAX_BACKOFF_S:  # it was well in between
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _read(self) -> None:
        """Takes changes until the stream ends; always raises."""
        async with self._channel.stream(self._stub.WatchBlocks, worker_pb2.WatchBlocksRequest()) as call:
            async for message in call:
                if self._index.take(self._worker, numbered_changes_from_pb(message)) is Outcome.GAP:
                    raise Unavailable(f"{self._worker}: a message before number {message.sequence_number} is missing")
        raise Unavailable(f"{self._worker} ended the stream")
