"""`kvferry up` over real workers of a scripted model: stuck ones are started again, busy ones are left alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client import AsyncClient, GenerateOptions
from kvferry.errors import KvferryError
from kvferry.rpc import Liveness, RpcChannel, ask_liveness
from tests.support.deployment import chat_folder
from tests.support.forks import ROOT
from tests.support.workers import PairCaller, make_spec, running_worker, scripted_config, scripted_folder, until

TOKEN_DELAY_S = 0.1
"""A step takes this long for each of its tokens: a short prompt is quick, a long one in one chunk gets stuck."""
MAX_STEP_S = 3.0
LONG_PROMPT = list(range(40, 240))
SHORT_PROMPT = [20, 21, 22, 23]
TIMEOUT_S = 90.0

SETTINGS = {
    "engine.block_size": 4,
    "engine.num_blocks": 128,
    "engine.preemption": "recompute",
    "engine.max_step_s": MAX_STEP_S,
    "transfer.progress_timeout_s": 2.0,
    "supervisor.probe_period_s": 0.25,
    "supervisor.probe_timeout_s": 5.0,
    "telemetry.log_format": "json",
}


@dataclass(frozen=True, slots=True)
class Up:
    """A running `kvferry up`."""

    ready: dict[str, Any]
    log: Path
    client: AsyncClient

    def crashes(self) -> list[dict[str, Any]]:
        """Its events of crashed workers."""
        events = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [event for event in events if event["event"] == "worker_crashed"]

    def pid(self, name: str) -> int:
        """The process id a worker had at first."""
        return next(int(worker["pid"]) for worker in self.ready["workers"] if worker["id"] == name)

    async def serves_again(self, *gone: int) -> None:
        """Returns when every worker is ready and none has one of these process ids, and a request is answered."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                workers = await self.client.workers()
                if all(worker.state == "ready" and worker.pid not in gone for worker in workers):
                    break
                await asyncio.sleep(0.1)  # another process's state; there is nothing to wait on
        await self.client.complete(options_of(SHORT_PROMPT), timeout_s=TIMEOUT_S)


def options_of(prompt: list[int]) -> GenerateOptions:
    return GenerateOptions(prompt=prompt, max_tokens=3, temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def running_up(folder: Path) -> AsyncIterator[Up]:
    model = chat_folder(folder / "model", token_delay_s=TOKEN_DELAY_S)
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    listen = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "kvferry.cli.app", "up", "--model", str(model), "--ready-json", *listen, *settings]
    log = folder / "up.log"
    with _started(command, log) as up:
        assert up.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = await asyncio.to_thread(up.stdout.readline)
        assert line, log.read_text()
        ready = json.loads(line)
        async with AsyncClient(ready["grpc"]) as client:
            yield Up(ready, log, client)
        up.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(up.wait, TIMEOUT_S) == 0


@contextmanager
def _started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Killed at the end of the block if it still lives; its children end with it."""
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.processes
async def test_workers_that_crash_hang_or_stop_are_reported_and_started_again(tmp_path: Path) -> None:
    async with running_up(tmp_path) as up:
        await up.serves_again()
        killed = up.pid("decode-0")
        os.kill(killed, signal.SIGKILL)
        await up.serves_again(killed)
        (crash,) = up.crashes()
        assert (crash["child"], crash["pid"], crash["exit"], crash["stuck"]) == ("decode-0", killed, "SIGKILL", "")
        assert crash["uptime_s"] > 0 and any('"serving"' in line for line in crash["stderr"])
        steps = crash["last_steps"]
        assert steps and all(step["duration_s"] > 0 and step["num_sequences"] == 1 for step in steps)
        assert Path(crash["steps_file"]).exists()

        hung = up.pid("prefill-0")
        call = asyncio.ensure_future(up.client.complete(options_of(LONG_PROMPT)))
        await until(lambda: len(up.crashes()) == 2, TIMEOUT_S)
        call.cancel()
        with suppress(asyncio.CancelledError, KvferryError):
            await call
        crash = up.crashes()[-1]
        assert (crash["child"], crash["pid"], crash["exit"]) == ("prefill-0", hung, "SIGKILL")
        assert crash["stuck"] == "it says that it makes no progress"
        last = crash["last_steps"][-1]
        assert (last["duration_s"], last["num_sequences"], last["num_tokens"]) == (None, 1, len(LONG_PROMPT))
        assert any("scripted.py" in line for line in crash["stderr"]), "where it hangs is missing"
        await up.serves_again(killed, hung)

        stopped = next(worker.pid for worker in await up.client.workers() if worker.id == "decode-0")
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: len(up.crashes()) == 3, TIMEOUT_S)
        crash = up.crashes()[-1]
        assert (crash["child"], crash["pid"], crash["stuck"]) == ("decode-0", stopped, "it answered nothing for 5 s")
        await up.serves_again(killed, hung, stopped)
    assert "Traceback" not in up.log.read_text()


async def status_of(channel: RpcChannel, service: str = "") -> int:
    """What the health service says of the worker as a target of requests."""
    answer = await health_pb2_grpc.HealthStub(channel.grpc).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


@pytest.mark.parametrize("max_chunk_tokens", [4, None], ids=["many short steps", "one long step"])
async def test_a_busy_worker_is_serving_and_a_stuck_one_is_not(tmp_path: Path, max_chunk_tokens: int | None) -> None:
    """R150: the same work, in many steps or in one that takes longer than a step may."""
    config = scripted_config(
        scripted_folder(tmp_path / "model", token_delay_s=0.01), max_chunk_tokens=max_chunk_tokens, max_step_s=0.5
    )
    is_stuck = max_chunk_tokens is None
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    answers: set[tuple[Liveness, int]] = set()
    async with (
        running_worker("decode", config) as worker,
        RpcChannel(worker.address) as channel,
        PairCaller(channel, channel).open_decode() as call,
    ):
        spec = make_spec("busy", list(range(200)), 2)
        registering = asyncio.ensure_future(PairCaller(channel, channel).register(call, spec, local_prefill=True))
        await until(lambda: worker.role.engine.core.scheduler.has_work)  # type: ignore[attr-defined]
        while worker.role.load().num_sampled_tokens == 0:
            answers.add((await ask_liveness(channel, 1.0), await status_of(channel)))
            await asyncio.sleep(0.01)
        await registering
        if is_stuck:
            assert (Liveness.STUCK, not_serving) in answers
            await until(lambda: worker.role.is_alive())
        else:
            assert answers == {(Liveness.ALIVE, serving)}
