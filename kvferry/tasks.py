"""Coroutines that stand or fall together, and changes that several of them wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvferry.errors import Unavailable

T = TypeVar("T")


class Changes:
    """Numbers the changes of something that many watch; whoever names the last one it has seen misses none."""

    def __init__(self) -> None:
        self.number = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self.number += 1
        event, self._next = self._next, asyncio.Event()
        event.set()

    async def wait_next(self) -> None:
        """Returns at the next change."""
        await self.wait_beyond(self.number)

    async def wait_beyond(self, number: int, timeout_s: float | None = None) -> None:
        """Returns when there is a later change than `number`, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.number <= number:
                    await self._next.wait()


async def run_until_first(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Runs them together until one returns or raises, ends the others, and passes its outcome on.

    Of several that end at once the first named decides. When this returns, raises or is cancelled, all have ended.
    Raises Unavailable when one was cancelled from within: grpc.aio does that to the reader of a call whose write broke.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done and not task.cancelled():
                return task.result()
        raise Unavailable("the stream was cancelled")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
