"""Running several coroutines that stand or fall together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry.errors import Unavailable

T = TypeVar("T")


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
