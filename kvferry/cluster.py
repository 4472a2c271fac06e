"""Router and workers of one machine as child processes: what `kvferry up` and tests start.

    async with LocalCluster(config, num_prefill=1, num_decode=1, relay=…) as cluster:
        cluster.endpoints.grpc          # requests can be served from here on

Workers start first and at the same time, each ready only after a warm-up step; then the router, and then we wait until
it has accepted every worker.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvferry.client import AsyncClient
from kvferry.config import Config, to_toml, write_private
from kvferry.errors import FailedPrecondition, KvferryError, Unavailable
from kvferry.host import num_cores
from kvferry.rpc import check_can_listen
from kvferry.supervisor import WORKER_NICENESS, Child, ChildSpec, Report, Supervisor, report_event

POLL_INTERVAL_S = 0.05
STOP_MARGIN_S = 5.0
"""Children end within their own grace period and the time to move what outlasts it; this much later they are killed."""
COUNT_TIMEOUT_S = 1.0
"""How long a drain waits to learn how many requests it waits for."""
MODULES = {"prefill": "prefill_svc", "decode": "decode_svc"}


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process of the cluster."""

    id: str
    role: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the cluster is reached."""

    grpc: str
    http: str
    router_pid: int
    workers: tuple[Worker, ...]


class LocalCluster:
    """A router and, of each model, `num_prefill` prefill and `num_decode` decode workers, supervised.

    The models' paths must be set. Entering raises the error of the first process that fails; leaving ends all.
    """

    def __init__(
        self,
        config: Config,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        relay: Callable[[str], None] = lambda line: None,
        report: Report = report_event,
    ) -> None:
        assert all(model.path is not None for model in config.served_models)
        self._roles = ["prefill"] * num_prefill + ["decode"] * num_decode
        self._config = _divided(config, len(self._roles) * len(config.served_models))
        self._report = report
        self._supervisor = Supervisor(
            ready_timeout_s=config.supervisor.ready_timeout_s,
            grace_s=config.shutdown.grace_s + config.transfer.progress_timeout_s + STOP_MARGIN_S,
            relay=relay,
            report=report,
            probes=config.supervisor,
        )
        self._workers: list[tuple[str, Child]] = []
        self._router: Child | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await _finish(self._stack.aclose())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await _finish(self._stack.aclose())

    def hurry(self) -> None:
        """Cuts the grace period of the children short."""
        self._supervisor.hurry()

    @property
    def endpoints(self) -> Endpoints:
        """Addresses and process ids as they are now (a restarted worker has another pid)."""
        assert self._router is not None
        workers = (Worker(child.spec.name, role, child.pid, child.address) for role, child in self._workers)
        http = str(self._router.ready.get("http", f"http://{self._config.router.http_listen}"))
        return Endpoints(self._router.address, http, self._router.pid, tuple(workers))

    async def _start(self) -> None:
        for listen in (self._config.router.grpc_listen, self._config.router.http_listen):
            check_can_listen(listen)  # at once, not after the models are loaded
        self._report_start()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        await self._stack.enter_async_context(self._supervisor)
        starts = [
            asyncio.create_task(self._start_worker(role, f"{prefix}{role}-{index}", file))
            for prefix, file in self._write_worker_files(folder)
            for index, role in self._numbered_roles()
        ]
        self._workers = await _all_or_first_error(starts)
        addresses = {role: tuple(child.address for kind, child in self._workers if kind == role) for role in MODULES}
        router_config = self._config.replace("router", **addresses)
        file = _write(folder / "router.toml", router_config)
        self._router = await self._supervisor.start(
            ChildSpec(
                "router", "router", ["--config", str(file)], listen=self._config.router.grpc_listen, is_probed=True
            )
        )
        # First out: it drains what runs, and for that it needs the workers.
        self._stack.push_async_callback(self._stop_router, self._router)
        await self._wait_accepted(self._router.address)

    def _report_start(self) -> None:
        engine, model = self._config.engine, self._config.model
        names = ", ".join(model.public_name for model in self._config.served_models)
        workers = {f"num_{role}": self._roles.count(role) for role in MODULES}
        pool = f"{engine.num_blocks} blocks" if engine.num_blocks else f"{engine.pool_bytes() / (1 << 20):.0f} MiB"
        self._report(
            f"starting {names} ({model.dtype}): {workers['num_prefill']} prefill, {workers['num_decode']} decode"
            f"{' of each' if self._config.models else ''}; threads each: {engine.num_threads}, KV pool each: {pool}",
            "cluster_starting",
            model=names,
            dtype=model.dtype,
            num_threads=engine.num_threads,
            **({"num_blocks": engine.num_blocks} if engine.num_blocks else {"kv_memory_bytes": engine.pool_bytes()}),
            **workers,
        )

    async def _stop_router(self, router: Child) -> None:
        with suppress(KvferryError, TimeoutError):
            async with asyncio.timeout(COUNT_TIMEOUT_S), self._client(router.address) as client:
                num_requests = sum(worker.num_requests for worker in await client.workers() if worker.role == "decode")
            if num_requests:
                text = f"waiting for {num_requests} request{'s' * (num_requests > 1)}"
                self._report(text, "requests_draining", num_requests=num_requests)
        await self._supervisor.stop_child(router)

    def _numbered_roles(self) -> list[tuple[int, str]]:
        return [(self._roles[:place].count(role), role) for place, role in enumerate(self._roles)]

    def _write_worker_files(self, folder: Path) -> list[tuple[str, Path]]:
        """A configuration for the workers of each model, and how their names begin; bare for the default one's."""
        keyless = self._config.without_keys()
        files: list[tuple[str, Path]] = []
        for place, model in enumerate(keyless.served_models):
            file = _write(folder / f"worker-{place}.toml", keyless.of_model(model))
            files.append((f"{model.public_name}-" if place else "", file))
        return files

    async def _start_worker(self, role: str, name: str, file: Path) -> tuple[str, Child]:
        steps_file = file.with_name(f"{name}.steps")
        spec = ChildSpec(
            name,
            MODULES[role],
            ["--config", str(file), "--worker-id", name, "--steps-file", str(steps_file)],
            num_threads=self._config.engine.num_threads or 1,
            niceness=WORKER_NICENESS,
            is_probed=True,
            steps_file=steps_file,
        )
        return role, await self._supervisor.start(spec)

    async def _wait_accepted(self, router: str) -> None:
        """Until the router calls every worker ready; raises FailedPrecondition for one that it refuses."""
        problem = "it does not answer"
        timeout_s = self._config.supervisor.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._client(router) as client:
                while problem := await self._what_is_missing(client):  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise Unavailable(f"the router is not ready after {timeout_s:g} s: {problem}") from None

    def _client(self, router: str) -> AsyncClient:
        return AsyncClient(router, api_key=self._config.own_key)

    async def _what_is_missing(self, client: AsyncClient) -> str:
        """Why requests cannot be served yet; empty when they can."""
        try:
            workers = await client.workers()
        except Unavailable as error:
            return error.message
        for worker in workers:
            if worker.state == "refused":
                raise FailedPrecondition(f"the router refuses worker {worker.id or worker.address}: {worker.reason}")
        if len(workers) < len(self._workers):
            return f"{len(workers)} of {len(self._workers)} workers are listed"
        missing = (worker for worker in workers if worker.state != "ready")
        return "; ".join(f"{worker.address or worker.id} is {worker.state}" for worker in missing)


def _divided(config: Config, num_engines: int) -> Config:
    """With the machine's cores and memory divided among its engines, where the configuration does not say."""
    engine = config.engine
    num_threads = engine.num_threads or max(1, num_cores() // num_engines)
    return config.replace("engine", num_threads=num_threads, engines_per_machine=num_engines)


async def _finish(ending: Coroutine[Any, Any, None]) -> None:
    """Runs `ending` to its end even when this task is cancelled meanwhile: no child may be left behind."""
    task = asyncio.ensure_future(ending)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    task.result()


async def _all_or_first_error(
    tasks: Sequence[asyncio.Task[tuple[str, Child]]],
) -> list[tuple[str, Child]]:
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write(file: Path, config: Config) -> Path:
    write_private(file, to_toml(config, show_keys=True))
    return file
