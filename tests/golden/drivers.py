"""Ways to turn prompts into greedy tokens, for the parity sweep: the engine alone, and a pair of workers over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from engine.local import generate
from engine.opening import open_core
from engine.sequence import Priority, Sequence
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import SamplingParams
from tests.support.workers import assert_idle, make_spec, running_pair

LONGEST_CALL_S = 3_600.0
"""The caller that plays the router sends no heartbeats, and a call takes long where 32 share a slow machine."""
AT_ONCE = 32
"""Sequences in flight."""


def parity_config(folder: Path, *, block_size: int, chunk_tokens: int, num_threads: int = 1) -> Config:
    """A worker's configuration in float32; the pool holds `AT_ONCE` of the longest sequences of the sweep."""
    num_blocks = AT_ONCE * 1600 // block_size
    return Config(
        model=ModelConfig(name="parity", path=str(folder), dtype="float32"),
        engine=EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_chunk_tokens=chunk_tokens,
            max_running=AT_ONCE,
            num_threads=num_threads,
        ),
    )


class EngineDriver:
    """The engine without services. At most `at_once` sequences are in flight, a new one joining every other step."""

    def __init__(self, config: Config, *, at_once: int = AT_ONCE) -> None:
        self._core = open_core(config)
        self._at_once = at_once
        self._num_made = 0

    def generate(self, prompts: SequenceOf[SequenceOf[int]], num_tokens: int) -> list[list[int]]:
        """A `GreedyGenerate`."""
        core = self._core
        unborn = [self._sequence(prompt, num_tokens) for prompt in prompts]
        names = [sequence.seq_id for sequence in unborn]

        def arrive(step: int) -> None:
            while unborn and (not core.has_work or (step % 2 == 0 and len(core.sequences) < self._at_once)):
                core.add(unborn.pop(0))
                if core.has_work and self._at_once > 1:
                    break

        results = generate(core, [], before_step=arrive)
        core.check_integrity()
        return [results[name].token_ids for name in names]

    def _sequence(self, prompt: SequenceOf[int], num_tokens: int) -> Sequence:
        self._num_made += 1
        return Sequence(
            str(self._num_made),
            prompt,
            SamplingParams(max_tokens=num_tokens, temperature=0.0),
            priority=Priority(arrival=self._num_made),
            hash_root=self._core.hash_root(),
        )


class PairDriver:
    """A prefill and a decode worker, each with its engine thread, over gRPC; `at_once` requests in flight."""

    def __init__(self, config: Config, *, at_once: int = AT_ONCE) -> None:
        self._config = config
        self._at_once = at_once
        self.num_blocks_shipped = 0

    def generate(self, prompts: SequenceOf[SequenceOf[int]], num_tokens: int) -> list[list[int]]:
        """A `GreedyGenerate`."""
        return asyncio.run(self._generate(prompts, num_tokens))

    async def _generate(self, prompts: SequenceOf[SequenceOf[int]], num_tokens: int) -> list[list[int]]:
        places = asyncio.Semaphore(self._at_once)
        async with running_pair(self._config, timeout_s=LONGEST_CALL_S) as (prefill, decode, caller):

            async def one(number: int, prompt: SequenceOf[int]) -> list[int]:
                async with places:
                    result = await caller.generate(make_spec(f"parity{number}", list(prompt), num_tokens))
                assert result.done is not None
                self.num_blocks_shipped += result.done.num_blocks_shipped
                return result.token_ids

            outputs = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
            await assert_idle(prefill, decode)
            return list(outputs)
