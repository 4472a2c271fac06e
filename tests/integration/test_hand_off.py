"""The hand-off between two workers at its edges: counts, block edges, small pools, input without sense, residue."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.scripted import ScriptConfig, reference_continuation
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
from kvferry.worker_process import RunningWorker
from kvtransfer import sender_link
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.integration.conftest import ONCE
from tests.support.pair import Pair, Prompts, scripted_pair
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.worker_processes import watching, worker_process
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


# -- counts -----------------------------------------------------------------------------------------------------------


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
        rules: dict[str, Any] = {rule: tuple(first)}
        request = pair.begin(prompt, **rules)
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


# -- the prefix cache -------------------------------------------------------------------------------------------------


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


# -- pools too small --------------------------------------------------------------------------------------------------


async def test_long_outputs_through_a_decode_pool_for_two_of_six(tmp_path: Path) -> None:
    """R056, R057, R058: whoever is preempted is computed again, and its stream goes on where it was."""
    async with scripted_pair(tmp_path / "model", decode={"num_blocks": 24}, step_delay_s=0.002) as pair:
        requests = [pair.begin(pair.prompts.draw(8), 40) for _ in range(6)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(pair.prompts.is_right(request) for request in requests)
        assert core_of(pair.decode).stats().num_preemptions >= 3
        await pair.check_idle()


async def test_two_that_need_more_than_half_of_the_pool_each_do_not_throw_each_other_out_for_ever(
    tmp_path: Path,
) -> None:
    """R060."""
    async with scripted_pair(tmp_path / "model", decode={"num_blocks": 20}, step_delay_s=0.002) as pair:
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
    async with scripted_pair(tmp_path / "model", decode={"max_running": 2}, step_delay_s=0.002) as pair:
        runner, largest = core_of(pair.decode).runner, 0
        run = runner.run

        def counting(slices: Any, *rest: Any) -> Any:
            nonlocal largest
            largest = max(largest, len(slices))
            return run(slices, *rest)

        runner.run = counting  # type: ignore[assignment, method-assign]
        requests = [pair.begin() for _ in range(8)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(pair.prompts.is_right(request) for request in requests)
        assert largest == 2
        await pair.check_idle()


# -- workers that do not fit ------------------------------------------------------------------------------------------


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


# -- one sequence that fails ------------------------------------------------------------------------------------------


async def test_numbers_that_are_not_finite_fail_their_sequence_alone(tmp_path: Path) -> None:
    """R134: at output token 5, in the middle of a decode batch, and on prefill where a resume begins there."""
    async with scripted_pair(tmp_path / "model", nan_at_output_index=(5,), step_delay_s=0.001) as pair:
        healthy = [pair.begin(max_tokens=5) for _ in range(4)]
        in_decode = [pair.begin() for _ in range(3)]
        in_prefill = [pair.begin(pair.prompts.draw(22), num_prompt_tokens=17) for _ in range(3)]
        for call in [*(request.decode for request in in_decode), *(request.prefill for request in in_prefill)]:
            failure = await failure_of(call)
            assert isinstance(failure, Internal) and "non-finite" in failure.message
        for request in [*in_decode, *in_prefill]:
            await request.end(Ending.CHANNELS)
        for request in healthy:
            await request.finished()
            assert pair.prompts.is_right(request)
        await pair.check_idle()


async def test_the_same_attempt_from_two_callers_is_refused_and_never_mixed(tmp_path: Path) -> None:
    """R130."""
    async with scripted_pair(tmp_path / "model", step_delay_s=0.005) as pair:
        first = pair.begin(request_id="same", max_tokens=30)
        await first.has_tokens(2)
        for _ in range(5):
            second = pair.begin(request_id="same")
            assert isinstance(await failure_of(second.decode), FailedPrecondition)
            await second.end(Ending.CHANNELS)
        await first.finished()
        assert pair.prompts.is_right(first)
        await pair.check_idle()


async def test_a_deadline_that_passes_in_the_queue_is_not_computed(tmp_path: Path) -> None:
    """R103."""
    async with scripted_pair(
        tmp_path / "model", prefill={"max_running": 1, "num_blocks": 512}, step_delay_s=0.01
    ) as pair:
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
        assert core_of(pair.prefill).stats().num_prefill_tokens == 200
        await pair.check_idle()


def prefill_request(spec: Any, **changes: Any) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(sequence=spec_to_pb(spec), **{"progress_timeout_s": 5.0, **changes})


# -- input that makes no sense ----------------------------------------------------------------------------------------


def valid_spec() -> Any:
    return make_spec("odd", list(range(10)), 5)


def changed(**changes: Any) -> worker_pb2.SequenceSpec:
    """A valid sequence with some fields replaced; lists replace lists."""
    spec = spec_to_pb(valid_spec())
    for name, value in changes.items():
        spec.ClearField(name)
        spec.MergeFrom(worker_pb2.SequenceSpec(**{name: value}))
    return spec


MALFORMED: dict[str, tuple[worker_pb2.SequenceSpec, float, str]] = {
    "nothing at all": (worker_pb2.SequenceSpec(), 5.0, "token_ids"),
    "no tokens": (changed(token_ids=[]), 5.0, "token_ids"),
    "a token beyond the vocabulary": (changed(token_ids=[*range(9), 1024]), 5.0, "token_ids: 1024, .* 1024 tokens"),
    "the largest token": (changed(token_ids=[*range(9), 2**32 - 1]), 5.0, "token_ids: 4294967295"),
    "a prompt of nothing": (changed(num_prompt_tokens=0), 5.0, "num_prompt_tokens"),
    "a prompt beyond the tokens": (changed(num_prompt_tokens=11), 5.0, "num_prompt_tokens"),
    "all output is there": (changed(num_prompt_tokens=5), 5.0, "max_tokens: 5, of which 5 are given"),
    "more output than wanted": (changed(num_prompt_tokens=1), 5.0, "max_tokens: 5, of which 9 are given"),
    "no token wanted": (changed(sampling=worker_pb2.EffectiveSampling()), 5.0, "max_tokens"),
    "beyond the context": (changed(sampling=worker_pb2.EffectiveSampling(max_tokens=5000)), 5.0, "context of 4096"),
    "very far beyond it": (changed(sampling=worker_pb2.EffectiveSampling(max_tokens=2**32 - 1)), 5.0, "context"),
    "a long prompt beyond it": (changed(token_ids=[1] * 100_000, num_prompt_tokens=100_000), 5.0, "context of 4096"),
    "no name": (changed(id=worker_pb2.AttemptId(attempt=1)), 5.0, "request_id"),
    "attempt 0": (changed(id=worker_pb2.AttemptId(request_id="odd")), 5.0, "attempt"),
    "no timeout": (changed(), 0.0, "progress_timeout_s: must be 0.1"),
    "a timeout that is no number": (changed(), float("nan"), "progress_timeout_s: must be 0.1"),
    "a timeout without end": (changed(), float("inf"), "progress_timeout_s: must be 0.1"),
    "no time": (changed(), 1e-9, "progress_timeout_s: must be 0.1"),
    "a negative timeout": (changed(), -1.0, "progress_timeout_s: must be 0.1"),
}


@ONCE
@pytest.mark.parametrize("name", MALFORMED)
async def test_a_sequence_that_makes_no_sense_is_refused_naming_the_field(pair: Pair, name: str) -> None:
    """R012, R132: by either worker, at once."""
    spec, timeout_s, words = MALFORMED[name]
    target = worker_pb2.ShipTarget(address=pair.decode.address, epoch=1)
    request = worker_pb2.PrefillRequest(sequence=spec, target=target, progress_timeout_s=timeout_s)
    async with asyncio.timeout(5.0):
        with pytest.raises(InvalidArgument, match=words):
            await first_answer_of_prefill(pair.prefill.address, request)
        for local_prefill in (False, True):
            start = worker_pb2.DecodeStart(sequence=spec, progress_timeout_s=timeout_s, local_prefill=local_prefill)
            with pytest.raises(InvalidArgument, match=words):
                await first_answer_of_decode(pair.decode.address, worker_pb2.DecodeRequest(start=start))
            await pair.check_idle()  # its name is known until the engine has let go of it


async def first_answer_of_prefill(address: str, request: worker_pb2.PrefillRequest) -> worker_pb2.PrefillResponse:
    async with (
        RpcChannel(address) as channel,
        channel.stream(worker_pb2_grpc.PrefillServiceStub(channel.grpc).Prefill, request) as call,
    ):
        async for response in call:
            if not response.HasField("progress"):
                return response
    raise AssertionError("the stream ended with status OK")


async def first_answer_of_decode(address: str, *requests: worker_pb2.DecodeRequest) -> Any:
    """What comes after all of them were sent and the heartbeats and `Registered` were read."""
    async with (
        RpcChannel(address) as channel,
        channel.duplex(worker_pb2_grpc.DecodeServiceStub(channel.grpc).Decode) as call,
    ):
        for request in requests:
            await call.write(request)
        while True:
            response: Any = await call.read()
            if response is grpc.aio.EOF or response.WhichOneof("event") not in ("heartbeat", "registered"):
                return response


@ONCE
async def test_a_prefill_that_would_have_to_decode_is_refused(pair: Pair) -> None:
    """Its growth could preempt a prompt whose blocks are being shipped."""
    with pytest.raises(InvalidArgument, match="target: must be set: 5 tokens"):
        await first_answer_of_prefill(pair.prefill.address, prefill_request(valid_spec()))
    with pytest.raises(InvalidArgument, match="must be host:port"):
        await first_answer_of_prefill(pair.prefill.address, prefill_request(valid_spec(), target={}))


@ONCE
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:0", "127.0.0.1:x", "[::1", "a" * 5000, "unix:/nowhere"])
async def test_an_address_that_is_none_fails_the_prefill_alone(
    pair: Pair, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_link, "CONNECT_TIMEOUT_S", 0.3)
    target = worker_pb2.ShipTarget(address=address, epoch=1)
    async with asyncio.timeout(8.0):
        with pytest.raises(Unavailable):
            request = prefill_request(make_spec("odd", [1, 2, 3], 5), target=target)
            async with RpcChannel(pair.prefill.address) as channel:
                stub = worker_pb2_grpc.PrefillServiceStub(channel.grpc)
                async with channel.stream(stub.Prefill, request) as call:
                    async for _ in call:
                        pass


@ONCE
async def test_decode_calls_that_do_not_begin_or_go_on_well_are_refused(pair: Pair) -> None:
    start = worker_pb2.DecodeRequest(start=worker_pb2.DecodeStart(sequence=changed(), progress_timeout_s=5.0))
    stop, beat = worker_pb2.DecodeRequest(stop={}), worker_pb2.DecodeRequest(heartbeat={})
    wrong: list[tuple[list[worker_pb2.DecodeRequest], str]] = [
        ([beat], "first message"),
        ([stop], "first message"),
        ([worker_pb2.DecodeRequest()], "first message"),
        ([start, start], "second `start`"),
        ([start, beat, start], "second `start`"),
    ]
    for requests, words in wrong:
        with pytest.raises(InvalidArgument, match=words):
            await first_answer_of_decode(pair.decode.address, *requests)
        await pair.check_idle()
    assert await first_answer_of_decode(pair.decode.address, start, stop) is grpc.aio.EOF


METHODS = (
    "PrefillService/Prefill",
    "DecodeService/Decode",
    "ShipService/Ship",
    "WorkerService/Watch",
    "WorkerService/Nothing",
    "NoService/Prefill",
)


@ONCE
@pytest.mark.processes
async def test_bytes_that_are_no_message_or_too_many_fail_their_call_alone(tmp_path: Path) -> None:
    """R012, R132: whatever is sent to whichever method, the processes live on and a request beside it is right."""
    rng, prompts = random.Random(0), Prompts(ScriptConfig())
    config = scripted_config(scripted_folder(tmp_path / "model"), num_blocks=128)
    async with (
        worker_process(tmp_path, config, "prefill_svc") as prefill,
        worker_process(tmp_path, config, "decode_svc") as decode,
    ):
        spec = make_spec("beside", prompts.draw(), 200)
        beside = PairRequest(prefill.address, decode.address, spec, timeout_s=20.0)
        for worker, method in zip([prefill, decode, decode, prefill], METHODS, strict=False):
            too_many = await status_of(worker.address, method, bytes(5 << 20), timeout_s=5.0)
            assert too_many is grpc.StatusCode.RESOURCE_EXHAUSTED
        outcomes = {
            await status_of(rng.choice([prefill, decode]).address, rng.choice(METHODS), spoilt(rng), timeout_s=0.02)
            for _ in range(400)
        }
        assert {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED} <= outcomes
        await beside.finished()
        assert prompts.is_right(beside)
        for worker in (prefill, decode):
            assert worker.process.poll() is None
            async with watching(worker.address) as figures:
                await until(lambda figures=figures: figures.is_idle)  # type: ignore[misc]


def spoilt(rng: random.Random) -> bytes:
    """A message for one of the methods, with some bytes changed."""
    messages = (
        prefill_request(valid_spec()),
        worker_pb2.DecodeRequest(start=worker_pb2.DecodeStart(sequence=changed(), progress_timeout_s=5.0)),
        worker_pb2.WatchRequest(progress_timeout_s=1.0),
    )
    payload = bytearray(rng.choice(messages).SerializeToString())
    for _ in range(rng.randrange(1, 6)):
        payload[rng.randrange(len(payload))] = rng.randrange(256)
    return bytes(payload)


async def status_of(address: str, method: str, payload: bytes, *, timeout_s: float) -> grpc.StatusCode:
    """Sends these bytes to a method of a worker and gives the call some time to end by itself."""
    async with RpcChannel(address) as channel:
        send: Any = channel.grpc.stream_stream(f"/kvferry.v1.{method}")
        call = send(iter([payload]), timeout=timeout_s)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        code: grpc.StatusCode = await call.code()
        return code


async def test_messages_of_many_sizes_around_the_limit(pair: Pair) -> None:
    """R099: above it refused before any work, and the same channel serves on."""
    async with RpcChannel(pair.prefill.address) as channel:
        stub = worker_pb2_grpc.PrefillServiceStub(channel.grpc)
        for num_tokens in (1_000_000, 2_000_000, 2_200_000, 4_000_000):
            request = worker_pb2.PrefillRequest(
                sequence=changed(token_ids=[1000] * num_tokens, num_prompt_tokens=num_tokens), progress_timeout_s=5.0
            )
            with pytest.raises(ResourceExhausted if request.ByteSize() > 4 << 20 else InvalidArgument):
                async with channel.stream(stub.Prefill, request) as call:
                    async for _ in call:
                        pass
        assert core_of(pair.prefill).stats().num_prefill_tokens == 0


# -- beside the work, and after it ------------------------------------------------------------------------------------


async def test_health_is_answered_while_long_prompts_are_shipped(tmp_path: Path) -> None:
    """R092, R150."""
    engine = {"num_blocks": 4096, "max_chunk_tokens": 512}
    async with scripted_pair(tmp_path / "model", prefill=engine, decode=engine) as pair:
        async with RpcChannel(pair.decode.address) as channel:
            health = health_pb2_grpc.HealthStub(channel.grpc)
            requests = [pair.begin(pair.prompts.draw(4000), 5) for _ in range(4)]
            done = asyncio.gather(*(request.finished() for request in requests))
            num_answers = 0
            while not done.done():
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                num_answers += 1
            await done
            assert all(pair.prompts.is_right(request) for request in requests) and num_answers >= 5
        await pair.check_idle()


@pytest.mark.parametrize("num_requests", [50, pytest.param(600, marks=pytest.mark.soak)])
async def test_many_requests_leave_nothing_behind(tmp_path: Path, num_requests: int) -> None:
    """R117: no task, no mailbox, no sequence, no entry of any table, and no memory, after each of three times as many
    requests."""
    config = scripted_config(scripted_folder(tmp_path / "model"), num_blocks=64)
    async with running_pair(config) as (prefill, decode, caller):
        await many_requests(caller, 0, num_requests)
        await assert_idle(prefill, decode)
        growth_bytes = []
        for first in (num_requests, 2 * num_requests, 3 * num_requests):
            before = Residue.of(prefill, decode)
            await many_requests(caller, first, num_requests)
            await assert_idle(prefill, decode)
            await until(lambda before=before: Residue.of(prefill, decode).is_within(before))  # type: ignore[misc]
            growth_bytes.append(Residue.of(prefill, decode).rss_bytes - before.rss_bytes)
        assert min(growth_bytes) < 1 << 20, growth_bytes  # a leak grows every time, the allocator now and then


@dataclass(frozen=True)
class Residue:
    """What two workers in this process hold.

    Attributes:
        counts: entries by table.
        rss_bytes: memory of the process.
    """

    counts: dict[str, int]
    rss_bytes: int

    def is_within(self, other: Residue) -> bool:
        """Whether no table holds more than it did then."""
        return all(count <= other.counts[name] for name, count in self.counts.items())

    @classmethod
    def of(cls, prefill: RunningWorker, decode: RunningWorker) -> Residue:
        gc.collect()
        roles: Any = (prefill.role, decode.role)
        counts = {
            "tasks": len(asyncio.all_tasks()),
            "sequences": sum(len(role.core.sequences) for role in roles),
            "attempts": decode.role.servicer.num_attempts,  # type: ignore[attr-defined]
            "grants": decode.role.admission.num_waiting,  # type: ignore[attr-defined]
            "commits": len(decode.role.admission._committed),  # type: ignore[attr-defined]
            "registered": len(decode.role.admission._registered),  # type: ignore[attr-defined]
            "prefills": len(prefill.role.servicer._running),  # type: ignore[attr-defined]
            "mailboxes": len(prefill.role.servicer.mailboxes) + len(decode.role.servicer._mailboxes),  # type: ignore[attr-defined]
            "channels": len(prefill.role.servicer.peers._peers),  # type: ignore[attr-defined]
            "calls": sum(len(worker.server._calls._methods) for worker in (prefill, decode)),
            "bypasses": sum(len(role.core.scheduler.waiting._num_bypasses) for role in roles),
        }
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(counts, pages * resource.getpagesize())


async def many_requests(caller: PairCaller, first: int, num_requests: int) -> None:
    """Eight at a time, of two tokens each."""

    async def client(numbers: range) -> None:
        for number in numbers:
            prompt = [number % 1024, number // 1024, 7, 8, 9]
            result: PairResult = await caller.generate(make_spec(f"r{number}", prompt, 2))
            assert result.token_ids == reference_continuation(prompt, 2)

    await asyncio.gather(*(client(range(first + lane, first + num_requests, 8)) for lane in range(8)))
