"""Workers as real processes, ended by their process id whatever happens, and a watcher of their figures."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.config import Config, child_environment, to_toml
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from tests.support.forks import ForkedProcess, fork_server
from tests.support.workers import until

START_TIMEOUT_S = 60.0
"""Several processes may load torch at once, on a machine that others use too."""
WATCH_TIMEOUT_S = 0.15
"""Progress timeout of a watcher; a status comes three times as often."""


@dataclass(slots=True)
class WorkerProcess:
    """A worker that serves.

    Attributes:
        address: host:port.
        log: what it wrote to standard error.
    """

    process: ForkedProcess
    address: str
    log: Path

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone; nothing where it has ended."""
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        """Waits for its end; negative for a signal."""
        return await exit_code(self.process)


async def exit_code(process: ForkedProcess, timeout_s: float = 10.0) -> int:
    await until(lambda: process.poll() is not None, timeout_s)
    assert process.returncode is not None
    return process.returncode


@asynccontextmanager
async def worker_process(
    folder: Path, config: Config, *module: str, listen: str = "127.0.0.1:0"
) -> AsyncIterator[WorkerProcess]:
    """`python -m *module`, ready, for the length of the block. `folder` takes its files."""
    with started(folder, config, *module, "--listen", listen) as (process, log):
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await asyncio.to_thread(process.stdout.readline)
        assert line, f"the worker ended before it was ready: {log.read_text()}"
        yield WorkerProcess(process, json.loads(line)["address"], log)


@contextmanager
def started(folder: Path, config: Config, *arguments: str) -> Iterator[tuple[ForkedProcess, Path]]:
    """`python -m *arguments --config …` and its log; killed by its id at the end of the block if it still lives."""
    name = f"{arguments[0]}-{len(list(folder.glob('*.log')))}"
    config_file, log = folder / f"{name}.toml", folder / f"{name}.log"
    config_file.write_text(to_toml(config))
    command = [*arguments, "--config", str(config_file), "--worker-id", name]
    with log.open("wb") as stderr, closing(fork_server().start(command, child_environment(1), stderr)) as process:
        yield process, log


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
