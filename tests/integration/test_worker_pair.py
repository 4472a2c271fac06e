"""One prefill and one decode worker over real gRPC, a test playing the router; tokens depend on every shipped byte."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.scripted import reference_continuation
from kvferry.errors import ResourceExhausted, TargetUnavailable, Unavailable
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import types_pb2, worker_pb2
from tests.support.workers import (
    PairCaller,
    PairResult,
    assert_idle,
    core_of,
    make_spec,
    running_pair,
    running_worker,
    scripted_config,
    scripted_folder,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return scripted_folder(tmp_path / "model")


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1024) for _ in range(num_tokens)]


async def test_every_length_across_block_and_chunk_edges(folder: Path) -> None:
    config = scripted_config(folder, max_chunk_tokens=8)
    async with running_pair(config) as (prefill, decode, caller):
        for length in range(1, 3 * 4 + 2):
            prompt = random_prompt(length, length)
            result = await caller.generate(make_spec(f"r{length}", prompt, 9))
            assert result.token_ids == reference_continuation(prompt, 9)
            assert result.done is not None and result.done.num_blocks_shipped == -(-length // 4)
            assert result.finish.reason == types_pb2.FINISH_REASON_LENGTH
        await assert_idle(prefill, decode)


async def test_many_at_once_through_small_pools(folder: Path) -> None:
    config = scripted_config(folder, num_blocks=24, max_chunk_tokens=8)
    async with running_pair(config) as (prefill, decode, caller):
        prompts = {f"r{i}": random_prompt(i, 1 + i % 40) for i in range(40)}
        results = await asyncio.gather(*(caller.generate(make_spec(name, p, 20)) for name, p in prompts.items()))
        for result, prompt in zip(results, prompts.values(), strict=True):
            assert result.token_ids == reference_continuation(prompt, 20)
        assert core_of(decode).stats().num_preemptions > 0
        await assert_idle(prefill, decode)


async def test_only_missing_blocks_travel_the_second_time(folder: Path) -> None:
    async with running_pair(scripted_config(folder)) as (prefill, decode, caller):
        prompt = random_prompt(0, 18)
        for turn in range(2):
            result = await caller.generate(make_spec(f"r{turn}", prompt, 5))
            assert result.token_ids == reference_continuation(prompt, 5)
        assert result.done is not None and result.first_token is not None and result.committed is not None
        assert (result.done.num_blocks_shipped, result.done.num_blocks_reused) == (1, 4)
        assert result.first_token.num_cached_tokens == 16 and result.committed.num_cached_tokens == 16
        await assert_idle(prefill, decode)


async def test_one_token_ships_nothing(folder: Path) -> None:
    async with running_pair(scripted_config(folder)) as (prefill, decode, caller):
        result = PairResult()
        prompt = random_prompt(1, 10)
        await caller.prefill(make_spec("one", prompt, 1), None, result)
        assert result.token_ids == reference_continuation(prompt, 1)
        assert result.finish.reason == types_pb2.FINISH_REASON_LENGTH
        assert prefill.role.load().num_blocks_shipped == 0
        await assert_idle(prefill, decode)


async def test_end_of_sequence_as_first_token_commits_nothing(folder: Path) -> None:
    async with running_pair(scripted_config(folder, max_chunk_tokens=4)) as (prefill, decode, caller):
        prompt = random_prompt(2, 30)
        first = reference_continuation(prompt, 1)[0]
        steps_before = core_of(decode).num_steps
        result = await caller.generate(make_spec("eos", prompt, 9, eos_token_ids=(first,)))
        assert result.token_ids == [first]
        assert result.finish.reason == types_pb2.FINISH_REASON_END_OF_SEQUENCE and result.finish.token_id == first
        assert result.committed is None
        await assert_idle(prefill, decode)
        assert core_of(decode).num_steps == steps_before


async def test_a_resumed_attempt_continues_at_its_index(folder: Path) -> None:
    async with running_pair(scripted_config(folder)) as (prefill, decode, caller):
        prompt = random_prompt(3, 11)
        whole = reference_continuation(prompt, 12)
        spec = make_spec("resumed", prompt + whole[:5], 12, attempt=2, num_prompt_tokens=11)
        result = await caller.generate(spec)
        assert result.token_ids == whole[5:]
        assert result.first_token is not None and result.first_token.token_index == 5
        await assert_idle(prefill, decode)


async def test_workers_of_different_layouts_refuse_each_other_naming_both_values(folder: Path) -> None:
    small, big = scripted_config(folder, block_size=4), scripted_config(folder, block_size=8)
    async with running_pair(small, big) as (prefill, decode, caller):
        with pytest.raises(TargetUnavailable, match="block_size: 8 here, 4 there"):
            await caller.generate(make_spec("a", random_prompt(0, 20), 5))
        await assert_idle(prefill, decode)


async def test_what_can_never_fit_is_refused_at_once(folder: Path) -> None:
    async with running_pair(scripted_config(folder, num_blocks=4)) as (prefill, decode, caller):
        with pytest.raises(ResourceExhausted, match=r"up to 5 blocks .* pool has 4"):
            await caller.generate(make_spec("a", random_prompt(0, 10), 9))
        await assert_idle(prefill, decode)


async def test_a_decode_worker_that_is_not_there_fails_the_prefill_with_its_name(folder: Path) -> None:
    config = scripted_config(folder)
    async with running_worker("prefill", config) as prefill, RpcChannel(prefill.address) as channel:
        caller = PairCaller(channel, channel, timeout_s=0.5)
        target = worker_pb2.Registered(epoch=1, ship_address="127.0.0.1:1")
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await caller.prefill(make_spec("a", random_prompt(0, 10), 5), target, PairResult())
        await assert_idle(prefill)
