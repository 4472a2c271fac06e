"""Bounding a peer's silence, and running the halves of a stream so that none outlives the others.

gRPC's keepalive is answered by its C core while Python hangs, so both ends also send Alive messages (written by
`HeartbeatWriter` of `kvferry.rpc`) and bound the silence of the other by the shipment's progress timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvferry.errors import Unavailable

T = TypeVar("T")

HEARTBEATS_PER_TIMEOUT = 4
"""Three are promised; one more leaves room for a late timer."""


@asynccontextmanager
async def bounded_silence(timeout_s: float, peer: str) -> AsyncIterator[None]:
    """Raises Unavailable when its body, which waits for `peer`, takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(f"{peer} was silent for {timeout_s:g} s") from None


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
