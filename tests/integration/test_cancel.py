"""Cancelling in every phase of a request, by everyone who can: every block comes back, on both sides, and nothing else changes.

The phases are reached by what the workers show of themselves: a full batch, blocks that are taken, a block whose
departure is delayed (`kvtransfer.faults`), steps that take time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.scripted import ScriptConfig, reference_continuation
from kvferry.errors import NotFound, Unavailable
from kvferry.rpc import RpcChannel
from kvferry.worker_process import RunningWorker
from kvtransfer.faults import NO_FAULTS, Fault, FaultKind, Faults
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.workers import (
    assert_idle,
    core_of,
    make_spec,
    running_pair,
    scripted_config,
    scripted_folder,
    until,
)

TIMES = 50
PROMPT_TOKENS = 22  # five full blocks of four and a partial one
FULL_BLOCKS = PROMPT_TOKENS // 4
OUTPUT_TOKENS = 12
FOR_EVER_S = 60.0
"""A delay that only the end of the call cuts short."""
SHORT_DELAY_S = 0.1
"""A delay after which the sender finds out by itself that nobody is there any more."""

_numbers = itertools.count()


def random_prompt(rng: random.Random, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return [rng.randrange(1024) for _ in range(num_tokens)]


class Pair:
    """A pair of workers and what the tests here do with it."""

    def __init__(self, prefill: RunningWorker, decode: RunningWorker, script: ScriptConfig, seed: int = 0) -> None:
        self.prefill, self.decode = prefill, decode
        self.rng = random.Random(seed)
        self._script = script

    def begin(self, prompt: list[int] | None = None, max_tokens: int = OUTPUT_TOKENS, **kind: Any) -> PairRequest:
        """A request with a prompt of its own, so that no cache shortens its way."""
        spec = make_spec(f"r{next(_numbers)}", prompt or random_prompt(self.rng), max_tokens)
        return PairRequest(self.prefill.address, self.decode.address, spec, **kind)

    def is_right(self, request: PairRequest) -> bool:
        expected = reference_continuation(request.spec.token_ids, request.spec.sampling.max_tokens, self._script)
        return request.result.token_ids == expected

    async def check_serves(self, prompt: list[int] | None = None) -> None:
        """LIVE: a canary gets the right tokens."""
        canary = self.begin(prompt)
        await canary.finished()
        assert self.is_right(canary)

    def delay_block(self, block_index: int, delay_s: float) -> None:
        """From the next shipment on this block leaves late."""
        self.set_faults(Faults((Fault(FaultKind.DELAY, block_index, delay_s=delay_s),)))

    def set_faults(self, faults: Faults) -> None:
        servicer = self.prefill.role.servicer  # type: ignore[attr-defined]
        servicer.options = dataclasses.replace(servicer.options, faults=faults)

    @property
    def num_arrived_blocks(self) -> int:
        return self.decode.role.load().num_blocks_shipped

    def num_used_blocks(self, worker: RunningWorker) -> int:
        return worker.role.load().num_used_blocks


@asynccontextmanager
async def pair_of(
    tmp_path: Path, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **script: Any
) -> AsyncIterator[Pair]:
    folder = scripted_folder(tmp_path / "model", **script)
    prefill_config = scripted_config(folder, **{"max_chunk_tokens": 4, **(prefill or {})})
    async with running_pair(prefill_config, scripted_config(folder, **(decode or {}))) as (prefill_worker, decoder, _):
        yield Pair(prefill_worker, decoder, ScriptConfig(**script))


async def end_in_every_way(pair: Pair, reach: Callable[[Pair, Ending], Awaitable[PairRequest]]) -> None:
    """`reach` brings a request into the phase; it is ended there, again and again, in turn by everyone who can."""
    for ending in itertools.islice(itertools.cycle(Ending), TIMES):
        request = await reach(pair, ending)
        await request.end(ending)
        await settle(pair, request, ending)
        await request.end(Ending.CHANNELS)
        pair.set_faults(NO_FAULTS)
    await pair.check_serves()
    await assert_idle(pair.prefill, pair.decode)


async def settle(pair: Pair, request: PairRequest, ending: Ending) -> None:
    """The worker whose call still lives frees what the other's end made useless."""
    if ending is Ending.DECODE and not request.prefill.done():
        assert isinstance(await failure_of(request.prefill), NotFound | Unavailable)
    if ending is Ending.PREFILL:
        if request.result.committed is not None:  # prefill's part was over: nothing is lost
            await asyncio.wait([request.decode])
            assert pair.is_right(request)
        else:
            await until(lambda: pair.num_used_blocks(pair.decode) == 0)
            assert not request.decode.done()


async def test_in_the_queue_of_prefill(tmp_path: Path) -> None:
    async with pair_of(tmp_path, prefill={"max_running": 1, "num_blocks": 1024}, step_delay_s=0.002) as pair:
        core = core_of(pair.prefill)

        async def reach(pair: Pair, ending: Ending) -> PairRequest:
            request = pair.begin()
            await until(lambda: len(core.scheduler.waiting) == 1)
            return request

        async with computing_a_long_prompt(pair):
            for ending in itertools.islice(itertools.cycle([Ending.PREFILL, Ending.BOTH, Ending.CHANNELS]), TIMES):
                request = await reach(pair, ending)
                await request.end(ending)
                await request.end(Ending.CHANNELS)
                await until(lambda: len(core.scheduler.waiting) == 0)
        await pair.check_serves()
        await assert_idle(pair.prefill, pair.decode)


@asynccontextmanager
async def computing_a_long_prompt(pair: Pair) -> AsyncIterator[None]:
    """The batch of prefill, which takes one, is taken."""
    spec = make_spec("long", random_prompt(pair.rng, 4000), 1)
    async with RpcChannel(pair.prefill.address) as channel:
        stub = worker_pb2_grpc.PrefillServiceStub(channel.grpc)
        from kvferry.wire import spec_to_pb

        request = worker_pb2.PrefillRequest(sequence=spec_to_pb(spec), progress_timeout_s=5.0)
        async with channel.stream(stub.Prefill, request) as call:
            await until(lambda: len(core_of(pair.prefill).scheduler.running) == 1)
            yield
            assert not call.done()


async def test_between_the_chunks_of_a_prompt(tmp_path: Path) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        request = pair.begin()
        sequences, seq_id = core_of(pair.prefill).sequences, request.spec.id.seq_id
        await until(lambda: seq_id in sequences and sequences[seq_id].num_computed_tokens >= 8)
        assert sequences[seq_id].num_computed_tokens < PROMPT_TOKENS
        return request

    async with pair_of(tmp_path, step_delay_s=0.01) as pair:
        await end_in_every_way(pair, reach)


async def test_while_a_grant_waits_for_room(tmp_path: Path) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        request = pair.begin()
        await until(lambda: pair.decode.role.admission.num_waiting == 1)  # type: ignore[attr-defined]
        return request

    async with pair_of(tmp_path, decode={"num_blocks": 16}) as pair:
        engine = pair.decode.role.engine  # type: ignore[attr-defined]
        taken = await engine.run(lambda core: core.pool.allocate(12))
        for ending in itertools.islice(itertools.cycle(Ending), TIMES):
            request = await reach(pair, ending)
            await request.end(ending)
            if ending is Ending.DECODE:
                assert isinstance(await failure_of(request.prefill), NotFound | Unavailable)
            await until(lambda: pair.decode.role.admission.num_waiting == 0)  # type: ignore[attr-defined]
            assert pair.num_used_blocks(pair.decode) == 12
            await request.end(Ending.CHANNELS)
        await engine.run(lambda core: core.pool.free(taken))
        await pair.check_serves()
        await assert_idle(pair.prefill, pair.decode)


async def test_in_mid_shipment(tmp_path: Path) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        pair.delay_block(3, SHORT_DELAY_S if ending is Ending.DECODE else FOR_EVER_S)
        num_arrived = pair.num_arrived_blocks
        request = pair.begin()
        await until(lambda: pair.num_arrived_blocks == num_arrived + 3)
        return request

    async with pair_of(tmp_path) as pair:
        await end_in_every_way(pair, reach)


async def test_between_first_token_and_committed(tmp_path: Path) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        pair.delay_block(FULL_BLOCKS, SHORT_DELAY_S if ending is Ending.DECODE else FOR_EVER_S)
        num_arrived = pair.num_arrived_blocks
        request = pair.begin()
        await until(lambda: pair.num_arrived_blocks == num_arrived + FULL_BLOCKS)
        await until(lambda: request.result.first_token is not None)
        assert request.result.committed is None
        return request

    async with pair_of(tmp_path) as pair:
        await end_in_every_way(pair, reach)


async def test_while_decode_runs(tmp_path: Path) -> None:
    async def reach(pair: Pair, ending: Ending) -> PairRequest:
        request = pair.begin()
        await until(lambda: len(request.result.token_ids) >= 3)
        assert request.result.finish is None
        return request

    async with pair_of(tmp_path, step_delay_s=0.005) as pair:
        await end_in_every_way(pair, reach)
