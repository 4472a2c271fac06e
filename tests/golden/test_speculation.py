"""Drafts change no token of real models: beside every option, in every company, in float32, bfloat16 and int8.

What is looked up in the text is rarely wrong at every place, so most engines here get drawn drafts as well: of what
the engine without drafts said, right for a while and then anything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore
from engine.local import LocalResult, choice_name, generate
from engine.opening import open_constraints, open_core
from engine.outputs import TokenSampled
from engine.sequence import Priority, Sequence
from engine.speculation import SpeculationPolicy, Speculator
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import LogitRules, SamplingParams
from tests.golden.parity import Reference, check_parity, random_prompts
from tests.support.drafts import DrawnDrafts, speculate
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE, save_tiny_model
from tests.support.workers import assert_idle, core_of, make_spec, running_pair

NUM_TOKENS = 32
LENGTHS = (3, 5, 8, 12, 20, 30)
RULES = LogitRules(
    presence_penalty=1.5,
    frequency_penalty=1.2,
    repetition_penalty=1.5,
    bias=((7, 2.0), (9, -3.0)),
    bad_words=((11, 12), (13,)),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "rules": LogitRules(allowed_token_ids=(5, 6, 7))},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": True, "num_top_logprobs": 3},
    {"temperature": 0.8, "top_k": 40, "min_p": 0.01, "rules": RULES},
    {"temperature": 0.0, "rules": RULES, "min_tokens": 9, "logprobs": True},
)
"""Of the sequences of a batch, in turn; the first says again what it has said, as it may say little."""


def config_of(folder: Path, dtype: Any, quantization: Any = "none", **engine: Any) -> Config:
    defaults: dict[str, Any] = {"block_size": 8, "num_blocks": 400, "kernels": "native", "speculation": "prompt_lookup"}
    return Config(
        model=ModelConfig(name="speculation", path=str(folder), dtype=dtype, quantization=quantization),
        engine=EngineConfig(**{**defaults, **engine}),
    )


def looked_up() -> Speculator:
    """As the engine's own; a tiny model's rows cost most of a step, which leaves that one little to do."""
    return Speculator(SpeculationPolicy("prompt_lookup", row_cost=0.01))


def looping_prompts() -> list[list[int]]:
    """Each says its beginning several times, so that there is something to look up."""
    return [(prompt * 4)[: 3 * len(prompt) + 2] for prompt in random_prompts(LENGTHS, VOCAB_SIZE)]


def sampling_of(number: int, ends: Mapping[int, int]) -> SamplingParams:
    """`ends`: by number a token that ends the sequence."""
    stop = {"stop_token_ids": (ends[number],)} if number in ends else {}
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": number, **OPTIONS[number % len(OPTIONS)], **stop})


@dataclass(frozen=True, slots=True)
class Expected:
    """What an engine without drafts says, one result a choice."""

    results: dict[str, LocalResult]

    def tokens(self, number: int, choice: int = 0) -> list[int]:
        return self.results[choice_name(str(number), choice)].token_ids

    def drafts(self, seed: int) -> DrawnDrafts:
        """For an engine with the same sequences."""

        def oracle(sequence: Sequence, number: int) -> SequenceOf[int]:
            whole = self.results[choice_name(sequence.owner_id, sequence.choice)].token_ids
            return whole[sequence.num_output_tokens : sequence.num_output_tokens + number]

        return DrawnDrafts(random.Random(seed), oracle, VOCAB_SIZE)


def run(core: EngineCore, ends: Mapping[int, int], **options: Any) -> dict[str, LocalResult]:
    """The prompts; preemptions are the engine's own, and no part of what is compared."""
    sequences = [
        Sequence(
            str(number),
            prompt,
            sampling_of(number, ends),
            priority=Priority(arrival=number),
            hash_root=core.hash_root(),
            num_choices=3 if number == 1 else 1,
            **options,
        )
        for number, prompt in enumerate(looping_prompts())
    ]
    results = generate(core, sequences)
    core.check_integrity()
    for result in results.values():
        result.num_preemptions = 0
    return results


COMPANIES: tuple[dict[str, Any], ...] = (
    {"num_blocks": 22, "preemption": "recompute"},
    {"block_size": 16, "max_batched_tokens": 20, "max_running": 8},
    {"num_blocks": 22, "preemption": "swap"},
    {"max_running": 8, "max_chunk_tokens": 5, "num_threads": 2},
    {"max_running": 1, "prefix_caching": False},
)


def check(
    folder: Path, dtype: str, quantization: str = "none", companies: SequenceOf[dict[str, Any]] = COMPANIES
) -> None:
    plain = open_core(config_of(folder, dtype, quantization, speculation="none"))
    free = run(plain, {})
    ends = {number: free[str(number)].token_ids[number * 5 % NUM_TOKENS] for number in (1, 2, 4)}
    expected = Expected(run(plain, ends))
    assert plain.stats().num_drafts == 0
    for number, engine in enumerate(companies):
        core = open_core(config_of(folder, dtype, quantization, **engine))
        for speculator in (looked_up(), expected.drafts(number)):
            speculate(core, speculator)
            assert run(core, ends) == expected.results, engine
            assert speculator.num_accepted_tokens > 0, engine
            assert speculator.num_accepted_tokens < speculator.num_draft_tokens, engine
        assert core.stats().num_preemptions > 0 or "num_blocks" not in engine
    check_resumed(open_core(config_of(folder, dtype, quantization)), ends, expected)


def check_resumed(core: EngineCore, ends: Mapping[int, int], expected: Expected) -> None:
    """As after a killed worker: prompt and output so far are the prompt of another one."""
    speculate(core, expected.drafts(9))
    for number, prompt in enumerate(looping_prompts()):
        whole = expected.tokens(number)
        given = number * 7 % len(whole)
        core.add(
            Sequence(str(number), prompt + whole[:given], sampling_of(number, ends), num_prompt_tokens=len(prompt))
        )
        tokens: list[int] = []
        while core.has_work:
            told = [output for output in core.step() if isinstance(output, TokenSampled)]
            assert [one.token_index for one in told] == list(
                range(given + len(tokens), given + len(tokens) + len(told))
            )
            tokens += [output.token_id for output in told]
        assert tokens == whole[given:]


@pytest.mark.parametrize(
    ("architecture", "dtype", "quantization", "num_companies"),
    [
        ("llama", "bfloat16", "none", 3),
        ("qwen3", "float32", "none", 1),
        ("llama", "bfloat16", "int8", 1),
        pytest.param("qwen3", "bfloat16", "none", 5, marks=pytest.mark.sweep),
        pytest.param("mistral", "float32", "int8", 5, marks=pytest.mark.sweep),
        pytest.param("llama", "float32", "none", 5, marks=pytest.mark.sweep),
    ],
)
def test_tokens_are_those_without_drafts(
    tmp_path: Path, architecture: str, dtype: str, quantization: str, num_companies: int
) -> None:
    check(save_tiny_model(tmp_path / "model", architecture), dtype, quantization, COMPANIES[:num_companies])


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3"])
def test_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """In float32, on transformers' layers; of the latter some have windows."""
    folder = save_tiny_model(tmp_path / "model", architecture)
    core = open_core(config_of(folder, "float32"))
    speculate(core, looked_up())
    prompts = looping_prompts()

    def greedy(prompts: SequenceOf[SequenceOf[int]], num_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        results = generate(core, [Sequence(str(number), prompt, sampling) for number, prompt in enumerate(prompts)])
        return [results[str(number)].token_ids for number in range(len(prompts))]

    report = check_parity(greedy, Reference(folder), prompts, 60)
    assert not report.mismatches, str(report)
    assert core.stats().num_accepted_tokens > 20


def test_what_is_split_among_workers_is_the_same(tmp_path: Path) -> None:
    """Several tokens a message; blocks that are shipped and published hold none that was only drafted."""
    folder = save_tiny_model(tmp_path / "model", "llama")
    expected = Expected(run(open_core(config_of(folder, "bfloat16", speculation="none")), {}))

    async def split() -> None:
        async with running_pair(config_of(folder, "bfloat16"), timeout_s=600.0) as (prefill, decode, caller):
            speculate(core_of(decode), looked_up())
            for _ in range(2):  # the second time from blocks that the first one left
                specs = [
                    make_spec(f"split{number}", prompt, **_fields(sampling_of(number, {})))
                    for number, prompt in enumerate(looping_prompts())
                ]
                results = await asyncio.gather(*(caller.generate(spec) for spec in specs))
                assert [one.token_ids for one in results] == [expected.tokens(number) for number in range(len(specs))]
                await assert_idle(prefill, decode)
            stats = core_of(decode).stats()
            assert stats.num_accepted_tokens > 20
            load = decode.role.load()
            assert (load.num_drafts, load.num_draft_tokens, load.num_accepted_tokens) == (
                stats.num_drafts,
                stats.num_draft_tokens,
                stats.num_accepted_tokens,
            )
            assert core_of(prefill).stats().num_drafts == 0

    asyncio.run(split())


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "seed", "top_p", "top_k", "min_p", "min_tokens", "rules", "logprobs")
    return {name: getattr(sampling, name) for name in names}


def test_a_grammar_sees_no_token_that_was_only_drafted(tmp_path: Path) -> None:
    """Its state follows the run of right tokens; a step that fails midway is run again with the same end."""
    folder = save_tiny_model(tmp_path / "model", "llama")
    config = config_of(folder, "bfloat16")
    core = open_core(config)
    constraints = open_constraints(config, core)
    grammar = "start: TEXT\nTEXT: /([a-c]{3} ){4,12}/"
    sampling = SamplingParams(max_tokens=60, temperature=0.9, seed=4, eos_token_ids=(EOS_TOKEN_ID,), grammar=grammar)

    def result(speculator: Speculator | None) -> LocalResult:
        speculate(core, speculator)
        constraint = asyncio.run(constraints.open(sampling))
        return generate(core, [Sequence("0", [1, 2, 3], sampling, constraint=constraint)])["0"]

    try:
        expected = Expected({"0": result(None)})
        assert len(expected.tokens(0)) > 12
        for seed in range(6):
            drafts = expected.drafts(seed)
            assert result(drafts) == expected.results["0"]
            assert any(num_right < length for length, num_right in drafts.met) and drafts.num_accepted_tokens > 0
        failing = _FailsOnce(core.runner.run)
        core.runner.run = failing  # type: ignore[method-assign, assignment]
        drafts = expected.drafts(1)
        assert result(drafts) == expected.results["0"]
        assert failing.num_failed > 0
    finally:
        constraints.close()


class _FailsOnce:
    """Steps that several tokens came of fail after they were sampled, as if another sequence's had failed then."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._may_fail = True
        self.num_failed = 0

    def __call__(self, *arguments: Any) -> Any:
        sampled = self._run(*arguments)
        if self._may_fail and any(one is not None and one.further for one in sampled):
            self._may_fail = False
            self.num_failed += 1
            raise RuntimeError("a step that fails")
        self._may_fail = True
        return sampled
