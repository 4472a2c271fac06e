"""Real (tiny) models: seeded sampling in every company and mode, and a pool far too small for its sequences."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.core import EngineCore
from engine.local import generate
from engine.opening import open_core
from engine.outputs import TokenSampled
from engine.sequence import Priority, Sequence
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import LogitRules, SamplingParams
from tests.golden.drivers import parity_config
from tests.golden.parity import Reference, check_parity, random_prompts
from tests.support.models import VOCAB_SIZE, save_tiny_model
from tests.support.workers import assert_idle, make_spec, running_pair

NUM_TOKENS = 24
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2**63 + 5},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 0},
    {"temperature": 0.9, "seed": 3, "rules": LogitRules(presence_penalty=1.5, frequency_penalty=0.5)},
    {"temperature": 0.0, "rules": LogitRules(repetition_penalty=1.3, bias=((5, 2.0), (9, -3.0)))},
    {"temperature": 0.7, "seed": 4, "rules": LogitRules(allowed_token_ids=tuple(range(3, 90)), bad_words=((17,),))},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def sampled(core: EngineCore, cases: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    sequences = [
        Sequence(str(number), prompt, sampling, priority=Priority(arrival=number), hash_root=core.hash_root())
        for number, (prompt, sampling) in enumerate(cases)
    ]
    results = generate(core, sequences)
    return [results[sequence.seq_id].token_ids for sequence in sequences]


def test_seeded_tokens_are_the_same_alone_in_a_batch_and_split(folder: Path) -> None:
    config = parity_config(folder, block_size=8, chunk_tokens=16)
    prompts = random_prompts([3, 17, 40, 12, 25, 33], VOCAB_SIZE)
    cases = [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, **sampling))
        for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    alone = [sampled(open_core(config), [case])[0] for case in cases]
    rng = random.Random(1)
    others = [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=rng.getrandbits(64)))
        for prompt in random_prompts([1 + number for number in range(29)], VOCAB_SIZE, seed=1)
    ]
    assert sampled(open_core(config), [*others, *cases])[-len(cases) :] == alone
    assert asyncio.run(_split(config, cases, others)) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(cases)


async def _split(
    config: Config, cases: list[tuple[list[int], SamplingParams]], others: list[tuple[list[int], SamplingParams]]
) -> list[list[int]]:
    """The cases among the others, through a pair of workers."""
    async with running_pair(config, timeout_s=60.0) as (prefill, decode, caller):
        specs = [
            make_spec(f"seeded{number}", prompt, NUM_TOKENS, **_changed(sampling))
            for number, (prompt, sampling) in enumerate([*cases, *others])
        ]
        results = await asyncio.gather(*(caller.generate(spec) for spec in specs))
        await assert_idle(prefill, decode)
        return [result.token_ids for result in results[: len(cases)]]


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "rules")
    return {name: getattr(sampling, name) for name in names}


@pytest.mark.parametrize("fields", SAMPLINGS)
def test_a_resumed_sequence_goes_on_as_it_would_have(folder: Path, fields: dict[str, Any]) -> None:
    """The same noise, and penalties that count the same tokens as prompt and as output."""
    config = parity_config(folder, block_size=8, chunk_tokens=16)
    (prompt,) = random_prompts([21], VOCAB_SIZE)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, **fields)
    (whole,) = sampled(open_core(config), [(prompt, sampling)])
    for given in (1, 7, 23):
        tokens: list[int] = []
        core = open_core(config)
        core.add(Sequence("resumed", prompt + whole[:given], sampling, num_prompt_tokens=len(prompt)))
        while core.has_work:
            tokens += [output.token_id for output in core.step() if isinstance(output, TokenSampled)]
        assert tokens == whole[given:]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_repetition_penalty_and_log_probabilities_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny_model(tmp_path / architecture, architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    core = open_core(parity_config(folder, block_size=8, chunk_tokens=16))
    sampling = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        logprobs=True,
        num_top_logprobs=3,
        rules=LogitRules(repetition_penalty=1.4),
    )
    for prompt in random_prompts([5, 30], VOCAB_SIZE):
        sequence = Sequence("one", prompt, sampling, hash_root=core.hash_root())
        result = generate(core, [sequence])["one"]
        wanted = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            repetition_penalty=1.4,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert result.token_ids == wanted.sequences[0, len(prompt) :].tolist()
        for logits, token_id, told in zip(wanted.logits, result.token_ids, result.logprobs, strict=True):
            truth = logits[0].log_softmax(dim=0)
            assert told is not None and told.logprob == pytest.approx(truth[token_id].item(), abs=1e-4)
            best = truth.topk(3)
            assert [one.logprob for one in told.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_tokens", [24, pytest.param(64, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_twenty_blocks_serve_thirty_sequences_with_the_same_tokens(
    tmp_path: Path, architecture: str, num_tokens: int
) -> None:
    folder = save_tiny_model(tmp_path / architecture, architecture)
    config = Config(
        model=ModelConfig(name="tiny", path=str(folder), dtype="float32"),
        engine=EngineConfig(block_size=16, num_blocks=20, max_chunk_tokens=32, max_running=32),
    )
    core = open_core(config)
    rng = random.Random(3)
    prompts = random_prompts([rng.randrange(1, 120) for _ in range(30)], VOCAB_SIZE)

    def run(cases: object, num_tokens: int) -> list[list[int]]:
        return sampled(core, [(p, SamplingParams(max_tokens=num_tokens, temperature=0.0)) for p in prompts])

    report = check_parity(run, Reference(folder), prompts, num_tokens)
    assert not report.mismatches, str(report)
    assert core.stats().num_preemptions > 0
    core.check_integrity()
