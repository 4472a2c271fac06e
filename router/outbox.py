"""Messages for one client that it has not taken yet, so that a slow client slows only itself.

Workers' streams are read at their own pace; what the client has not taken is merged into few deltas. The outbox holds
no more than the request's `max_tokens` ids, their text, and a handful of other messages: that is its bound.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvferry.errors import KvferryError
from proto.kvferry.v1 import inference_pb2 as pb

MAX_MERGED_TOKENS = 256
MAX_MERGED_CHARS = 4096
"""A delta takes no more: each merge copies its text."""


class Outbox:
    """One producer, one consumer."""

    def __init__(self) -> None:
        self._messages: deque[pb.GenerateResponse] = deque()
        self._filled = asyncio.Event()
        self._closed = False
        self._error: KvferryError | None = None

    def put(self, message: pb.GenerateResponse) -> None:
        """Adds a message, or merges a delta into the one that waits."""
        last = self._messages[-1] if self._messages else None
        if last is not None and message.HasField("delta") and _has_room(last):
            _merge(last.delta, message.delta)
        else:
            self._messages.append(message)
        self._filled.set()

    def close(self, error: KvferryError | None = None) -> None:
        """Nothing more comes; `error` is raised to the consumer after the messages before it."""
        if not self._closed:
            self._closed, self._error = True, error
            self._filled.set()

    async def take(self) -> pb.GenerateResponse | None:
        """The next message, None at the end; raises the error the outbox was closed with."""
        while not self._messages:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()


def _has_room(message: pb.GenerateResponse) -> bool:
    delta = message.delta
    return message.HasField("delta") and len(delta.token_ids) < MAX_MERGED_TOKENS and len(delta.text) < MAX_MERGED_CHARS


def _merge(first: pb.ChoiceDelta, second: pb.ChoiceDelta) -> None:
    if not first.token_ids:
        first.token_index, first.position = second.token_index, second.position
    first.token_ids.extend(second.token_ids)
    first.text += second.text
