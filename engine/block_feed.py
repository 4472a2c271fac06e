"""Changes of the published blocks on an event loop, taken between two steps: `kvferry.block_changes.BlockFeed`.

    engine's thread:  change ─► first since the last take: wake            take ─► changes, or a snapshot
    event loop:                          └──────────► submit `take` ───────┘            └──────► yield ─► await the next

Changes are taken by a command, as all else that an event loop wants of the engine, so a snapshot is of one moment and
the changes that follow it miss nothing. What happens while a step runs is told together, after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from engine.block_events import BlockEvents, PendingChanges
from engine.loop import EngineLoop
from kvferry.block_changes import BlockChanges


class EngineBlockFeed:
    """The published blocks of the engine that `engine` runs."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._events = BlockEvents(engine.core.pool)

    async def watch(self) -> AsyncGenerator[BlockChanges, None]:
        """See `BlockFeed.watch`; empty changes are not told."""
        changed, loop, events = asyncio.Event(), asyncio.get_running_loop(), self._events
        watcher = PendingChanges(events.max_changes, lambda: loop.call_soon_threadsafe(changed.set))
        try:
            await self._engine.run(lambda core: events.open(watcher))
            while True:
                changed.clear()
                changes = await self._engine.run(lambda core: events.take(watcher))
                if not changes.is_empty:
                    yield changes
                await changed.wait()
        finally:  # not awaited: it must come to pass also where this task is being cancelled
            self._engine.submit(lambda core: events.close(watcher))
