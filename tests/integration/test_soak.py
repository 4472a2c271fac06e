"""`make soak`: many requests through one deployment; the last answers must be as right as the first."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvferry.client import Completion, GenerateOptions
from tests.golden.drivers import EngineDriver, parity_config
from tests.support.deployment import Deployment, deployment_config, running_deployment
from tests.support.models import VOCAB_SIZE, save_tiny_model
from tests.support.workers import core_of

NUM_REQUESTS = 2_000
NUM_PROMPTS = 200
AT_ONCE = 16
NUM_TOKENS = 24

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3_600)]


async def test_answers_stay_right_over_two_thousand_requests(tmp_path: Path) -> None:
    """Slow corruption shows as a trend: prompts come again and again, among them cancelled ones, in a small pool."""
    folder = save_tiny_model(tmp_path / "llama", "llama")
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 200))] for _ in range(NUM_PROMPTS)]
    golden = EngineDriver(parity_config(folder, block_size=16, chunk_tokens=64)).generate(prompts, NUM_TOKENS)
    config = deployment_config(folder, block_size=16, num_blocks=96, max_chunk_tokens=64, timeout_s=60.0)
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment:
        places, wrong = asyncio.Semaphore(AT_ONCE), []

        async def one(number: int) -> None:
            which = rng.randrange(NUM_PROMPTS)
            async with places:
                answer = await _answer(deployment, prompts[which], cancel_after=rng.choice([None, None, None, 5]))
            tokens = answer.choices[0].token_ids if answer.choices else []
            if tokens != golden[which][: len(tokens)] or (answer.is_complete and len(tokens) != NUM_TOKENS):
                wrong.append(number)

        await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
        await deployment.assert_idle()
        assert wrong == []
        assert sum(core_of(worker).stats().num_preemptions for worker in deployment.decode) > 0


async def _answer(deployment: Deployment, prompt: list[int], *, cancel_after: int | None) -> Completion:
    """The response, or its beginning where the client leaves after that many tokens."""
    options = GenerateOptions(prompt=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    answer = Completion()
    async with deployment.client.generate(options, timeout_s=600.0) as events:
        async for event in events:
            answer.add(event)
            if cancel_after is not None and answer.choices and len(answer.choices[0].token_ids) >= cancel_after:
                break
    return answer
