"""The feed over a running step loop: woken, together, and rid of watchers that left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from unittest.mock import patch

from engine.block_feed import EngineBlockFeed
from engine.core import EngineCore, EngineLimits
from engine.loop import EngineLoop
from engine.scripted import ScriptedRunner

NUM_BLOCKS = 16


@asynccontextmanager
async def running_engine() -> AsyncIterator[EngineLoop]:
    engine = EngineLoop(EngineCore(ScriptedRunner(num_blocks=NUM_BLOCKS, block_size=4), EngineLimits()), print)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def publishing(*names: bytes) -> Callable[[EngineCore], None]:
    def publish(core: EngineCore) -> None:
        blocks = core.pool.allocate(len(names)) or []
        for block_id, name in zip(blocks, names, strict=True):
            core.pool.publish(block_id, name, [1])
        core.pool.free(reversed(blocks))

    return publish


async def test_a_watcher_is_woken_by_changes_and_gets_them_together() -> None:
    async with running_engine() as engine, asyncio.timeout(10):
        await engine.run(publishing(b"a"))
        async with aclosing(EngineBlockFeed(engine).watch()) as feed:
            first = await anext(feed)
            assert first.is_reset and list(first.stored) == [b"a"]
            waiting = asyncio.ensure_future(anext(feed))
            await engine.run(publishing(b"b", b"c"))
            changes = await waiting
            assert (changes.is_reset, list(changes.removed), list(changes.stored)) == (False, [], [b"b", b"c"])


async def test_changes_that_come_to_nothing_are_not_told() -> None:
    async with running_engine() as engine, asyncio.timeout(10), aclosing(EngineBlockFeed(engine).watch()) as feed:
        await anext(feed)
        waiting = asyncio.ensure_future(anext(feed))

        def publish_and_drop(core: EngineCore) -> None:
            publishing(b"a")(core)
            core.pool.unpublish(core.pool.published_blocks()[0])

        await engine.run(publish_and_drop)
        await engine.run(publishing(b"b"))
        assert list((await waiting).stored) == [b"b"]


async def test_a_quiet_pool_is_not_asked() -> None:
    async with running_engine() as engine, asyncio.timeout(10), aclosing(EngineBlockFeed(engine).watch()) as feed:
        await anext(feed)
        await engine.run(publishing(b"a"))
        await anext(feed)
        waiting = asyncio.ensure_future(anext(feed))
        await engine.run(lambda core: None)
        with patch.object(engine, "submit", wraps=engine.submit) as submit:
            for _ in range(10):
                await asyncio.sleep(0)
            assert submit.call_count == 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_reader_that_is_too_slow_gets_a_snapshot() -> None:
    async with running_engine() as engine, asyncio.timeout(10):
        await engine.run(publishing(*(bytes([number]) for number in range(NUM_BLOCKS))))
        async with aclosing(EngineBlockFeed(engine).watch()) as feed:
            await anext(feed)
            for number in range(NUM_BLOCKS):  # each evicts an old one
                await engine.run(publishing(bytes([100 + number])))
            changes = await anext(feed)
            assert changes.is_reset and not changes.removed
            assert list(changes.stored) == await engine.run(lambda core: core.pool.published_hashes())


async def test_a_watcher_that_leaves_or_is_cancelled_costs_the_pool_nothing() -> None:
    async with running_engine() as engine, asyncio.timeout(10):
        feed = EngineBlockFeed(engine)

        async def watch() -> None:
            async with aclosing(feed.watch()) as changes:
                async for _ in changes:
                    pass

        tasks = [asyncio.create_task(watch()) for _ in range(3)]
        async with aclosing(feed.watch()) as changes:
            await anext(changes)
            assert await engine.run(lambda core: core.pool.listener) is not None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await engine.run(lambda core: core.pool.listener) is None
        early = asyncio.create_task(watch())
        await asyncio.sleep(0)  # its first command is on the way
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        assert await engine.run(lambda core: core.pool.listener) is None
