"""Liveness of internal streams above keepalive: heartbeats at one end, a progress deadline at the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc.aio

from kvferry.errors import Unavailable
from kvferry.telemetry import log_event

if TYPE_CHECKING:  # subscripted at type-check time only; at run time these classes are not generic
    from grpc.aio import ServicerContext, StreamStreamCall, UnaryStreamCall

_Message = TypeVar("_Message")

logger = logging.getLogger(__name__)


async def read_with_progress_deadline(
    call: UnaryStreamCall[Any, _Message] | StreamStreamCall[Any, _Message] | ServicerContext[_Message, Any],
    timeout_s: float | None,
    peer: str = "the peer",
) -> _Message | None:
    """The next message of `call` (a call, or a servicer context); None at the end of the stream.

    Raises Unavailable after `timeout_s` of silence; None bears any. The call is then cancelled by the library, as an
    interrupted read always is.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message: Any = await call.read()
    except TimeoutError as error:
        raise Unavailable(f"{peer} made no progress for {timeout_s:g} s") from error
    return None if message is grpc.aio.EOF else message


class HeartbeatWriter(Generic[_Message]):
    """Writes messages to a stream, one at a time (the library cannot take two), and a heartbeat in every silence.

    Use it as `async with`; the heartbeats end with the block. A write that does not get through in `stall_timeout_s`
    (the peer reads nothing and all buffers are full) raises Unavailable.
    """

    def __init__(
        self,
        write: Callable[[_Message], Awaitable[None]],
        make_heartbeat: Callable[[], _Message],
        *,
        interval_s: float,
        stall_timeout_s: float,
        peer: str = "the peer",
    ) -> None:
        self._write = write
        self._make_heartbeat = make_heartbeat
        self._interval_s = interval_s
        self._stall_timeout_s = stall_timeout_s
        self._peer = peer
        self._lock = asyncio.Lock()
        self._wrote_at_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._wrote_at_s = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        if error is None:  # an interrupted write would cancel the call, so let a heartbeat on its way get out
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s), self._lock:
                    self._task.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])  # a cancellation of this task itself must not be lost

    async def write(self, message: _Message) -> None:
        """Writes one message after those before it."""
        async with self._lock:
            await self._write_now(message)

    async def _write_now(self, message: _Message) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._write(message)
        except TimeoutError as error:
            raise Unavailable(f"{self._peer} took nothing for {self._stall_timeout_s:g} s") from error
        self._wrote_at_s = asyncio.get_running_loop().time()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent_s = loop.time() - self._wrote_at_s
            if silent_s < self._interval_s:
                await asyncio.sleep(self._interval_s - silent_s)
                continue
            async with self._lock:
                if loop.time() - self._wrote_at_s < self._interval_s:
                    continue
                try:
                    await self._write_now(self._make_heartbeat())
                except Exception as error:  # noqa: BLE001 - the stream's reader learns of its end; nothing to do here
                    log_event(logger, "heartbeat_failed", level=logging.DEBUG, error=type(error).__name__)
                    return
