"""Nothing that is held, or under way, is computed or shipped twice: counts of a whole deployment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry.client import Completion, GenerateOptions
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.workers import core_of, until

PROMPT = [7 + number % 190 for number in range(1_000)]
BLOCK = 16


def options(prompt: list[int] = PROMPT, **more: object) -> GenerateOptions:
    return GenerateOptions(prompt=prompt, max_tokens=6, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def blocks_shipped(answers: list[Completion]) -> int:
    return sum(answer.timings.num_blocks_shipped for answer in answers)


def num_computed_tokens(deployment: Deployment) -> int:
    return sum(core_of(worker).stats().num_prefill_tokens for worker in (*deployment.prefill, *deployment.decode))


async def test_the_second_request_computes_its_tail_and_ships_what_decode_lacks(tmp_path: Path) -> None:
    """Also with a longer prompt, the next turn of a conversation; and the counts are in response and metrics."""
    config = deployment_config(chat_folder(tmp_path / "m"), block_size=BLOCK, num_blocks=512)
    async with running_deployment(config) as deployment:
        first = await deployment.client.complete(options())
        assert (first.usage.cached_tokens, first.timings.num_blocks_shipped) == (0, 63)
        again = await deployment.client.complete(options())
        assert again.usage.cached_tokens == 992
        assert (again.timings.num_blocks_shipped, again.timings.num_blocks_reused) == (1, 62)
        assert again.choices[0].token_ids == first.choices[0].token_ids
        longer = await deployment.client.complete(options([*PROMPT, *first.choices[0].token_ids, 9, 9, 9]))
        assert longer.usage.cached_tokens == 992
        assert longer.timings.num_blocks_reused == 62
        bypassing = await deployment.client.complete(options(bypass_prefix_cache=True))
        assert bypassing.usage.cached_tokens == 0 and bypassing.timings.num_blocks_shipped == 63
        assert bypassing.choices[0].token_ids == first.choices[0].token_ids
        await until(lambda: _metric(deployment, "kvferry_worker_cached_tokens_total") >= 2 * 992)
        assert _metric(deployment, "kvferry_worker_prefix_cache_hit_tokens_total") >= 2 * 992


def _metric(deployment: Deployment, name: str) -> float:
    """Sum over all labels."""
    families = deployment.telemetry.metrics.registry.collect()
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_identical_prompts_at_once_are_computed_and_shipped_once(tmp_path: Path, num_prefill: int) -> None:
    """R055: with several prefill workers once on each."""
    folder = chat_folder(tmp_path / "m", token_delay_s=0.0001)
    config = deployment_config(folder, block_size=BLOCK, num_blocks=1024, max_chunk_tokens=128)
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        answers = await asyncio.gather(*(deployment.client.complete(options()) for _ in range(8)))
        assert len({tuple(answer.choices[0].token_ids) for answer in answers}) == 1
        num_tails = 8 - num_prefill
        assert num_computed_tokens(deployment) == num_prefill * len(PROMPT) + num_tails * (len(PROMPT) % BLOCK)
        assert blocks_shipped(answers) == 63 + 7  # a prompt, and seven partial blocks, which no cache holds
        await deployment.assert_idle()


async def test_a_shared_beginning_under_way_is_waited_for(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", token_delay_s=0.0001)
    config = deployment_config(folder, block_size=BLOCK, num_blocks=1024, max_chunk_tokens=128)
    async with running_deployment(config) as deployment:
        prompts = [[*PROMPT[:800], *([number] * 40)] for number in range(4)]
        answers = await asyncio.gather(*(deployment.client.complete(options(prompt)) for prompt in prompts))
        assert num_computed_tokens(deployment) == 800 + 4 * 40
        assert blocks_shipped(answers) == 50 + 4 * 3
        alone = await deployment.client.complete(options(prompts[2], bypass_prefix_cache=True))
        assert answers[2].choices[0].token_ids == alone.choices[0].token_ids


async def test_when_who_was_waited_for_goes_away_the_next_one_computes(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", token_delay_s=0.0002)
    config = deployment_config(folder, block_size=BLOCK, num_blocks=1024, max_chunk_tokens=64)
    async with running_deployment(config) as deployment:
        calls = [asyncio.ensure_future(deployment.client.complete(options())) for _ in range(4)]
        prefill = core_of(deployment.prefill[0])
        await until(lambda: len(prefill.sequences) == 4 and 200 < prefill.stats().num_prefill_tokens < 900)
        leader = next(one for one in prefill.sequences.values() if one.num_computed_tokens)
        calls[leader.priority.arrival - 1].cancel()
        others = [call for number, call in enumerate(calls) if number != leader.priority.arrival - 1]
        answers = await asyncio.gather(*others)
        alone = await deployment.client.complete(options(bypass_prefix_cache=True))
        assert [answer.choices[0].token_ids for answer in answers] == [alone.choices[0].token_ids] * 3
        await deployment.assert_idle()
