"""n, best_of and beam search from the client to the workers and back; tokens depend on every shipped byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.scripted import load_script_config, reference_continuation, scripted_logprob
from kvferry.client import Choice, GenerateOptions
from kvferry.config import Config
from kvferry.sampling import SamplingParams
from tests.support.deployment import chat_folder, deployment_config, running_deployment
from tests.support.workers import core_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
NUM_TOKENS = 11
SEED = 42


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return deployment_config(chat_folder(tmp_path / "model"))


def expected(config: Config, num_choices: int) -> list[list[int]]:
    """By hand: every choice continues the prompt with its own noise."""
    assert config.model.path is not None
    script, sampling = load_script_config(Path(config.model.path)), SamplingParams(NUM_TOKENS, seed=SEED)
    choices = range(num_choices)
    return [reference_continuation(PROMPT, NUM_TOKENS, script, sampling, choice) for choice in choices]


def options(n: int, best_of: int | None = None, beam_width: int | None = None) -> GenerateOptions:
    return GenerateOptions(
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=SEED if beam_width is None else None,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
    )


def ids(choices: list[Choice]) -> list[list[int]]:
    return [choice.token_ids for choice in choices]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_choices_are_those_of_the_oracle_and_the_prompt_is_shipped_once(config: Config, num_prefill: int) -> None:
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        answer = await deployment.client.complete(options(n=4), timeout_s=30.0)
        assert ids(answer.choices) == expected(config, 4)
        assert answer.usage.completion_tokens == 4 * NUM_TOKENS
        assert answer.timings.num_blocks_shipped == (3 if num_prefill else 0)
        await deployment.assert_idle()


async def test_the_best_candidates_have_the_highest_log_probability_a_token(config: Config) -> None:
    async with running_deployment(config) as deployment:
        answer = await deployment.client.complete(options(n=2, best_of=5), timeout_s=30.0)
        ranked = sorted(expected(config, 5), key=lambda tokens: -sum(map(scripted_logprob, tokens)))
        assert ids(answer.choices) == ranked[:2]
        logprobs = [choice.cumulative_logprob for choice in answer.choices]
        assert logprobs == [pytest.approx(sum(map(scripted_logprob, tokens))) for tokens in ranked[:2]]
        assert answer.usage.completion_tokens == 5 * NUM_TOKENS
        await deployment.assert_idle()


async def test_a_beam_search_is_the_same_with_and_without_a_shipment(config: Config) -> None:
    found: list[list[list[int]]] = []
    for num_prefill in (0, 1):
        async with running_deployment(config, num_prefill=num_prefill) as deployment:
            answer = await deployment.client.complete(options(n=2, beam_width=3), timeout_s=30.0)
            found.append(ids(answer.choices))
            first, second = (choice.cumulative_logprob or 0.0 for choice in answer.choices)
            assert first >= second
            assert answer.timings.prefill_s > 0
            again = await deployment.client.complete(options(n=2, beam_width=3), timeout_s=30.0)
            assert ids(again.choices) == ids(answer.choices)
            assert again.usage.cached_tokens > 0 and again.timings.num_blocks_reused == num_prefill * (
                again.usage.cached_tokens // config.engine.block_size
            )
            await deployment.assert_idle()
    assert found[0] == found[1]


async def test_a_dead_decode_worker_in_mid_stream_changes_no_choice(tmp_path: Path) -> None:
    config = deployment_config(chat_folder(tmp_path / "model", step_delay_s=0.02))
    async with running_deployment(config, num_decode=2) as deployment:
        async with deployment.client.generate(options(n=3), timeout_s=30.0) as events:
            tokens: dict[int, list[int]] = {}
            async for event in events:
                tokens.setdefault(event.delta.index, []).extend(event.delta.token_ids)
                if sum(map(len, tokens.values())) == 9:
                    busy = max(deployment.decode, key=lambda worker: len(core_of(worker).sequences))
                    await busy.server.grpc.stop(None)
        assert [tokens[choice] for choice in range(3)] == expected(config, 3)
