"""The source of a shipment's blocks: secured while the step loop is busy, or got back after they were given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.core import EngineCore, EngineLimits
from engine.loop import EngineLoop
from engine.mailboxes import Mailboxes
from engine.outputs import SequenceRestored
from engine.scripted import slots_of
from engine.sequence import Sequence, SequenceStatus
from kvferry.block_digest import block_digest
from kvferry.config import TelemetryConfig
from kvferry.telemetry import Telemetry, start_telemetry
from prefill_svc.service import PoolSource
from tests.support.engines import BLOCK_SIZE, make_core, make_sequence
from tests.support.workers import until

NUM_TOKENS = 4 * BLOCK_SIZE + 2


class Bench:
    """An engine in its own thread with room for one prompt and a half; `gate` stops its steps while it is clear."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.core: EngineCore = make_core(8, EngineLimits(max_batched_tokens=16, max_running=4, digests=True))
        self.mailboxes = Mailboxes()
        self.engine = EngineLoop(self.core, self.mailboxes.deliver)
        self.gate, self.is_in_step = threading.Event(), threading.Event()
        self.gate.set()
        self._telemetry = telemetry
        run = self.core.runner.run

        def gated(slices: Any, *rest: Any) -> Any:
            self.is_in_step.set()
            assert self.gate.wait(10)
            return run(slices, *rest)

        self.core.runner.run = gated  # type: ignore[assignment, method-assign]
        self.engine.start()

    async def held(self, name: str, first: int, num_tokens: int = NUM_TOKENS) -> Sequence:
        """A prompt that is computed and held."""
        prompt = list(range(first, first + num_tokens))
        sequence = make_sequence(self.core, name, prompt, 5, arrival=first, hold_after_prefill=True)
        await self.engine.run(lambda core: core.add(sequence))
        await until(lambda: sequence.status is SequenceStatus.HELD)
        return sequence

    def source(self, sequence: Sequence) -> tuple[PoolSource, asyncio.Event]:
        restored = asyncio.Event()
        return PoolSource(self.engine, sequence, restored, self._telemetry), restored


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    telemetry = start_telemetry(TelemetryConfig(), "prefill", "p")
    bench = Bench(telemetry)
    yield bench
    bench.gate.set()
    bench.engine.stop()
    await telemetry.shutdown()


def assert_right(source: PoolSource, sequence: Sequence) -> None:
    """What the source reads is what the prompt's tokens make, and full blocks have their digests."""
    contents, size = slots_of(sequence.token_ids), BLOCK_SIZE * 8
    for index in range(NUM_TOKENS // BLOCK_SIZE):
        block = bytes(source.read(index, BLOCK_SIZE))
        assert block == contents[index * size : (index + 1) * size]
        assert source.digest(index) == block_digest(block)
    last = NUM_TOKENS // BLOCK_SIZE
    assert bytes(source.read(last, NUM_TOKENS % BLOCK_SIZE)) == contents[last * size :].ljust(size, b"\0")


async def test_blocks_are_secured_without_waiting_for_the_step_that_runs(bench: Bench) -> None:
    sequence = await bench.held("a", 0)
    source, _ = bench.source(sequence)
    bench.gate.clear()
    bench.is_in_step.clear()
    other = make_sequence(bench.core, "b", list(range(500, 505)), 5, arrival=1, hold_after_prefill=True)
    adding = bench.engine.submit(lambda core: core.add(other))
    await until(bench.is_in_step.is_set)
    await asyncio.wait_for(source.secure(), 5)
    assert not bench.gate.is_set() and adding.done()
    bench.gate.set()
    more = make_sequence(bench.core, "c", list(range(600, 624)), 5, arrival=2, hold_after_prefill=True)
    await bench.engine.run(lambda core: core.add(more))
    await until(lambda: other.status is SequenceStatus.PARKED)
    assert_right(source, sequence)


async def test_blocks_that_were_given_up_are_computed_again_before_they_are_read(bench: Bench) -> None:
    sequence = await bench.held("a", 0)
    source, restored = bench.source(sequence)
    outputs = bench.mailboxes.open("a")
    before = list(sequence.block_table)
    await bench.held("b", 100, 8 * BLOCK_SIZE)
    assert sequence.block_table == []
    securing = asyncio.ensure_future(source.secure())
    while not isinstance(await outputs.get(), SequenceRestored):
        assert not securing.done()
    assert not securing.done(), "the shell has not been told yet"
    restored.set()
    await securing
    assert sequence.block_table != before
    assert_right(source, sequence)
    await source.secure()


async def test_an_end_while_they_are_computed_again_leaves_nothing(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        sequence = await bench.held(name, 1_000)
        source, _ = bench.source(sequence)
        await bench.held("other", 100, 8 * BLOCK_SIZE)
        bench.gate.clear()
        bench.is_in_step.clear()
        securing = asyncio.ensure_future(source.secure())
        await until(bench.is_in_step.is_set)
        securing.cancel()
        await asyncio.gather(securing, return_exceptions=True)
        bench.gate.set()
        await bench.engine.run(lambda core, name=name: [core.remove(name), core.remove("other")])  # type: ignore[misc]
        await bench.engine.run(lambda core: core.check_integrity())
        assert bench.core.pool.counts.used == 0 and not bench.core.sequences
