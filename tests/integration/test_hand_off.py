"""The hand-off between two workers at its edges: counts, block edges, pools too small, input that makes no sense, residue."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.scripted import reference_continuation
from kvferry.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvferryError,
    ResourceExhausted,
    Unavailable,
)
from kvferry.rpc import RpcChannel
from kvferry.wire import spec_to_pb
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.support.pair import Pair, scripted_pair
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.workers import (
    PairCaller,
    PairResult,
    assert_idle,
    core_of,
    make_spec,
    running_pair,
    scripted_config,
    scripted_folder,
    until,
)

BLOCK = 4


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with scripted_pair(tmp_path / "model") as pair:
        yield pair
        await pair.check_serves()
        await pair.check_idle()


# -- counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK, BLOCK + 1])
async def test_exactly_as_many_tokens_as_asked_for(pair: Pair, max_tokens: int) -> None:
    """R034."""
    for num_prompt_tokens in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        prompt = pair.prompts.draw(num_prompt_tokens)
        request = await pair.check_serves(prompt, max_tokens=max_tokens, ignore_eos=True, eos_token_ids=(3,))
        assert len(request.result.token_ids) == max_tokens
        assert request.result.finish.reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("rule", ["eos_token_ids", "stop_token_ids"])
async def test_an_ending_first_token_leaves_decode_nothing_to_do(pair: Pair, rule: str) -> None:
    """R035, also where the shipment is well under way by then."""
    num_steps = core_of(pair.decode).num_steps
    for num_prompt_tokens in (1, BLOCK, 10 * BLOCK):
        prompt = pair.prompts.draw(num_prompt_tokens)
        first = pair.prompts.continue_(prompt, 1)
        request = pair.begin(prompt, **{rule: tuple(first)})
        await asyncio.wait([request.prefill])
        assert request.result.token_ids == first and request.result.finish.token_id == first[0]
        await until(lambda: pair.num_used_blocks(pair.decode) == 0)
        assert request.result.committed is None
        await request.end(Ending.CHANNELS)
    assert core_of(pair.decode).num_steps == num_steps


async def test_an_ending_token_at_every_place_after_the_first(pair: Pair) -> None:
    for number in range(1, 2 * BLOCK + 1):
        prompt = pair.prompts.draw(BLOCK)
        expected = pair.prompts.continue_(prompt, 20)
        num_tokens = 1 + next(index for index in range(number, 20) if expected[index] not in expected[:index])
        request = pair.begin(prompt, 20, stop_token_ids=(expected[num_tokens - 1],))
        await request.finished()
        assert request.result.token_ids == expected[:num_tokens]
        assert request.result.finish.reason == types_pb2.FINISH_REASON_STOP_TOKEN


# -- the prefix cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
async def test_a_prompt_that_is_wholly_cached_and_ends_on_a_block_edge(pair: Pair, num_blocks: int) -> None:
    """R041: its last token is computed again, on prefill; decode is sent nothing of it."""
    prompt = pair.prompts.draw(num_blocks * BLOCK)
    for turn in range(3):
        for max_tokens in (1, 20):
            await pair.check_serves(prompt, max_tokens=max_tokens)
        longer = await pair.check_serves(prompt + pair.prompts.draw(3))
        assert longer.result.first_token is not None and longer.result.done is not None
        assert longer.result.first_token.num_cached_tokens == len(prompt)
        assert longer.result.done.num_blocks_reused == num_blocks, turn


async def test_what_is_reused_just_before_at_and_after_a_block_edge(pair: Pair) -> None:
    """R042: never a block too few, never more than there is."""
    for num_blocks in (1, 2, 4):
        for num_tokens in (num_blocks * BLOCK - 1, num_blocks * BLOCK, num_blocks * BLOCK + 1):
            prompt = pair.prompts.draw(num_tokens)
            await pair.check_serves(prompt)
            again = (await pair.check_serves(prompt)).result
            assert again.first_token is not None and again.committed is not None and again.done is not None
            assert again.first_token.num_cached_tokens == (num_tokens - 1) // BLOCK * BLOCK
            assert again.committed.num_cached_tokens == num_tokens // BLOCK * BLOCK
            assert again.done.num_blocks_reused == num_tokens // BLOCK
            assert again.done.num_blocks_shipped == -(-num_tokens // BLOCK) - num_tokens // BLOCK


async def test_a_warm_hit_takes_nothing_that_is_not_given_back(pair: Pair) -> None:
    """R030, R031: a hundred hits of a long prefix, half of them given up, and then a pool full of other prompts."""
    prefix = pair.prompts.draw(10 * BLOCK)
    await pair.check_serves(prefix)
    num_arrived = pair.num_arrived_blocks
    for number in range(50):
        await pair.check_serves(prefix, max_tokens=2)
        dropped = pair.begin(prefix)
        await until(lambda dropped=dropped, number=number: dropped.registered.done() or number % 2 == 0)  # type: ignore[misc]
        await dropped.end(Ending.BOTH)
        await dropped.end(Ending.CHANNELS)
    assert pair.num_arrived_blocks == num_arrived
    await pair.check_idle()
    for _ in range(20):
        await pair.check_serves(pair.prompts.draw(40 * BLOCK), max_tokens=20 * BLOCK)


# -- pools too small -----------------------------------------------------------------------------------------------------


async def test_long_outputs_through_a_decode_pool_for_two_of_six(tmp_path: Path) -> None:
    """R056, R057, R058: whoever is preempted is computed again, and its stream goes on where it was."""
    async with scripted_pair(tmp_path / "model", decode={"num_blocks": 24}) as pair:
        requests = [pair.begin(pair.prompts.draw(8), 40) for _ in range(6)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(pair.prompts.is_right(request) for request in requests)
        assert core_of(pair.decode).stats().num_preemptions >= 3
        await pair.check_idle()


async def test_two_that_need_more_than_half_of_the_pool_each_do_not_throw_each_other_out_for_ever(tmp_path: Path) -> None:
    """R060."""
    async with scripted_pair(tmp_path / "model", decode={"num_blocks": 20}) as pair:
        await pair.check_serves(max_tokens=26)
        num_serial_steps = 2 * (core_of(pair.decode).num_steps + 1)
        before = core_of(pair.decode).stats()
        requests = [pair.begin(max_tokens=26) for _ in range(2)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(pair.prompts.is_right(request) for request in requests)
        after = core_of(pair.decode).stats()
        assert 1 <= after.num_preemptions <= 3
        assert after.num_steps - before.num_steps < 2.5 * num_serial_steps
        await pair.check_idle()


async def test_what_fits_exactly_is_served_and_one_token_more_is_refused_at_once(tmp_path: Path) -> None:
    """R059, R063: on each side; small ones are served before, beside and after it."""
    async with scripted_pair(tmp_path / "model", prefill={"num_blocks": 8}, decode={"num_blocks": 10}) as pair:
        small = [pair.begin(pair.prompts.draw(5), 4) for _ in range(4)]
        await pair.check_serves(pair.prompts.draw(8), max_tokens=33)  # the last token's KV is never computed
        for num_prompt_tokens, max_tokens, words in ((8, 34, "up to 11 blocks .* pool has 10"), (33, 2, "pool has 8")):
            refused = pair.begin(pair.prompts.draw(num_prompt_tokens), max_tokens)
            call = refused.decode if num_prompt_tokens == 8 else refused.prefill
            failure = await failure_of(call, timeout_s=1.0)
            assert isinstance(failure, ResourceExhausted)
            with pytest.raises(ResourceExhausted, match=words):
                raise failure
            await refused.end(Ending.CHANNELS)
        await pair.check_serves(pair.prompts.draw(32), max_tokens=9)
        await asyncio.gather(*(request.finished() for request in small))
        await pair.check_idle()


async def test_a_big_head_of_the_queue_neither_stops_small_ones_nor_waits_for_ever(tmp_path: Path) -> None:
    """R066: the room it waits for is taken; small ones pass it, a bounded number of them."""
    async with scripted_pair(tmp_path / "model", decode={"num_blocks": 32}) as pair:
        engine = pair.decode.role.engine  # type: ignore[attr-defined]
        taken = await engine.run(lambda core: core.pool.allocate(16))
        big = pair.begin(pair.prompts.draw(20 * BLOCK))
        await until(lambda: pair.num_waiting_grants == 1)
        for _ in range(10):
            await pair.check_serves(pair.prompts.draw(8))
        assert not big.decode.done() and big.result.committed is None
        await engine.run(lambda core: core.pool.free(taken))
        rest = [pair.begin(pair.prompts.draw(8)) for _ in range(30)]
        await big.finished()
        assert pair.prompts.is_right(big)
        await asyncio.gather(*(request.finished() for request in rest))
        await pair.check_idle()


async def test_a_decode_batch_never_grows_past_its_seats(tmp_path: Path) -> None:
    async with scripted_pair(tmp_path / "model", decode={"max_running": 2, "max_batched_tokens": 8}) as pair:
        runner, largest = core_of(pair.decode).runner, 0
        run = runner.run

        def counting(slices: Any) -> Any:
            nonlocal largest
            largest = max(largest, len(slices))
            return run(slices)

        runner.run = counting  # type: ignore[method-assign]
        requests = [pair.begin() for _ in range(8)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(pair.prompts.is_right(request) for request in requests)
        assert largest == 2
        await pair.check_idle()


# -- workers that do not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
async def test_block_sizes_that_differ_are_refused_with_both_named(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """R014."""
    folder = scripted_folder(tmp_path / "model")
    configs = [scripted_config(folder, block_size=size) for size in sizes]
    async with running_pair(*configs) as (prefill, decode, caller):
        for number in range(3):
            with pytest.raises(KvferryError, match=f"block_size: {sizes[1]} here, {sizes[0]} there"):
                await caller.generate(make_spec(f"r{number}", list(range(40)), 5))
            await assert_idle(prefill, decode)


# -- one sequence that fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_index", [0, 5])
async def test_numbers_that_are_not_finite_fail_their_sequence_alone(tmp_path: Path, bad_index: int) -> None:
    """R134: on prefill (the first token) and in the middle of a decode batch."""
    async with scripted_pair(tmp_path / "model", nan_at_output_index=(bad_index,)) as pair:
        healthy = [pair.begin(max_tokens=bad_index) for _ in range(4 if bad_index else 0)]
        broken = [pair.begin() for _ in range(3)]
        for request in broken:
            failure = await failure_of(request.prefill if bad_index == 0 else request.decode)
            assert isinstance(failure, Internal) and "non-finite" in failure.message
            await request.end(Ending.CHANNELS)
        for request in healthy:
            await request.finished()
            assert pair.prompts.is_right(request)
        await pair.check_idle()


async def test_the_same_attempt_from_two_callers_is_refused_and_never_mixed(tmp_path: Path) -> None:
    """R130."""
    async with scripted_pair(tmp_path / "model", step_delay_s=0.005) as pair:
        first = pair.begin(request_id="same", max_tokens=30)
        await until(lambda: len(first.result.token_ids) >= 2)
        for _ in range(5):
            second = pair.begin(request_id="same")
            assert isinstance(await failure_of(second.decode), FailedPrecondition)
            await second.end(Ending.CHANNELS)
        await first.finished()
        assert pair.prompts.is_right(first)
        await pair.check_idle()


async def test_a_deadline_that_passes_in_the_queue_is_not_computed(tmp_path: Path) -> None:
    """R103."""
    async with scripted_pair(tmp_path / "model", prefill={"max_running": 1, "num_blocks": 512}, step_delay_s=0.01) as pair:
        ahead = pair.begin(pair.prompts.draw(200), 1)
        await until(lambda: core_of(pair.prefill).scheduler.running != [])
        request = prefill_request(make_spec("late", pair.prompts.draw(40), 1))
        async with RpcChannel(pair.prefill.address) as channel:
            stub = worker_pb2_grpc.PrefillServiceStub(channel.grpc)
            with pytest.raises(DeadlineExceeded):
                async with channel.stream(stub.Prefill, request, timeout_s=0.1) as call:
                    async for _ in call:
                        pass
        await until(lambda: "late/1" not in core_of(pair.prefill).sequences)
        await ahead.finished()
        assert core_of(pair.prefill).stats().num_prefill_tokens == 200 + BLOCK  # and the warm-up
        await pair.check_idle()


def prefill_request(spec: Any, **changes: Any) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(sequence=spec_to_pb(spec), **{"progress_timeout_s": 5.0, **changes})
