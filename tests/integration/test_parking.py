"""A full decode worker does not fill prefill with prompts that wait for it: they give way and come back with the grant.

Prefill has room for two prompts and a half. The scripted runner's tokens follow from every byte that was shipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.scripted import ScriptConfig
from engine.sequence import SequenceStatus
from kvferry.rpc import RpcChannel
from kvferry.sampling import BeamParams
from kvferry.worker_process import RunningWorker
from tests.support.engines import expected_beams, expected_tokens
from tests.support.pair import PROMPT_TOKENS, Prompts
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.workers import (
    PairCaller,
    PairResult,
    assert_idle,
    core_of,
    make_spec,
    running_worker,
    scripted_config,
    scripted_folder,
    until,
)

BLOCK = 4
PROMPT_BLOCKS = -(-PROMPT_TOKENS // BLOCK)
PREFILL_BLOCKS = 2 * PROMPT_BLOCKS + 3


class Cluster:
    """A prefill worker and two decode workers, of which the first is full until `make_room`."""

    def __init__(self, prefill: RunningWorker, full: RunningWorker, free: RunningWorker, script: ScriptConfig) -> None:
        self.prefill, self.full, self.free = prefill, full, free
        self.prompts = Prompts(script)
        self._taken: list[int] = []

    async def fill(self) -> None:
        engine = self.full.role.engine  # type: ignore[attr-defined]
        self._taken = await engine.run(lambda core: core.pool.allocate(core.pool.num_blocks))

    async def make_room(self) -> None:
        engine, taken = self.full.role.engine, self._taken  # type: ignore[attr-defined]
        await engine.run(lambda core: core.pool.free(taken))

    def begin(self, decode: RunningWorker, num_prompt_tokens: int = PROMPT_TOKENS) -> PairRequest:
        spec = make_spec(self.prompts.next_id(), self.prompts.draw(num_prompt_tokens), 12)
        return PairRequest(self.prefill.address, decode.address, spec)

    async def begin_waiting(self, number: int) -> list[PairRequest]:
        """Requests at the full worker; prefill has told the first token of each."""
        requests = []
        for _ in range(number):
            requests.append(self.begin(self.full))
            await until(lambda: requests[-1].result.first_token is not None)
        return requests

    async def check_one_token(self) -> None:
        """A request of one token involves no decode worker."""
        spec, result = make_spec(self.prompts.next_id(), self.prompts.draw(), 1), PairResult()
        async with RpcChannel(self.prefill.address) as prefill, RpcChannel(self.free.address) as decode:
            await PairCaller(prefill, decode).prefill(spec, None, result)
        assert result.token_ids == self.prompts.continue_(spec.token_ids, 1)

    def statuses(self, requests: Sequence[PairRequest]) -> list[SequenceStatus]:
        sequences = core_of(self.prefill).sequences
        return [sequences[request.spec.id.seq_id].status for request in requests]

    @property
    def num_parked(self) -> int:
        return self.prefill.role.load().num_parked_prompts

    async def finish(self, *requests: PairRequest) -> None:
        """EQ of all."""
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(self.prompts.is_right(request) for request in requests)

    async def check_idle(self) -> None:
        await assert_idle(self.prefill, self.full, self.free)


@asynccontextmanager
async def running_cluster(folder: Path, **script: Any) -> AsyncIterator[Cluster]:
    scripted_folder(folder, **script)
    small = scripted_config(folder, max_chunk_tokens=8, num_blocks=PREFILL_BLOCKS)
    config = scripted_config(folder)
    async with (
        running_worker("prefill", small) as prefill,
        running_worker("decode", config, worker_id="decode-0") as full,
        running_worker("decode", config, worker_id="decode-1") as free,
    ):
        cluster = Cluster(prefill, full, free, ScriptConfig(**script))
        await cluster.fill()
        yield cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path / "model") as cluster:
        yield cluster
        await cluster.finish(cluster.begin(cluster.full), cluster.begin(cluster.free))
        await cluster.check_idle()


async def test_prompts_that_wait_for_a_full_decode_worker_make_room_for_others(cluster: Cluster) -> None:
    """Those for another decode worker and those that need none are served; then all come back, and all is right."""
    waiting = await cluster.begin_waiting(6)
    assert cluster.num_parked == 4
    assert set(cluster.statuses(waiting)) == {SequenceStatus.HELD, SequenceStatus.PARKED}
    for _ in range(3):
        await cluster.finish(cluster.begin(cluster.free))
        await cluster.check_one_token()
    await cluster.finish(*(cluster.begin(cluster.free) for _ in range(4)))
    assert not any(request.prefill.done() or request.decode.done() for request in waiting)
    assert core_of(cluster.full).stats().num_steps == 0
    await cluster.make_room()
    await cluster.finish(*waiting)
    assert 4 <= cluster.num_parked <= 6 + 3 + 4, "each at most once"
    assert cluster.prefill.role.load().num_recomputed_tokens > 0


async def test_choices_and_beams_come_back_too(cluster: Cluster) -> None:
    """Their first tokens, or candidates, were told before and are not sampled again."""
    prompt, beam = cluster.prompts.draw(), BeamParams(3, 1.0, False, 2)
    search = dataclasses.replace(make_spec("search", prompt, 6), beam=beam)
    choices = dataclasses.replace(make_spec("choices", prompt[::-1], 6, temperature=1.0, seed=3), num_choices=3)
    async with RpcChannel(cluster.prefill.address) as prefill, RpcChannel(cluster.full.address) as decode:
        caller = PairCaller(prefill, decode)
        calls = [asyncio.ensure_future(caller.generate(spec)) for spec in (search, choices)]
        await until(lambda: len(core_of(cluster.prefill).scheduler.held) == 2)
        await cluster.finish(cluster.begin(cluster.free, PREFILL_BLOCKS * BLOCK))
        num_sampled = core_of(cluster.prefill).stats().num_sampled_tokens
        sequences = core_of(cluster.prefill).sequences
        await until(lambda: [one.status for one in list(sequences.values())] == [SequenceStatus.PARKED] * 2)
        await cluster.make_room()
        found, sampled = await asyncio.gather(*calls)
    assert [tuple(one.token_ids) for one in found.beams] == [
        one.token_ids for one in expected_beams(prompt, beam, search.sampling)
    ]
    assert sampled.tokens == {number: expected_tokens(prompt[::-1], choices.sampling, number) for number in range(3)}
    assert core_of(cluster.prefill).stats().num_sampled_tokens == num_sampled


@pytest.mark.parametrize("ending", list(Ending))
async def test_requests_that_end_while_they_are_parked_leave_nothing(cluster: Cluster, ending: Ending) -> None:
    waiting = await cluster.begin_waiting(5)
    assert SequenceStatus.PARKED in cluster.statuses(waiting)
    for request in waiting[1:]:
        await request.end(ending)
        await request.end(Ending.CHANNELS)
    await until(lambda: len(core_of(cluster.prefill).sequences) == 1)
    await cluster.make_room()
    await cluster.finish(waiting[0])


async def test_the_end_of_the_decode_worker_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    """Parked or held, they fail as unavailable, and prefill has all its room again."""
    async with running_cluster(tmp_path / "model") as cluster:
        waiting = await cluster.begin_waiting(5)
        await cluster.full.stop()
        for request in waiting:
            await failure_of(request.prefill)
            await request.end(Ending.CHANNELS)
        await cluster.finish(cluster.begin(cluster.free), cluster.begin(cluster.free))
        await assert_idle(cluster.prefill, cluster.free)
