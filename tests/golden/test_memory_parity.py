"""What the memory does must not show: hits, forks, eviction and both kinds of preemption leave tokens as they are.

Greedy tokens are compared with transformers (`parity.py`), seeded ones with the undisturbed run of each choice alone,
all in float32. The suite has a sample; the whole matrix runs with `make sweep`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.local import choice_name, generate
from engine.opening import open_core
from engine.scheduler import Schedule
from engine.sequence import Priority, Sequence
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import SamplingParams
from tests.golden.parity import Reference, check_parity, random_prompts
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, save_tiny_model
from tests.support.workers import assert_idle, core_of, make_spec, running_pair

NUM_TOKENS = 24
HIT_TOKENS = 8
"""Of the sample, in which every length of a hit is tried: what a hit has spoilt shows in the first ones."""
SAMPLE = ["llama", "gemma3", "mistral"]
"""Full attention, windows beside it, windows only (whose blocks are given back)."""
KINDS = ["recompute", "swap"]


def config_of(
    folder: Path, *, block_size: int = 8, num_blocks: int = 400, preemption: str = "recompute", max_running: int = 16
) -> Config:
    engine = EngineConfig.model_validate(
        {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_chunk_tokens": 16,
            "max_running": max_running,
            "preemption": preemption,
        }
    )
    return Config(model=ModelConfig(name="parity", path=str(folder), dtype="float32"), engine=engine)


class DisturbedDriver:
    """The engine without services; before one step in `every` a running unit drawn at random is preempted."""

    def __init__(self, core: EngineCore, *, at_once: int = 8, every: int = 0, seed: int = 0) -> None:
        self.core = core
        self._at_once = at_once
        self._every = every
        self._rng = random.Random(seed)
        self._num_made = 0

    def generate(self, prompts: SequenceOf[SequenceOf[int]], num_tokens: int) -> list[list[int]]:
        """A `GreedyGenerate`."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        made = [self.sequence(prompt, sampling) for prompt in prompts]
        return [tokens for (tokens,) in self.run(made)]

    def sequence(self, prompt: SequenceOf[int], sampling: SamplingParams, num_choices: int = 1) -> Sequence:
        self._num_made += 1
        return Sequence(
            f"s{self._num_made}",
            prompt,
            sampling,
            priority=Priority(arrival=self._num_made),
            hash_root=self.core.hash_root(),
            num_choices=num_choices,
        )

    def run(self, sequences: list[Sequence]) -> list[list[list[int]]]:
        """Output tokens of each choice of each sequence."""
        unborn, num_choices = list(sequences), [sequence.num_choices for sequence in sequences]

        def before_step(step: int) -> None:
            while unborn and len(self.core.sequences) < self._at_once:
                self.core.add(unborn.pop(0))
            if self._every and self.core.scheduler.running and self._rng.randrange(self._every) == 0:
                preempt_one(self.core, self._rng)

        results = generate(self.core, [], before_step=before_step)
        self.core.check_integrity()
        assert self.core.pool.counts.used == 0 and self.core.swap_space.num_used == 0
        names = [sequence.seq_id for sequence in sequences]
        return [
            [results[choice_name(name, choice)].token_ids for choice in range(count)]
            for name, count in zip(names, num_choices, strict=True)
        ]


def preempt_one(core: EngineCore, rng: random.Random) -> None:
    """What the scheduler does when blocks run out, without need."""
    if core.scheduler.running:
        core.scheduler.preempt(rng.choice(core.scheduler.running).unit, Schedule())


def judge(driver: DisturbedDriver, reference: Reference, prompts: list[list[int]], num_tokens: int) -> None:
    report = check_parity(driver.generate, reference, prompts, num_tokens)
    assert not report.mismatches, str(report)
    assert report.num_unjudged <= 0.05 * report.num_judged, str(report)


def check_hits_of_every_length(
    folder: Path, reference: Reference, block_size: int, num_tokens: int = NUM_TOKENS
) -> None:
    """Prompts that share every possible length with one that ran before; also that one again, whole."""
    driver = DisturbedDriver(open_core(config_of(folder, block_size=block_size)))
    (base,) = random_prompts([3 * block_size + 3], VOCAB_SIZE, seed=5)
    judge(driver, reference, [base], num_tokens)
    for num_shared in range(1, len(base) + 1):
        (tail,) = random_prompts([num_shared % 5], VOCAB_SIZE, seed=num_shared)
        prompt = [*base[:num_shared], *tail]
        hits_before = driver.core.stats().num_cached_tokens
        judge(driver, reference, [prompt], num_tokens)
        hits = driver.core.stats().num_cached_tokens - hits_before
        num_common = next((i for i, (a, b) in enumerate(zip(prompt, base, strict=False)) if a != b), len(prompt))
        assert hits >= min(num_common, len(prompt) - 1) // block_size * block_size  # the last token is always computed


def check_forced_preemption(folder: Path, reference: Reference, block_size: int, kind: str) -> None:
    driver = DisturbedDriver(open_core(config_of(folder, block_size=block_size, preemption=kind)), every=3)
    prompts = random_prompts([1, 5, block_size, 2 * block_size + 1, 40, 70, 111], VOCAB_SIZE, seed=6)
    judge(driver, reference, prompts, NUM_TOKENS)
    counters = driver.core.memory
    assert (counters.num_swap_preemptions > 5) == (kind == "swap")
    assert (counters.num_recompute_preemptions > 5) == (kind == "recompute")


def check_eviction(folder: Path, reference: Reference, block_size: int, kind: str) -> None:
    """Families of prompts in a pool that cannot keep them: hits, evictions and preemptions at once."""
    num_blocks = 420 // block_size
    core = open_core(config_of(folder, block_size=block_size, num_blocks=num_blocks, preemption=kind))
    driver = DisturbedDriver(core, at_once=12, every=10)
    families = random_prompts([90, 91, 92], VOCAB_SIZE, seed=7)
    rng = random.Random(8)
    prompts = [[*rng.choice(families)[: rng.randrange(20, 90)], rng.randrange(VOCAB_SIZE)] for _ in range(24)]
    judge(driver, reference, prompts, NUM_TOKENS)
    assert core.pool.num_evictions > 0 and core.stats().num_cached_tokens > 0


def check_choices(folder: Path, block_size: int) -> None:
    """n = 4 in company and preempted at random: every choice as if it had been sampled alone."""
    prompts = random_prompts([2, block_size, 2 * block_size + 3, 50], VOCAB_SIZE, seed=9)
    samplings = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=3 * number, top_p=0.95)
        for number in range(len(prompts))
    ]
    calm = DisturbedDriver(open_core(config_of(folder, block_size=block_size)), at_once=1)
    alone = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        choices = []
        for choice in range(4):
            single = calm.sequence(prompt, sampling)
            single.choice = choice
            name = single.seq_id
            choices.append(generate(calm.core, [single])[choice_name(name, choice)].token_ids)
        alone.append(choices)
    assert all(len({tuple(tokens) for tokens in choices}) > 1 for choices in alone)
    disturbances = [("recompute", 0, 400)]  # none
    disturbances += [(kind, *one) for kind in KINDS for one in ((3, 400), (10, 320 // block_size))]
    for kind, every, num_blocks in disturbances:
        core = open_core(config_of(folder, block_size=block_size, num_blocks=num_blocks, preemption=kind))
        driver = DisturbedDriver(core, every=every, at_once=40)
        made = [driver.sequence(prompt, sampling, 4) for prompt, sampling in zip(prompts, samplings, strict=True)]
        assert driver.run(made) == alone
        assert core.memory.num_blocks_copied > 0


async def check_split(folder: Path, reference: Reference, block_size: int, kind: str) -> None:
    """The same over two workers: hits, n = 4, and preemption at random moments on decode."""
    config = config_of(folder, block_size=block_size, preemption=kind)
    base, *others = random_prompts([70, 33, 9], VOCAB_SIZE, seed=10)
    prompts = [base, [*base[: 5 * block_size], 1, 2], base, *others]
    async with running_pair(config, timeout_s=120.0) as (prefill, decode, caller):
        stop, rng = asyncio.Event(), random.Random(11)

        async def disturb() -> None:
            while not stop.is_set():
                await decode.role.engine.run(lambda core: preempt_one(core, rng))  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)

        disturbing = asyncio.create_task(disturb())
        greedy = [await caller.generate(make_spec(f"g{i}", list(p), NUM_TOKENS)) for i, p in enumerate(prompts)]
        spec = make_spec("n", base, NUM_TOKENS, temperature=1.0, seed=77)
        group = await caller.generate(dataclasses.replace(spec, num_choices=4))
        stop.set()
        await disturbing
        assert core_of(decode).stats().num_preemptions > 0
        singles = []
        for choice in range(4):
            single = make_spec(f"single{choice}", base, NUM_TOKENS, temperature=1.0, seed=77)
            singles.append((await caller.generate(dataclasses.replace(single, choice=choice))).token_ids)
        assert [group.tokens[choice] for choice in range(4)] == singles
        again = greedy[2].done
        assert again is not None and again.num_blocks_shipped == (70 % block_size != 0)
        await assert_idle(prefill, decode)
    report = check_parity(lambda _prompts, _count: [one.token_ids for one in greedy], reference, prompts, NUM_TOKENS)
    assert not report.mismatches, str(report)


@pytest.fixture(scope="module", params=SAMPLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_hits_of_every_length(folder: Path, reference: Reference) -> None:
    check_hits_of_every_length(folder, reference, 8, HIT_TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_at_random_steps(folder: Path, reference: Reference, kind: str) -> None:
    check_forced_preemption(folder, reference, 8, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_eviction_under_pressure(folder: Path, reference: Reference, kind: str) -> None:
    check_eviction(folder, reference, 8, kind)


def test_four_choices(folder: Path) -> None:
    check_choices(folder, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers(folder: Path, reference: Reference, kind: str) -> None:
    asyncio.run(check_split(folder, reference, 8, kind))


@pytest.mark.sweep
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_everything(tmp_path: Path, architecture: str, block_size: int) -> None:
    folder = save_tiny_model(tmp_path / architecture, architecture)
    reference = Reference(folder)
    check_hits_of_every_length(folder, reference, block_size)
    check_choices(folder, block_size)
    for kind in KINDS:
        check_forced_preemption(folder, reference, block_size, kind)
        check_eviction(folder, reference, block_size, kind)
        asyncio.run(check_split(folder, reference, block_size, kind))
