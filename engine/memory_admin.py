"""What a router asks of a worker's KV memory, carried out between two steps: `kvferry.worker_cache.MemoryAdmin`."""

from __future__ import annotations

from engine.core import EngineCore
from engine.loop import EngineLoop
from engine.snapshot import memory_snapshot
from kvferry.block_hash import hash_blocks
from kvferry.spec import CachedPrefix
from kvferry.stats import MemorySnapshot


class EngineMemoryAdmin:
    """The memory of the engine that `loop` runs."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def snapshot(self) -> MemorySnapshot:
        return await self._loop.run(memory_snapshot)

    async def flush(self, tenant: str | None) -> int:
        return await self._loop.run(lambda core: core.pool.flush(tenant))

    async def pin(self, name: str, prefix: CachedPrefix) -> int:
        return await self._loop.run(lambda core: pin_prefix(core, name, prefix))

    async def unpin(self, name: str, tenant: str) -> int:
        return await self._loop.run(lambda core: core.pool.unpin(name, tenant=tenant))


def pin_prefix(core: EngineCore, name: str, prefix: CachedPrefix) -> int:
    """Pins the leading published blocks of `prefix` that are charged to its tenant; returns what the pin then holds.

    Raises:
        ResourceExhausted: pins or a quota would pass their bound; nothing changed.
    """
    block_ids = _published_blocks(core, prefix)
    return core.pool.pin(name, block_ids, tenant=prefix.tenant)


def _published_blocks(core: EngineCore, prefix: CachedPrefix) -> list[int]:
    block_size = core.layout.block_size
    root = core.hash_root(
        adapter=prefix.adapter, cache_salt=prefix.cache_salt, tenant=prefix.tenant, shared_salt=prefix.shared_salt
    )
    found: list[int] = []
    for index, block_hash in enumerate(hash_blocks(root, prefix.token_ids, block_size)):
        tokens = prefix.token_ids[index * block_size : (index + 1) * block_size]
        block_id = core.pool.lookup(block_hash, tokens)
        if block_id is None or core.pool.tenant(block_id) != prefix.tenant:
            break
        found.append(block_id)
    return found
