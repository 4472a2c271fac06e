"""Real (tiny) models: log-probabilities of output tokens are those of the same model run alone by transformers.

Of the first token, which prefill samples, and of the later ones; in one process and split; of every choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from engine.core import EngineCore
from engine.local import choice_name, generate
from engine.opening import open_core
from engine.sequence import Priority, Sequence
from kvferry.client import Completion, GenerateOptions
from kvferry.sampling import SamplingParams
from tests.golden.drivers import parity_config
from tests.golden.logprobs import NUM_TOP, TOLERANCE, Truth
from tests.golden.parity import random_prompts
from tests.support.deployment import Deployment, deployment_config, running_deployment
from tests.support.models import VOCAB_SIZE, save_tiny_model

NUM_TOKENS = 6
CHOSEN = (317, 5, 80)
NUM_CHOICES = 3
LENGTHS = (1, 2, 8, 9, 33, 50)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=True, num_top_logprobs=NUM_TOP)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.2, top_k=40, seed=9)
CHOSEN_IDS = dataclasses.replace(SAMPLED, num_top_logprobs=0, logprob_token_ids=CHOSEN)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_of_an_engine_alone(tmp_path: Path, architecture: str) -> None:
    """In one batch and in chunks; the second round finds the blocks of the first in the prefix cache."""
    folder = save_tiny_model(tmp_path / architecture, architecture)
    truth, core = Truth(folder), open_core(parity_config(folder, block_size=4, chunk_tokens=5))
    for round_ in range(2):
        before = core.stats().num_cached_tokens
        for sampling, num_choices in ((GREEDY, 1), (SAMPLED, NUM_CHOICES), (CHOSEN_IDS, NUM_CHOICES)):
            check_engine(truth, core, sampling, num_choices)
        assert round_ == 0 or core.stats().num_cached_tokens > before
    core.check_integrity()


def check_engine(truth: Truth, core: EngineCore, sampling: SamplingParams, num_choices: int) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    results = generate(
        core,
        [
            Sequence(
                str(number),
                prompt,
                sampling,
                priority=Priority(arrival=number),
                hash_root=core.hash_root(),
                num_choices=num_choices,
            )
            for number, prompt in enumerate(prompts)
        ],
    )
    for number, prompt in enumerate(prompts):
        for choice in range(num_choices):
            result = results[choice_name(str(number), choice)]
            told = [one for one in result.logprobs if one is not None]
            truth.check([*prompt, *result.token_ids], told, first_index=len(prompt), others=sampling.logprob_token_ids)


@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_of_a_deployment(tmp_path: Path, num_prefill: int) -> None:
    """With hits, chunks, choices, `best_of`, and the prompt's beside them; the same over HTTP."""
    folder = save_tiny_model(tmp_path / "llama", "llama")
    truth = Truth(folder)
    config = deployment_config(folder, max_chunk_tokens=8, num_blocks=256, timeout_s=30.0)
    prompts = random_prompts([40, 3, 17], VOCAB_SIZE)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": NUM_TOP},
        {"n": 3, "seed": 4, "logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP},
        {"n": 2, "best_of": 4, "seed": 5, "logprobs": NUM_TOP, "repetition_penalty": 1.5},
        {"n": 2, "seed": 6, "top_p": 0.9, "logprob_token_ids": CHOSEN},
    ]
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for fields in asked:
            for prompt in [*prompts, prompts[0]]:
                options = GenerateOptions(prompt=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
                answer = await deployment.client.complete(options, timeout_s=60.0)
                check_answer(truth, prompt, answer, fields)
        await check_http(deployment, prompts)
        await deployment.assert_idle()


def check_answer(truth: Truth, prompt: SequenceOf[int], answer: Completion, fields: dict[str, Any]) -> None:
    assert len(answer.choices) == fields.get("n", 1)
    for choice in answer.choices:
        assert len(choice.token_ids) == NUM_TOKENS
        truth.check(
            [*prompt, *choice.token_ids],
            choice.logprobs,
            first_index=len(prompt),
            others=fields.get("logprob_token_ids", ()),
        )
    if "prompt_logprobs" in fields:
        truth.check(prompt, answer.prompt_logprobs)


async def check_http(deployment: Deployment, prompts: SequenceOf[list[int]]) -> None:
    """What gRPC tells, HTTP tells."""
    base_url = f"{deployment.router.http_url}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60.0) as client:
        for prompt in prompts:
            fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "n": 2, "seed": 8, "logprobs": NUM_TOP}
            options = GenerateOptions(prompt=prompt, ignore_eos=True, **fields)
            wanted = await deployment.client.complete(options, timeout_s=60.0)
            extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
            answer = await client.completions.create(model="", prompt=prompt, extra_body=extra, **fields)
            for choice, other in zip(answer.choices, wanted.choices, strict=True):
                assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
                assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in other.token_ids]
                assert choice.logprobs.token_logprobs == pytest.approx(
                    [one.logprob for one in other.logprobs], abs=TOLERANCE
                )
                for top, one in zip(choice.logprobs.top_logprobs, other.logprobs, strict=True):
                    told = {f"token_id:{each.token_id}": each.logprob for each in (*one.top, one)}
                    assert top == pytest.approx(told, abs=TOLERANCE)
