"""Bounding a peer's silence.

gRPC's keepalive is answered by its C core while Python hangs, so both ends also send Alive messages (written by
`HeartbeatWriter` of `kvferry.rpc`) and bound the silence of the other by the shipment's progress timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.errors import Unavailable

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
