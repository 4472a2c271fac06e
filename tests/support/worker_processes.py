"""Workers as real processes, ended by their process id whatever happens, and a watcher of their figures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.config import Config, child_environment, to_toml
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
ROOT = Path(__file__).parents[2]
WATCH_TIMEOUT_S = 0.15
"""Progress timeout of a watcher; a status comes three times as often."""


@dataclass(slots=True)
class WorkerProcess:
    """A worker that serves.

    Attributes:
        address: host:port.
        log: what it wrote to standard error.
    """

    process: asyncio.subprocess.Process
    address: str
    log: Path

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        os.kill(self.process.pid, number)

    async def exit_code(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Waits for its end; negative for a signal."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


@asynccontextmanager
async def worker_process(
    folder: Path, config: Config, *module: str, listen: str = "127.0.0.1:0"
) -> AsyncIterator[WorkerProcess]:
    """`python -m *module`, ready; killed at the end of the block if it still lives. `folder` takes its files."""
    name = f"{module[0]}-{len(list(folder.glob('*.log')))}"
    log = folder / f"{name}.log"
    process = await start(folder / f"{name}.toml", config, log, *module, "--listen", listen, "--worker-id", name)
    try:
        yield WorkerProcess(process, await _address(process, log), log)
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()


async def start(config_file: Path, config: Config, log: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Starts `python -m …` with this configuration; the caller ends it."""
    config_file.write_text(to_toml(config))
    module, *rest = arguments
    extra = rest[: rest.index("--listen")] if "--listen" in rest else []
    command = [sys.executable, "-m", module, *extra, "--config", str(config_file), *rest[len(extra) :]]
    with log.open("wb") as stderr:
        return await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=child_environment(1), stdout=asyncio.subprocess.PIPE, stderr=stderr
        )


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        line = await process.stdout.readline()
    assert line, f"the worker ended before it was ready: {log.read_text()}"
    address: str = json.loads(line)["address"]
    return address


class Watch:
    """A worker's statuses, as a router sees them."""

    def __init__(self) -> None:
        self.status = worker_pb2.WatchResponse()
        self.num_statuses = 0

    @property
    def load(self) -> worker_pb2.WorkerLoad:
        return self.status.load

    @property
    def is_idle(self) -> bool:
        """Whether no block is held and nothing runs or waits."""
        load = self.load
        return self.num_statuses > 0 and not (load.num_used_blocks or load.num_running or load.num_waiting)

    async def follow(self, channel: RpcChannel) -> None:
        """Takes statuses until the stream ends."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel.grpc)
        request = worker_pb2.WatchRequest(progress_timeout_s=WATCH_TIMEOUT_S)
        async with channel.stream(stub.Watch, request) as call:
            async for self.status in call:
                self.num_statuses += 1


@asynccontextmanager
async def watching(address: str) -> AsyncIterator[Watch]:
    """Follows a worker for the length of the block, or until the worker ends."""
    watch = Watch()
    async with RpcChannel(address) as channel:
        task = asyncio.ensure_future(watch.follow(channel))
        try:
            yield watch
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
