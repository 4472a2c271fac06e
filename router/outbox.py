"""Messages for one client that it has not taken yet, so that a slow client slows only itself.

Workers' streams are read at their own pace; what the client has not taken is merged into few deltas a choice. It
holds no more than the request's `max_tokens` × n ids, their text, an echoed prompt a choice, the log-probabilities of
one prompt, and a handful of other messages a choice: that is its bound. Heartbeats are made as they are taken, so none
ever waits behind another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from kvferry.errors import KvferryError
from proto.kvferry.v1 import inference_pb2 as pb

_Result = TypeVar("_Result")

MAX_MERGED_TOKENS = 256
MAX_MERGED_CHARS = 4096
"""A delta takes no more: each merge copies its text."""


class Outbox:
    """One producer, one consumer.

    Args:
        heartbeat_interval_s: a heartbeat precedes `Started`, to say that they come, and then one is made whenever
            nothing else came for so long. None for a client that wants none.
    """

    def __init__(self, heartbeat_interval_s: float | None = None) -> None:
        self._interval_s = heartbeat_interval_s
        self._messages: deque[pb.GenerateResponse] = deque()
        self._last_deltas: dict[int, pb.GenerateResponse] = {}  # by choice: the last delta that waits
        self._filled = asyncio.Event()
        self._closed = False
        self._error: KvferryError | None = None

    def put(self, message: pb.GenerateResponse) -> None:
        """Adds a message, or merges a delta into the one of its choice that waits."""
        if message.HasField("delta"):
            last = self._last_deltas.get(message.delta.index)
            if last is not None and _has_room(last.delta):
                _merge(last.delta, message.delta)
                return
            self._last_deltas[message.delta.index] = message
        if message.HasField("prompt_logprobs"):
            self._last_deltas.clear()  # no token behind it may slip into a delta before it
        if message.HasField("started") and self._interval_s is not None:
            self._messages.append(_heartbeat())
        self._messages.append(message)
        self._filled.set()

    def take_all(self) -> list[pb.GenerateResponse]:
        """Everything that waits."""
        messages = list(self._messages)
        self._messages.clear()
        self._last_deltas.clear()
        return messages

    def close(self, error: KvferryError | None = None) -> None:
        """Nothing more comes; `error` is raised to the consumer after the messages before it."""
        if not self._closed:
            self._closed, self._error = True, error
            self._filled.set()

    async def take(self) -> pb.GenerateResponse | None:
        """The next message, None at the end; raises the error the outbox was closed with.

        A heartbeat says that the producer has not closed the outbox: the request is under way.
        """
        while not self._messages:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._filled.clear()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._filled.wait()
            except TimeoutError:
                return _heartbeat()
        message = self._messages.popleft()
        if self._last_deltas.get(message.delta.index) is message:
            del self._last_deltas[message.delta.index]
        return message


async def beating(
    work: Coroutine[None, None, _Result],
    write: Callable[[pb.GenerateResponse], Awaitable[None]],
    heartbeat_interval_s: float | None,
) -> _Result:
    """The result of `work`, with heartbeats while it takes. What is raised by either ends both."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=heartbeat_interval_s))[0]:
            await write(_heartbeat())
        return task.result()
    finally:
        task.cancel()  # of no effect once it is done
        await asyncio.wait([task])


def _heartbeat() -> pb.GenerateResponse:
    return pb.GenerateResponse(heartbeat=pb.StreamHeartbeat())


def _has_room(delta: pb.ChoiceDelta) -> bool:
    num_tokens = max(len(delta.token_ids), len(delta.logprobs))
    return num_tokens < MAX_MERGED_TOKENS and len(delta.text) < MAX_MERGED_CHARS


def _merge(first: pb.ChoiceDelta, second: pb.ChoiceDelta) -> None:
    if not (first.token_ids or first.logprobs):
        first.token_index, first.position = second.token_index, second.position
    first.token_ids.extend(second.token_ids)
    first.logprobs.extend(second.logprobs)
    first.text += second.text
