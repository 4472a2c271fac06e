"""Cancelling in every phase of a request, by everyone who can: all blocks come back and nothing else changes.

Phases are reached by what the workers show of themselves: a full batch, blocks that are taken, a block that leaves late
(`kvtransfer.faults`), steps that take time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import FailedPrecondition, NotFound, Unavailable
from kvferry.rpc import RpcChannel
from kvferry.wire import spec_to_pb
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.conftest import ONCE
from tests.support.pair import FULL_BLOCKS, OUTPUT_TOKENS, PROMPT_TOKENS, Pair, scripted_pair
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.workers import core_of, make_spec, until

FOR_EVER_S = 60.0
"""A delay that only the end of the call cuts short."""
SHORT_DELAY_S = 0.1
"""A delay after which the sender finds out by itself that nobody is there any more."""

Reach = Callable[[Pair, Ending], Awaitable[PairRequest]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture(params=[20, pytest.param(50, marks=pytest.mark.soak)])
def times(request: pytest.FixtureRequest) -> int:
    """How often a request is ended in a phase."""
    number: int = request.param
    return number


def endings(times: int) -> Iterator[Ending]:
    """Everyone who can end a request, in turn."""
    return itertools.islice(itertools.cycle(Ending), times)


async def end_in_every_way(pair: Pair, reach: Reach, times: int) -> None:
    """`reach` brings a request into the phase; it is ended there, again and again."""
    for ending in endings(times):
        request = await reach(pair, ending)
        await request.end(ending)
        await check_other_side(pair, request, ending)
        await request.end(Ending.CHANNELS)
        pair.set_faults()
    await pair.check_serves()
    await pair.check_idle()


async def check_other_side(pair: Pair, request: PairRequest, ending: Ending) -> None:
    """A worker whose own call lives on frees what the end of the other call made useless."""
    if ending is Ending.DECODE and not request.prefill.done():
        assert isinstance(await failure_of(request.prefill), NotFound | Unavailable)
    if ending is Ending.PREFILL and request.result.committed is None:
        await until(lambda: pair.num_used_blocks(pair.decode) == 0 and pair.num_waiting_grants == 0)
        assert not request.decode.done()
    elif ending is Ending.PREFILL:  # its part was over: nothing is lost
        await asyncio.wait([request.decode])
        assert pair.prompts.is_right(request)


@ONCE
async def test_in_the_queue_of_prefill(folder: Path, times: int) -> None:
    async with scripted_pair(folder, prefill={"max_running": 1, "num_blocks": 1024}, step_delay_s=0.002) as pair:
        waiting = core_of(pair.prefill).scheduler.waiting
        async with a_long_prompt(pair):
            for ending in endings(times):
                request = pair.begin()
                await until(lambda: len(waiting) == 1)
                await request.end(ending)
                assert request.prefill.done() == (ending is not Ending.DECODE)
                await request.end(Ending.CHANNELS)
                await until(lambda: len(waiting) == 0)
                assert pair.num_used_blocks(pair.decode) == 0
        await pair.check_serves()
        await pair.check_idle()


@asynccontextmanager
async def a_long_prompt(pair: Pair) -> AsyncIterator[None]:
    """Prefill is computing it for the length of the block, chunk by chunk."""
    spec = make_spec("long", pair.prompts.draw(4000), 1)
    request = worker_pb2.PrefillRequest(sequence=spec_to_pb(spec), progress_timeout_s=5.0)
    async with (
        RpcChannel(pair.prefill.address) as channel,
        channel.stream(worker_pb2_grpc.PrefillServiceStub(channel.grpc).Prefill, request) as call,
    ):
        await until(lambda: len(core_of(pair.prefill).scheduler.running) == 1)
        yield
        assert not call.done()


async def test_between_two_chunks(folder: Path, times: int) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        request = pair.begin(pair.prompts.draw(200))
        await pair.has_computed(request, 8)
        assert request.result.first_token is None
        return request

    async with scripted_pair(folder, step_delay_s=0.005) as pair:
        await end_in_every_way(pair, reach, times)


async def test_while_a_grant_waits_for_room(folder: Path, times: int) -> None:
    async with scripted_pair(folder, decode={"num_blocks": 16}) as pair:
        engine = pair.decode.role.engine  # type: ignore[attr-defined]
        taken = await engine.run(lambda core: core.pool.allocate(12))
        for ending in endings(times):
            request = pair.begin()
            await until(lambda: pair.num_waiting_grants == 1)
            await request.end(ending)
            if ending is Ending.DECODE:
                assert isinstance(await failure_of(request.prefill), Unavailable)
            await until(lambda: pair.num_waiting_grants == 0)
            assert pair.num_used_blocks(pair.decode) == 12
            await request.end(Ending.CHANNELS)
        await engine.run(lambda core: core.pool.free(taken))
        await pair.check_serves()
        await pair.check_idle()


async def test_in_mid_shipment(folder: Path, times: int) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        pair.delay_block(3, SHORT_DELAY_S if ending is Ending.DECODE else FOR_EVER_S)
        num_arrived = pair.num_arrived_blocks
        request = pair.begin()
        await until(lambda: pair.num_arrived_blocks == num_arrived + 3)
        return request

    async with scripted_pair(folder) as pair:
        await end_in_every_way(pair, reach, times)


async def test_between_first_token_and_committed(folder: Path, times: int) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        pair.delay_block(FULL_BLOCKS, SHORT_DELAY_S if ending is Ending.DECODE else FOR_EVER_S)
        num_arrived = pair.num_arrived_blocks
        request = pair.begin()
        await until(lambda: pair.num_arrived_blocks == num_arrived + FULL_BLOCKS)
        await until(lambda: request.result.first_token is not None)
        assert request.result.committed is None
        return request

    async with scripted_pair(folder) as pair:
        await end_in_every_way(pair, reach, times)


async def test_while_decode_runs(folder: Path, times: int) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        request = pair.begin(max_tokens=40)
        await request.has_tokens(3)
        assert request.result.finish is None
        return request

    async with scripted_pair(folder, step_delay_s=0.003) as pair:
        await end_in_every_way(pair, reach, times)


async def test_at_the_very_last_token_and_twice(folder: Path, times: int) -> None:
    """A cancel that races the end, and one of what is over, are no-ops."""
    async with scripted_pair(folder, step_delay_s=0.001) as pair:
        for number in range(times):
            request = pair.begin()
            await request.has_tokens(OUTPUT_TOKENS - number % 2)
            for ending in (Ending.BOTH, Ending.BOTH, Ending.CHANNELS, Ending.CHANNELS):
                await request.end(ending)
            if request.result.finish is not None:
                assert pair.prompts.is_right(request)
        await pair.check_serves()
        await pair.check_idle()


@ONCE
async def test_a_stop_ends_the_stream_well_before_the_commit_and_after_it(folder: Path, times: int) -> None:
    """A stop string was complete: decode ends the sequence, and the stream with status OK, once or twice told."""
    async with scripted_pair(folder, step_delay_s=0.002) as pair, RpcChannel(pair.decode.address) as channel:
        stub = worker_pb2_grpc.DecodeServiceStub(channel.grpc)
        for number in range(times):
            spec = make_spec(pair.prompts.next_id(), pair.prompts.draw(), OUTPUT_TOKENS)
            num_messages = number % 5  # one of them and it is registered, more and it runs
            start = worker_pb2.DecodeStart(
                sequence=spec_to_pb(spec), local_prefill=num_messages > 1, progress_timeout_s=5.0
            )
            async with channel.duplex(stub.Decode) as call:
                await call.write(worker_pb2.DecodeRequest(start=start))
                for _ in range(num_messages):
                    await call.read()
                await stop_twice(call)
                assert await call.code() is grpc.StatusCode.OK
        await pair.check_serves()
        await pair.check_idle()


async def stop_twice(call: Any) -> None:
    """The second one may meet the end of the call; then it waits for the status, which comes when all is read."""

    async def read_to_end() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    reading = asyncio.ensure_future(read_to_end())
    for _ in range(2):
        with suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
            await call.write(worker_pb2.DecodeRequest(stop=worker_pb2.DecodeStop(num_wanted_tokens=1)))
    await reading


async def test_fresh_requests_right_after_a_cancel_get_their_own_tokens(folder: Path) -> None:
    """R052: the blocks of the cancelled ones go to the fresh ones, in pools that hold little more than one round."""
    async with scripted_pair(folder, prefill={"num_blocks": 40}, decode={"num_blocks": 52}, step_delay_s=0.001) as pair:
        for number, ending in zip(range(12), itertools.cycle(Ending), strict=False):
            dropped = [pair.begin() for _ in range(5)]
            await asyncio.gather(*(one.has_tokens(3) for one in dropped))
            await asyncio.gather(*(one.end(ending) for one in dropped))
            fresh = [pair.begin() for _ in range(5)]
            await asyncio.gather(*(one.finished() for one in fresh))
            assert all(pair.prompts.is_right(one) for one in fresh), number
            await asyncio.gather(*(one.end(Ending.CHANNELS) for one in dropped))
        await pair.check_idle()


async def test_a_cancel_between_chunks_leaves_no_poisoned_prefix(folder: Path) -> None:
    """R051: only blocks that are wholly computed, or wholly arrived, may be hit."""
    async with scripted_pair(folder, step_delay_s=0.002) as pair:
        for num_computed in range(1, PROMPT_TOKENS, 4):
            prompt = pair.prompts.draw()
            dropped = pair.begin(prompt)
            await pair.has_computed(dropped, num_computed)
            await dropped.end(Ending.BOTH)
            for _ in range(5):
                await pair.check_serves(prompt)
            await dropped.end(Ending.CHANNELS)
        await pair.check_idle()


async def test_random_cancels_under_load_change_nobodys_tokens(folder: Path) -> None:
    """R007, R045: sixteen at once through small pools, half of them with a shared beginning, a third cancelled."""
    num_right = num_ended = 0

    async def client(pair: Pair, number: int) -> None:
        nonlocal num_right, num_ended
        rng = random.Random(number)
        for turn in range(12):
            prompt = shared[: rng.randrange(4, 16)] + pair.prompts.draw(8) if rng.random() < 0.5 else None
            request = pair.begin(prompt)
            if rng.random() < 0.33:
                num_outputs = rng.randrange(6)  # 0: at once
                with suppress(asyncio.CancelledError):
                    await request.has_tokens(num_outputs)
                await request.end(rng.choice(list(Ending)))
                num_ended += 1
                await request.end(Ending.CHANNELS)
            else:
                await request.finished()
                assert pair.prompts.is_right(request), (number, turn)
                num_right += 1

    async with scripted_pair(folder, prefill={"num_blocks": 40}, decode={"num_blocks": 40}, step_delay_s=0.001) as pair:
        shared = pair.prompts.draw(16)
        await asyncio.gather(*(client(pair, number) for number in range(16)))
        assert num_right > 100 and num_ended > 30
        assert core_of(pair.decode).stats().num_preemptions > 0
        await pair.check_serves()
        await pair.check_idle()


async def test_the_name_of_a_cancelled_attempt_used_again_gets_none_of_its_tokens(folder: Path, times: int) -> None:
    """R130: refused until the engine has let go of it, and right from then on."""
    async with scripted_pair(folder, step_delay_s=0.002) as pair:
        for ending in itertools.islice(itertools.cycle([Ending.BOTH, Ending.CHANNELS]), times // 2):
            first = pair.begin(max_tokens=40, request_id="same")
            await first.has_tokens(2)
            await first.end(ending)
            await serve_once_it_may(pair)
            await first.end(Ending.CHANNELS)
        await pair.check_idle()


async def serve_once_it_may(pair: Pair) -> None:
    """The same name with another prompt."""
    prompt = pair.prompts.draw()
    while True:
        try:
            await pair.check_serves(prompt, request_id="same")
        except FailedPrecondition:  # still known
            continue
        return
