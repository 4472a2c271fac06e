"""Where the messages of a call's requests go: into one JSON response, or into a stream of events as they come.

A stream's head waits for the first output, so that whatever goes wrong before is told with its HTTP status and may be
repeated. Requests of several prompts start together: none is told of before all are accepted.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from proto.kvferry.v1 import inference_pb2 as pb
from router.openai.exchange import Exchange
from router.openai.responses import Choice, ResponseText


class Writer(Protocol):
    """One of the two."""

    async def write(self, prompt: int, message: pb.GenerateResponse) -> None:
        """Takes a message of a prompt's request."""

    async def end(self) -> None:
        """All requests have ended well."""


class WholeWriter:
    """Keeps everything to the end: text and log-probabilities of at most `max_tokens` × n tokens a prompt."""

    def __init__(self, exchange: Exchange, response: ResponseText) -> None:
        self._exchange, self._response = exchange, response

    async def write(self, prompt: int, message: pb.GenerateResponse) -> None:
        """Takes a message of a prompt's request."""
        self._response.take(prompt, message)

    async def end(self) -> None:
        """Sends the response."""
        await self._exchange.answer(self._response.whole())


class EventWriter:
    """Sends a chunk a message."""

    def __init__(self, exchange: Exchange, response: ResponseText, *, num_prompts: int, includes_usage: bool) -> None:
        self._exchange, self._response = exchange, response
        self._num_prompts = num_prompts
        self._includes_usage = includes_usage
        self._all_started = asyncio.Event()

    async def write(self, prompt: int, message: pb.GenerateResponse) -> None:
        """Takes a message of a prompt's request; returns when the client's connection has room for more."""
        choice = self._response.take(prompt, message)
        if self._response.num_started == self._num_prompts:
            self._all_started.set()
        await self._all_started.wait()
        if choice is not None and choice.has_news:
            await self._tell(choice)

    async def _tell(self, choice: Choice) -> None:
        if self._response.form.is_chat and not choice.is_open:
            await self._send(choice.opening())
        await self._send(choice.take(is_chunk=True))

    async def _send(self, *choices: dict[str, object]) -> None:
        usage = {"usage": None} if self._includes_usage else {}
        await self._exchange.event({**self._response.chunk(*choices), **usage})

    async def end(self) -> None:
        """Sends the usage, where it is wanted, and the end."""
        if self._includes_usage:
            await self._exchange.event({**self._response.chunk(), "usage": self._response.usage()})
        await self._exchange.end(is_whole=True)
