"""Beam search of the engine is transformers' beam search: alone and in company, split over two workers, under pressure.

Ending tokens are chosen so that hypotheses end early. A search whose closest decision is a near-tie may differ; it is
printed, not judged.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.core import EngineCore, EngineLimits
from engine.local import generate
from engine.preemption import RECOMPUTE, PreemptionPolicy
from engine.runner import RunnerConfig, open_runner
from engine.sequence import Priority
from engine.sequence import Sequence as EngineSequence
from kvferry.config import Config
from kvferry.sampling import BeamParams, SamplingParams
from tests.golden.drivers import parity_config
from tests.golden.parity import random_prompts
from tests.support.beam_reference import (
    NEAR_TIE,
    BeamCase,
    Scored,
    differences,
    plain_search,
    transformers_beams,
)
from tests.support.models import VOCAB_SIZE, save_tiny_model
from tests.support.workers import assert_idle, core_of, make_spec, running_pair

WIDTHS = (2, 4)
PENALTIES = (0.5, 1.0, 2.0)
BLOCK_SIZE = 8
SMALL_POOL = 20
"""Blocks: the widest search fits alone, two of them do not."""
Beams = list[list[Scored]]


@dataclass
class Reference:
    """Cases of one model and transformers' answers to them."""

    folder: Path
    model: PreTrainedModel
    cases: list[BeamCase] = field(default_factory=list)
    answers: Beams = field(default_factory=list)

    def add(self, cases: list[BeamCase]) -> None:
        self.cases += cases
        self.answers += [list(transformers_beams(self.model, case).hypotheses) for case in cases]

    def judge(self, found: Beams) -> list[str]:
        """Fails on a difference; returns those that are near-ties, for people."""
        near_ties = []
        for case, mine, theirs in zip(self.cases, found, self.answers, strict=True):
            differing = differences(mine, theirs)
            if differing:
                margin = plain_search(self.model, case).margin
                assert margin < NEAR_TIE, (case, margin, differing)
                near_ties.append(f"margin {margin:.1e}: {case}: {differing}")
        assert len(near_ties) <= 0.1 * len(found), near_ties
        return near_ties


def open_reference(folder: Path) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return Reference(folder, model)


def tiny_cases() -> list[BeamCase]:
    """Every width and penalty on prompts of several lengths, the stop rules and `early_stopping` taking turns."""
    some, more, many = (tuple(range(0, VOCAB_SIZE, step)) for step in (29, 17, 9))
    rules = itertools.cycle(
        [
            SamplingParams(max_tokens=20, eos_token_ids=some),
            SamplingParams(max_tokens=12),
            SamplingParams(max_tokens=20, eos_token_ids=(3,), stop_token_ids=more, min_tokens=3),
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=15, eos_token_ids=many),
        ]
    )
    prompts = random_prompts([1, 8, 19, 40], VOCAB_SIZE)
    shared = [
        (*prompts[3][:32], *prompt) for prompt in random_prompts([2], VOCAB_SIZE, seed=1)
    ]  # four blocks in common
    early = itertools.cycle([False, True, True, False, True, False, False])
    return [
        BeamCase(tuple(prompt), BeamParams(width, penalty, next(early), num_returned=width), next(rules))
        for prompt in [*prompts, *shared]
        for width, penalty in itertools.product(WIDTHS, PENALTIES)
    ]


def sample_of(cases: list[BeamCase]) -> list[BeamCase]:
    """Half of each prompt's, and of the next prompt the other half."""
    num_of_prompt = len(WIDTHS) * len(PENALTIES)
    return [case for number, case in enumerate(cases) if (number // num_of_prompt + number) % 2 == 0]


@pytest.fixture(scope="module", params=["sample", pytest.param("whole", marks=pytest.mark.sweep)])
def cases(request: pytest.FixtureRequest) -> list[BeamCase]:
    whole = tiny_cases()
    return whole if request.param == "whole" else sample_of(whole)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cases: list[BeamCase]) -> Reference:
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    reference = open_reference(folder)
    reference.add(cases)
    return reference


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[[list[str]], None]:
    """Prints near-ties past pytest's capture."""

    def show(lines: list[str]) -> None:
        with capsys.disabled():
            for line in lines:
                print(f"\n{request.node.name}: near-tie, {line}", flush=True)  # noqa: T201 - for people

    return show


def open_engine(
    folder: Path, num_blocks: int, *, preemption: PreemptionPolicy = RECOMPUTE, num_swap_blocks: int = 0
) -> EngineCore:
    runner = open_runner(folder, RunnerConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))
    limits = EngineLimits(
        max_batched_tokens=128,
        max_chunk_tokens=16,
        max_running=48,
        preemption=preemption,
        num_swap_blocks=num_swap_blocks,
    )
    return EngineCore(runner, limits)


def search(core: EngineCore, cases: Sequence[BeamCase], *, num_others: int = 0, steps_apart: int = 2) -> Beams:
    """All cases in one engine, among `num_others` sampled sequences; a new one every `steps_apart` steps."""
    unborn = [
        EngineSequence(
            f"case{number}",
            case.prompt,
            case.sampling,
            beam=case.beam,
            priority=Priority(arrival=number),
            hash_root=core.hash_root(),
        )
        for number, case in enumerate(cases)
    ]
    names = [sequence.seq_id for sequence in unborn]
    others = random_prompts(range(5, 5 + num_others), VOCAB_SIZE, seed=2)
    unborn += [
        EngineSequence(f"other{number}", prompt, SamplingParams(max_tokens=30), priority=Priority(arrival=number))
        for number, prompt in enumerate(others)
    ]
    random.Random(4).shuffle(unborn)

    def arrive(step: int) -> None:
        core.check_integrity()
        while unborn and (steps_apart == 0 or step % steps_apart == 0 or not core.has_work):
            core.add(unborn.pop())
            if steps_apart:
                break

    results = generate(core, [], before_step=arrive)
    assert core.pool.counts.used == 0 and not core.sequences
    assert [results[name].error for name in names] == [None] * len(names)
    return [[Scored(beam.token_ids, beam.score) for beam in results[name].beams] for name in names]


def test_equal_to_transformers(tiny: Reference, tell: Callable[[list[str]], None]) -> None:
    core = open_engine(tiny.folder, 512)
    tell(tiny.judge(search(core, tiny.cases, num_others=6)))
    assert core.stats().num_preemptions == 0
    num_cached = core.stats().num_cached_tokens
    tell(tiny.judge(search(core, tiny.cases)))  # again, with every block of the prompts in the cache
    assert core.stats().num_cached_tokens > num_cached


@pytest.mark.parametrize(
    ("policy", "num_swap_blocks"), [(RECOMPUTE, 0), (PreemptionPolicy("swap"), 400), (PreemptionPolicy("swap"), 10)]
)
def test_preempted_gangs_go_on_as_if_nothing_had_been(
    tiny: Reference, policy: PreemptionPolicy, num_swap_blocks: int, tell: Callable[[list[str]], None]
) -> None:
    """With the small host pool some are swapped and others recomputed."""
    core = open_engine(tiny.folder, SMALL_POOL, preemption=policy, num_swap_blocks=num_swap_blocks)
    tell(tiny.judge(search(core, tiny.cases, num_others=6, steps_apart=0)))
    memory = core.stats().memory
    assert (memory.num_recompute_preemptions > 0) == (num_swap_blocks < 400)
    assert (memory.num_swap_preemptions > 0) == (num_swap_blocks > 0)
    assert core.stats().num_evictions > 0


def test_split_over_two_workers(tiny: Reference, tell: Callable[[list[str]], None]) -> None:
    config = parity_config(tiny.folder, block_size=BLOCK_SIZE, chunk_tokens=16)
    tell(tiny.judge(asyncio.run(search_split(config, tiny.cases))))


def test_split_with_a_small_pool_at_the_end(tiny: Reference, tell: Callable[[list[str]], None]) -> None:
    config = parity_config(tiny.folder, block_size=BLOCK_SIZE, chunk_tokens=16)
    small = config.model_copy(update={"engine": config.engine.model_copy(update={"num_blocks": SMALL_POOL})})
    tell(tiny.judge(asyncio.run(search_split(config, tiny.cases, small))))


async def search_split(config: Config, cases: Sequence[BeamCase], decode_config: Config | None = None) -> Beams:
    """All cases at once through a pair of workers over gRPC."""
    async with running_pair(config, decode_config, timeout_s=60.0) as (prefill, decode, caller):
        specs = [
            replace(
                make_spec(f"beam{number}", list(case.prompt), case.sampling.max_tokens),
                sampling=case.sampling,
                beam=case.beam,
            )
            for number, case in enumerate(cases)
        ]
        results = await asyncio.gather(*(caller.generate(spec) for spec in specs))
        await assert_idle(prefill, decode)
        assert (core_of(decode).stats().num_preemptions > 0) == (decode_config is not None)
    return [[Scored(tuple(beam.token_ids), beam.score) for beam in result.beams] for result in results]


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Reference:
    """Prompts of words and of random tokens; a full stop, a line end and the model's own ids end a hypothesis."""
    reference = open_reference(smollm2_folder)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    texts = ["The capital of France is", "Once upon a time there was a ferry that", "def fibonacci(n):\n    "]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    prompts += random_prompts([70], reference.model.config.vocab_size)
    ending = tuple(tokenizer(text)["input_ids"][0] for text in (".", "\n", "<|im_end|>"))
    ended = SamplingParams(max_tokens=40, eos_token_ids=ending[2:], stop_token_ids=ending[:2])
    whole = SamplingParams(max_tokens=24)
    rules = itertools.cycle([ended, whole, ended, ended, whole])
    early = itertools.cycle([False, True, True, False, True, False, False])
    reference.add(
        [
            BeamCase(tuple(prompt), BeamParams(width, penalty, next(early), num_returned=width), next(rules))
            for prompt, (width, penalty) in itertools.product(prompts, itertools.product(WIDTHS, PENALTIES))
        ]
    )
    return reference


@pytest.mark.sweep
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_blocks", "policy"), [(1024, RECOMPUTE), (64, RECOMPUTE), (64, PreemptionPolicy("swap"))])
def test_smollm2(
    smollm2: Reference, num_blocks: int, policy: PreemptionPolicy, tell: Callable[[list[str]], None]
) -> None:
    core = open_engine(smollm2.folder, num_blocks, preemption=policy, num_swap_blocks=512)
    tell(smollm2.judge(search(core, smollm2.cases)))
    assert (core.stats().num_preemptions > 0) == (num_blocks == 64)


@pytest.mark.sweep
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_smollm2_split(smollm2: Reference, tell: Callable[[list[str]], None]) -> None:
    config = parity_config(smollm2.folder, block_size=BLOCK_SIZE, chunk_tokens=16)
    tell(smollm2.judge(asyncio.run(search_split(config, smollm2.cases))))
