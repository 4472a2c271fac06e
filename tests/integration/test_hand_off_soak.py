"""Workers that are killed or stopped in mid-shipment, over and over: the survivor is as it was when it was idle."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.scripted import ScriptConfig
from kvferry.config import Config
from kvferry.errors import Unavailable
from tests.support.pair import OUTPUT_TOKENS, Prompts
from tests.support.pair_request import Ending, PairRequest
from tests.support.staging import StagingTraces, num_open_files, staging_traces
from tests.support.worker_processes import Watch, WorkerProcess, watching, worker_process
from tests.support.workers import make_spec, scripted_config, scripted_folder, until, until_equal

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

TIMEOUT_S = 1.0
"""Progress timeout of requests and links."""
FREED_IN_S = 20.0
"""A deadline for the machine, not for the product, whose own timeouts are far below."""
NUM_HELD, HELD_BLOCK = 3, 3
"""So many shipments are in the middle, waiting with this block, when the signal comes; others are at full speed."""
LONG_PROMPT = 2_000
SAMPLE_ROUNDS, SOAK_ROUNDS = 2, 25
"""For each of two roles and two signals over shared memory, and over both transports: 8 and 200 in all."""


class Side:
    """A worker process that may be replaced by another one at its address.

    Attributes:
        process: the one that runs now.
        figures: its statuses.
    """

    def __init__(self, folder: Path, config: Config, role: str) -> None:
        self.role = role
        self._folder, self._config = folder, config
        self._stack = AsyncExitStack()
        self.process: WorkerProcess
        self.figures: Watch

    @property
    def pid(self) -> int:
        return self.process.process.pid

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self.process = await self._stack.enter_async_context(
            worker_process(self._folder, self._config, f"{self.role}_svc", listen=listen)
        )
        self.figures = await self._stack.enter_async_context(watching(self.process.address))

    async def close(self) -> None:
        await self._stack.aclose()

    async def restart(self) -> None:
        """Kills it, also where it is stopped, and starts another one."""
        self.process.send(signal.SIGKILL)
        await self.process.exit_code()
        await self.close()
        await self.start(self.process.address)

    async def is_idle(self) -> None:
        """Returns when no block is held and nothing runs or waits, by a status that is newer than this call."""
        num_before = self.figures.num_statuses
        await until(lambda: self.figures.num_statuses > num_before + 1 and self.figures.is_idle, FREED_IN_S)


@dataclass(frozen=True, slots=True)
class Traces:
    """What a process holds of the kernel."""

    num_files: int
    staging: StagingTraces

    @classmethod
    def of(cls, pid: int) -> Traces:
        return cls(num_open_files(pid), staging_traces(pid))


class Rehearsal:
    """Two workers, one of which is the victim, round after round."""

    def __init__(self, victim: Side, survivor: Side, transport: str, seed: int) -> None:
        self.victim, self.survivor = victim, survivor
        self._is_staged = transport == "shm"
        self._dice = random.Random(seed)
        self._prompts = Prompts(ScriptConfig(), seed)
        sides = {side.role: side for side in (victim, survivor)}
        self._prefill, self._decode = sides["prefill"], sides["decode"]

    def begin(self, num_tokens: int, *, attempt: int) -> PairRequest:
        """A request; the first attempt of each is held up at a block."""
        prompt = self._prompts.draw(num_tokens)
        spec = make_spec(self._prompts.next_id(), prompt, OUTPUT_TOKENS, attempt=attempt)
        return PairRequest(self._prefill.process.address, self._decode.process.address, spec, timeout_s=TIMEOUT_S)

    async def check_serves(self) -> None:
        """LIVE and EQ."""
        requests = [self.begin(num_tokens, attempt=2) for num_tokens in (22, 1, 200)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(self._prompts.is_right(request) for request in requests)

    async def serves_again(self) -> None:
        """Returns when a request gets through: a connection that was refused is tried anew after a while."""
        async with asyncio.timeout(FREED_IN_S):
            while True:
                request = self.begin(1, attempt=2)
                with suppress(Unavailable):
                    await request.finished()
                    return

    async def idle_traces(self) -> Traces:
        """What the survivor holds while both live, are linked and have nothing to do."""
        for _ in range(2):  # what is opened once and kept is there after the first
            await self.check_serves()
            await self.survivor.is_idle()
        traces = Traces.of(self.survivor.pid)
        assert (traces.staging.num_mappings > 0) == self._is_staged
        return traces

    async def under_way(self) -> list[PairRequest]:
        """Shipments in the middle."""
        num_before = self._decode.figures.load.num_blocks_shipped
        held = [self.begin(22, attempt=1) for _ in range(NUM_HELD)]
        await until(
            lambda: self._decode.figures.load.num_blocks_shipped >= num_before + NUM_HELD * HELD_BLOCK, FREED_IN_S
        )
        fast = [self.begin(LONG_PROMPT, attempt=2) for _ in range(2)]
        await asyncio.sleep(self._dice.uniform(0.0, 0.06))  # somewhere in them
        return held + fast

    async def check_survivor(self, requests: Sequence[PairRequest]) -> None:
        """It gave back what belonged to the victim, while the calls that remain to it live on."""
        await self.survivor.is_idle()
        await until(lambda: staging_traces(self.survivor.pid) == StagingTraces(), FREED_IN_S)
        for request in requests:
            assert request.result.token_ids == self._right(request)[: len(request.result.token_ids)]
            await request.end(Ending.CHANNELS)

    def _right(self, request: PairRequest) -> list[int]:
        return self._prompts.continue_(request.spec.token_ids, OUTPUT_TOKENS)

    async def check_back_to(self, idle: Traces) -> None:
        """Both serve as before, and the survivor holds what it held then."""
        await self.serves_again()
        await self.check_serves()
        await self.survivor.is_idle()
        await until_equal(lambda: Traces.of(self.survivor.pid), idle, FREED_IN_S)

    async def kill(self) -> None:
        idle, requests = await self.idle_traces(), await self.under_way()
        self.victim.process.send(signal.SIGKILL)
        await self.check_survivor(requests)
        await self.victim.restart()
        await self.check_back_to(idle)

    async def stop(self, *, and_kill: bool) -> None:
        idle, requests = await self.idle_traces(), await self.under_way()
        self.victim.process.send(signal.SIGSTOP)
        await self.check_survivor(requests)
        if and_kill:
            await self.victim.restart()
        else:
            self.victim.process.send(signal.SIGCONT)
            await self.victim.is_idle()
        await self.check_back_to(idle)


def make_config(folder: Path, transport: str) -> Config:
    """Room for the long prompts; the first attempt of each request is held up."""
    config = scripted_config(scripted_folder(folder / "model"), num_blocks=4096, max_chunk_tokens=64)
    hold = {"kind": "delay", "block_index": HELD_BLOCK, "attempt": 1, "delay_s": 600.0}
    config = config.replace("faults", allow_faults=True, shipping=[hold])
    return config.replace("transfer", transport=transport, progress_timeout_s=TIMEOUT_S)


@asynccontextmanager
async def rehearsal(folder: Path, transport: str, victim: str, seed: int) -> AsyncIterator[Rehearsal]:
    config = make_config(folder, transport)
    sides = {role: Side(folder, config, role) for role in ("prefill", "decode")}
    try:
        for side in sides.values():
            await side.start()
        survivor = "decode" if victim == "prefill" else "prefill"
        yield Rehearsal(sides[victim], sides[survivor], transport, seed)
    finally:
        for side in sides.values():
            await side.close()


async def run_rounds(folder: Path, transport: str, victim: str, sign: str, num_rounds: int) -> None:
    async with rehearsal(folder, transport, victim, seed=num_rounds) as one:
        for number in range(num_rounds):
            if sign == "killed":
                await one.kill()
            else:
                await one.stop(and_kill=number % 2 == 1)


@pytest.mark.parametrize("sign", ["killed", "stopped"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["shm"])
async def test_a_worker_is_lost_in_mid_shipment(tmp_path: Path, transport: str, victim: str, sign: str) -> None:
    await run_rounds(tmp_path, transport, victim, sign, SAMPLE_ROUNDS)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("sign", ["killed", "stopped"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_workers_are_lost_in_mid_shipment_over_and_over(
    tmp_path: Path, transport: str, victim: str, sign: str
) -> None:
    await run_rounds(tmp_path, transport, victim, sign, SOAK_ROUNDS)
