"""bfloat16 on native kernels: the very same tokens alone, in batches, chunks, after preemption, resumed and split."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.core import EngineCore
from engine.local import generate
from engine.opening import open_core
from engine.outputs import TokenSampled
from engine.sequence import Priority, Sequence
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import SamplingParams
from tests.golden.parity import random_prompts
from tests.support.models import VOCAB_SIZE, save_tiny_model
from tests.support.workers import assert_idle, make_spec, running_pair

ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma3")
LENGTHS = (3, 17, 40, 12, 25, 33, 64, 90)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)


def bfloat16_config(folder: Path, **engine: Any) -> Config:
    defaults: dict[str, Any] = {"block_size": 8, "num_blocks": 400, "kernels": "native"}
    return Config(
        model=ModelConfig(name="bfloat16", path=str(folder), dtype="bfloat16"),
        engine=EngineConfig(**{**defaults, **engine}),
    )


def sampling_of(number: int, num_tokens: int) -> dict[str, Any]:
    """Every other one greedy."""
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": number}
    return {"max_tokens": num_tokens, **(seeded if number % 2 else {"temperature": 0.0})}


def run(core: EngineCore, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    sequences = [
        Sequence(
            str(number),
            prompt,
            SamplingParams(**sampling_of(number, num_tokens)),
            priority=Priority(arrival=number),
            hash_root=core.hash_root(),
        )
        for number, prompt in enumerate(prompts)
    ]
    results = generate(core, sequences)
    core.check_integrity()
    return [results[sequence.seq_id].token_ids for sequence in sequences]


async def split(config: Config, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    async with running_pair(config, timeout_s=600.0) as (prefill, decode, caller):
        specs = [
            make_spec(f"split{number}", prompt, **sampling_of(number, num_tokens))
            for number, prompt in enumerate(prompts)
        ]
        results = await asyncio.gather(*(caller.generate(spec) for spec in specs))
        await assert_idle(prefill, decode)
        return [result.token_ids for result in results]


def check(folder: Path, prompts: list[list[int]], num_tokens: int, num_preempted_blocks: int) -> None:
    alone = run(open_core(bfloat16_config(folder, max_running=1, max_chunk_tokens=512)), prompts, num_tokens)
    for engine in (
        {"max_running": 8, "max_chunk_tokens": 16},
        {"max_running": 32, "max_chunk_tokens": 512, "block_size": 16},
        {"max_running": 32, "max_chunk_tokens": 16, "num_threads": 2, "max_batched_tokens": 64},
    ):
        assert run(open_core(bfloat16_config(folder, **engine)), prompts, num_tokens) == alone, engine
    for preemption in ("recompute", "swap"):
        core = open_core(bfloat16_config(folder, num_blocks=num_preempted_blocks, preemption=preemption))
        assert run(core, prompts, num_tokens) == alone, preemption
        assert core.stats().num_preemptions > 0
    assert asyncio.run(split(bfloat16_config(folder), prompts, num_tokens)) == alone
    _check_resumed(folder, prompts, alone, num_tokens)


def _check_resumed(folder: Path, prompts: list[list[int]], alone: list[list[int]], num_tokens: int) -> None:
    """As after a killed worker: prompt and output so far are the prompt of another one."""
    core = open_core(bfloat16_config(folder))
    for number, (prompt, whole) in enumerate(zip(prompts, alone, strict=True)):
        given = 1 + number % (len(whole) - 1)
        sampling = SamplingParams(**sampling_of(number, num_tokens))
        core.add(Sequence(f"resumed{number}", prompt + whole[:given], sampling, num_prompt_tokens=len(prompt)))
        tokens: list[int] = []
        while core.has_work:
            tokens += [output.token_id for output in core.step() if isinstance(output, TokenSampled)]
        assert tokens == whole[given:]


@pytest.mark.parametrize(
    ("num_tokens", "num_preempted_blocks"), [(12, 16), pytest.param(24, 24, marks=pytest.mark.sweep)]
)
def test_tokens_are_the_same_in_every_company(folder: Path, num_tokens: int, num_preempted_blocks: int) -> None:
    check(folder, random_prompts(LENGTHS, VOCAB_SIZE), num_tokens, num_preempted_blocks)


@pytest.mark.sweep
@pytest.mark.timeout(1_800)
def test_a_hundred_prompts_of_a_real_model(smollm2_folder: Path) -> None:
    lengths = [1 + 7 * number % 301 for number in range(100)]
    check(smollm2_folder, random_prompts(lengths, 40_000), 64, num_preempted_blocks=120)
