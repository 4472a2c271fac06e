"""`make soak`: many requests through one deployment; the last answers must be as right as the first."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from kvferry.client import Completion, GenerateOptions
from tests.golden.drivers import EngineDriver, parity_config
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
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


async def test_ten_thousand_requests_that_end_early_leave_no_block_held(tmp_path: Path) -> None:
    """Cancelled by the client, ended by their deadline, failed by the model, refused, or stopped: nothing is left."""
    folder = chat_folder(tmp_path / "scripted", nan_at_output_index=[20], step_delay_s=0.0005)
    config = deployment_config(folder, num_blocks=256, timeout_s=30.0, check_integrity=True)
    rng, places, ends = random.Random(1), asyncio.Semaphore(24), Counter[str]()
    async with running_deployment(config, num_prefill=1, num_decode=2) as deployment:

        async def one(number: int) -> None:
            async with places:
                options = _options(rng, number)
                timeout_s = rng.choice([60.0, 60.0, 0.01, 0.03])
                call = asyncio.ensure_future(deployment.client.complete(options, timeout_s=timeout_s))
                if number % 3 == 0:
                    await asyncio.wait([call], timeout=rng.random() * 0.05)
                    call.cancel()
                await asyncio.wait([call])
                ends[_end_of(call)] += 1

        for begin in range(0, 10_000, 1_000):
            await asyncio.gather(*(one(begin + number) for number in range(1_000)))
            await deployment.assert_idle()
        assert all(core_of(worker).num_integrity_faults == 0 for worker in (*deployment.prefill, *deployment.decode))
    assert ends.total() == 10_000
    assert ends["CancelledError"] > 500 and ends["DeadlineExceeded"] > 500 and ends["Internal"] > 100, ends
    assert ends["InvalidArgument"] > 100, ends


def _options(rng: random.Random, number: int) -> GenerateOptions:
    prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 60))]
    wide = {"beam_width": 2} if number % 7 == 0 else {"n": rng.choice([1, 1, 2, 4]), "temperature": 1.0}
    max_tokens = 5_000_000 if number % 11 == 0 else rng.choice([1, 5, 30])
    return GenerateOptions(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, **wide)


def _end_of(call: asyncio.Future[Completion]) -> str:
    if call.cancelled():
        return "CancelledError"
    error = call.exception()
    return "finished" if error is None else type(error).__name__
