"""Several routers before the same workers, all of them real processes that can be killed, stopped and started again."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.config import Config
from tests.support.deployment import chat_folder, deployment_config
from tests.support.worker_processes import Watch, WorkerProcess, watching, worker_process

STEP_DELAY_S = 0.01
"""Steps take time, so that a kill finds every stream in the middle."""


class RouterLife:
    """One router, over all the lives of its process, at one address."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder, self._config = folder, config
        self._life = AsyncExitStack()
        self._process: WorkerProcess
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    async def start(self) -> None:
        self._process = await self._life.enter_async_context(
            worker_process(self._folder, self._config, "router", listen=self.address)
        )

    def send(self, number: signal.Signals) -> None:
        self._process.send(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.send(number)
        await self._process.exit_code()
        await self._life.aclose()

    @property
    def log(self) -> str:
        return self._process.log.read_text()


@dataclass(frozen=True, slots=True)
class Routed:
    """What runs.

    Attributes:
        model: the scripted model's folder.
        watches: of the workers.
    """

    model: Path
    routers: Sequence[RouterLife]
    watches: Sequence[Watch]


@asynccontextmanager
async def routed(folder: Path, *, num_routers: int = 2, num_workers: int = 2) -> AsyncIterator[Routed]:
    """All of it, for the length of the block; every process is ended by its id."""
    model = chat_folder(folder / "model", step_delay_s=STEP_DELAY_S)
    config = deployment_config(model, num_blocks=1024).replace("shutdown", grace_s=0.2)
    async with AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {}
        watches: list[Watch] = []
        for role in ("prefill", "decode"):
            for _ in range(num_workers):
                worker = await stack.enter_async_context(worker_process(folder, config, f"{role}_svc"))
                addresses.setdefault(role, []).append(worker.address)
                watches.append(await stack.enter_async_context(watching(worker.address)))
        config = config.replace("router", **addresses)
        routers = [RouterLife(folder, config) for _ in range(num_routers)]
        for router in routers:
            await router.start()
            stack.push_async_callback(router.end)
        yield Routed(model, routers, watches)
