"""Blocks that may have been given up while the shipment waited for its grant: secured first, then read."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import Unavailable
from kvtransfer.messages import Offer
from kvtransfer.transport import Grant
from tests.unit.kvtransfer.pairs import EVERY_KIND, KINDS, SHORT_S, computed, joined
from tests.unit.kvtransfer.support import MemoryHost, MemorySource, make_offer


class GatedSource(MemorySource):
    """Its blocks are there once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.securing, self.gate = asyncio.Event(), asyncio.Event()
        self.is_cancelled = False

    async def secure(self) -> None:
        self.securing.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise

    def read(self, block_index: int, num_tokens: int) -> memoryview:
        assert self.gate.is_set(), "read before it was secured"
        return super().read(block_index, num_tokens)


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_nothing_is_read_or_asked_for_before_the_grant(kind: str) -> None:
    host, source = MemoryHost(grant_gate=asyncio.Event()), GatedSource()
    source.gate.set()
    async with joined(kind, lambda offer: host) as pair:
        shipping = asyncio.ensure_future(pair.ship(source=source))
        await asyncio.wait_for(host.granting.wait(), 5)
        assert not source.securing.is_set() and not source.reads
        assert host.grant_gate is not None
        host.grant_gate.set()
        await asyncio.wait_for(shipping, 5)
    assert host.is_complete and source.securing.is_set()


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_both_sides_bear_that_it_takes_longer_than_the_progress_timeout(kind: str) -> None:
    """Everything is computed and the first token known; what was not secured is not read all the same."""
    host, source = MemoryHost(), GatedSource()
    async with joined(kind, lambda offer: host) as pair:
        asyncio.get_running_loop().call_later(4 * SHORT_S, source.gate.set)
        await asyncio.wait_for(pair.ship(make_offer(progress_timeout_s=SHORT_S), source=source), 10)
    assert host.is_complete


@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_that_goes_away_meanwhile_ends_it(kind: str) -> None:
    host, source = MemoryHost(), GatedSource()
    async with joined(kind, lambda offer: host) as pair:
        shipping = asyncio.ensure_future(pair.ship(source=source))
        await asyncio.wait_for(source.securing.wait(), 5)
        assert pair.receiver is not None
        await pair.receiver.server.grpc.stop(None)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(shipping, 10)
    assert source.is_cancelled and not source.reads


class FullHost(MemoryHost):
    """Holds every block already."""

    async def grant(self, offer: Offer) -> Grant:
        self.held = frozenset(range(offer.num_blocks))
        return await super().grant(offer)


@pytest.mark.parametrize("kind", EVERY_KIND)
async def test_a_receiver_that_lacks_nothing_needs_nothing_secured(kind: str) -> None:
    host, source = FullHost(), GatedSource()
    async with joined(kind, lambda offer: host) as pair:
        summary = await asyncio.wait_for(pair.ship(make_offer(8), computed(8), source=source), 5)
    assert summary.num_blocks_reused == 2 and host.is_complete
    assert not source.securing.is_set() and not source.reads
