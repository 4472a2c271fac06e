"""Workers that are asked to go: what they run ends, or goes on elsewhere with the very same tokens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unavailable
from kvferry.telemetry import Metrics, start_telemetry
from router.app import RouterApp
from router.worker import MemberState, Worker
from tests.support.commands import plain_environment
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.drains import Request, progress_of
from tests.support.forks import fork_server
from tests.support.worker_processes import WorkerProcess, exit_code, worker_process
from tests.support.workers import until

PROMPT = list(range(20, 100))
MAX_TOKENS = 40
SHORT_GRACE_S = 0.2
"""Ends while the request is in the phase it was caught in; each phase takes seconds."""
FOR_EVER_S = 600.0
COMMAND_TIMEOUT_S = 60.0
LATE_BLOCK = {"kind": "delay", "block_index": 2, "attempt": 1, "delay_s": FOR_EVER_S}


def options_of(max_tokens: int = MAX_TOKENS) -> GenerateOptions:
    return GenerateOptions(prompt=PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def right_tokens(config: Config, max_tokens: int = MAX_TOKENS) -> list[int]:
    """What a single engine would answer."""
    assert config.model.path is not None
    return reference_continuation(PROMPT, max_tokens, load_script_config(Path(config.model.path)))


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two prefill and two decode processes, and a router with a client in this one."""

    config: Config
    router: RouterApp
    client: AsyncClient
    processes: dict[str, WorkerProcess]
    metrics: Metrics

    def busy(self, role: str) -> Worker | None:
        """The worker of a role that has a request."""
        workers = getattr(self.router.membership, role)
        return next((worker for worker in workers if worker.num_requests), None)

    def load(self, role: str, figure: str) -> int:
        """A figure of that worker; 0 while there is none."""
        worker = self.busy(role)
        return 0 if worker is None or worker.status is None else int(getattr(worker.status.load, figure))


def process_config(folder: Path, phase: str = "") -> Config:
    """Steps of 50 ms and prompts in small chunks, so that there is time to interfere; a phase of shipping does not end
    by itself in a first attempt."""
    config = deployment_config(
        chat_folder(folder, step_delay_s=0.05), timeout_s=0.6, max_chunk_tokens=4, preemption="recompute"
    ).replace("shutdown", grace_s=SHORT_GRACE_S)
    return config.replace("faults", allow_faults=True, shipping=[LATE_BLOCK]) if phase == "shipping" else config


@asynccontextmanager
async def running_fleet(folder: Path, config: Config) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        modules = ["prefill_svc", "prefill_svc", "decode_svc", "decode_svc"]
        workers = await asyncio.gather(
            *(stack.enter_async_context(worker_process(folder, config, module)) for module in modules)
        )
        addresses = [worker.address for worker in workers]
        router_config = config.replace("router", prefill=addresses[:2], decode=addresses[2:])
        telemetry = start_telemetry(config.telemetry, "router", "router")
        stack.push_async_callback(telemetry.shutdown)
        router = await stack.enter_async_context(RouterApp(router_config, telemetry))
        await until(lambda: _all_ready(router))
        client = await stack.enter_async_context(AsyncClient(router.address))
        yield Fleet(config, router, client, dict(zip(addresses, workers, strict=True)), telemetry.metrics)


def _all_ready(router: RouterApp) -> bool:
    return all(worker.state is MemberState.READY for worker in router.membership.workers)


async def drain_command(fleet: Fleet, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of `kvferry drain`."""
    command = ["kvferry.cli.app", "drain", *arguments, "--router", fleet.router.address]
    with TemporaryFile() as stderr, closing(fork_server().start(command, plain_environment(), stderr)) as process:
        code = await exit_code(process, COMMAND_TIMEOUT_S)
        stderr.seek(0)
        return code, stderr.read().decode().splitlines()


PHASES: dict[str, Callable[[Fleet, Request], bool]] = {
    "prefill": lambda fleet, request: fleet.load("prefill", "num_prefill_tokens") >= 8,
    "shipping": lambda fleet, request: fleet.load("decode", "num_blocks_shipped") >= 2,
    "decode": lambda fleet, request: request.num_tokens >= 5,
}


EVERYWHERE = pytest.mark.parametrize(
    ("phase", "role"),
    [
        ("prefill", "prefill"),
        ("prefill", "decode"),
        ("shipping", "prefill"),
        ("shipping", "decode"),
        ("decode", "decode"),
    ],
)


async def caught(fleet: Fleet, phase: str, role: str) -> tuple[asyncio.Future[Completion], Worker]:
    """A request in a phase, and its worker of a role."""
    request = Request()
    call = asyncio.ensure_future(request.run(fleet.client, options_of()))
    await until(lambda: PHASES[phase](fleet, request))
    worker = fleet.busy(role)
    assert worker is not None and not call.done()
    return call, worker


@pytest.mark.processes
@EVERYWHERE
async def test_what_outlasts_sigterm_goes_on_elsewhere(tmp_path: Path, phase: str, role: str) -> None:
    """R151: the client gets every token once and no other one, and the worker ends with exit code 0."""
    config = process_config(tmp_path / "model", phase)
    async with running_fleet(tmp_path, config) as fleet:
        call, victim = await caught(fleet, phase, role)
        process = fleet.processes[victim.address]
        process.send(signal.SIGTERM)
        completion = await call
        assert completion.choices[0].token_ids == right_tokens(config)
        assert completion.timings.num_attempts == 2
        assert await process.exit_code() == 0
        assert "Traceback" not in process.log.read_text()


MIN_MOVED_TOKENS = 8
HELD_MOVE = {"kind": "delay", "block_index": 2, "attempt": 2, "delay_s": FOR_EVER_S}


def moving_config(folder: Path, **faults: Any) -> Config:
    """Silence is borne for longer than a machine under load keeps it; no test here waits for that."""
    config = process_config(folder).replace("router", min_moved_tokens=MIN_MOVED_TOKENS)
    return config.replace("transfer", progress_timeout_s=10.0).replace("faults", allow_faults=True, **faults)


def moved_figures(fleet: Fleet) -> tuple[float | None, float | None]:
    """Sequences that moved with blocks, and those blocks, as the router counted them."""
    names = "kvferry_moved_sequences_total", "kvferry_moved_blocks_total"
    sequences, blocks = (fleet.metrics.registry.get_sample_value(name) for name in names)
    return sequences, blocks


async def caught_moving(
    fleet: Fleet, num_tokens: int = 2 * MIN_MOVED_TOKENS
) -> tuple[asyncio.Future[Completion], Worker]:
    """A request with so many tokens, whose decode worker has been sent SIGTERM."""
    request = Request()
    call = asyncio.ensure_future(request.run(fleet.client, options_of()))
    await until(lambda: request.num_tokens >= num_tokens)
    victim = fleet.busy("decode")
    assert victim is not None and not call.done()
    fleet.processes[victim.address].send(signal.SIGTERM)
    return call, victim


@pytest.mark.processes
async def test_a_worker_that_ends_ships_first_what_it_let_go_of(tmp_path: Path) -> None:
    config = moving_config(tmp_path / "model")
    async with running_fleet(tmp_path, config) as fleet:
        call, victim = await caught_moving(fleet)
        assert await fleet.processes[victim.address].exit_code() == 0
        completion = await call
        assert completion.choices[0].token_ids == right_tokens(config)
        assert completion.timings.num_attempts == 2
        num_sequences, num_blocks = moved_figures(fleet)
        assert num_sequences == 1
        assert num_blocks is not None and num_blocks >= (len(PROMPT) + 2 * MIN_MOVED_TOKENS) // 4
        log = fleet.processes[victim.address].log.read_text()
        assert "work_moved" in log and '"num_kept": 1' in log and "Traceback" not in log


@pytest.mark.processes
async def test_a_worker_that_dies_while_it_ships_costs_another_attempt(tmp_path: Path) -> None:
    config = moving_config(tmp_path / "model", shipping=[HELD_MOVE])
    async with running_fleet(tmp_path, config) as fleet:
        call, victim = await caught_moving(fleet)
        process = fleet.processes[victim.address]
        target = next(worker for worker in fleet.router.membership.decode if worker is not victim)
        await until(lambda: target.status is not None and target.status.load.num_blocks_shipped >= 2)
        process.send(signal.SIGKILL)
        completion = await call
        assert completion.choices[0].token_ids == right_tokens(config)
        assert completion.timings.num_attempts == 3
        assert moved_figures(fleet) == (0, 0)


@EVERYWHERE
async def test_what_outlasts_a_drain_goes_on_elsewhere(tmp_path: Path, phase: str, role: str) -> None:
    config = process_config(tmp_path / "model", phase)
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment:
        fleet = Fleet(config, deployment.router, deployment.client, {}, deployment.telemetry.metrics)
        call, victim = await caught(fleet, phase, role)
        progress = await progress_of(fleet.client, victim.name, grace_s=SHORT_GRACE_S)
        assert (progress[0].num_running, progress[-1].num_running) == (1, 0)
        assert victim.state is MemberState.DRAINING
        completion = await call
        assert completion.choices[0].token_ids == right_tokens(config)
        assert completion.timings.num_attempts == 2
        await deployment.assert_idle()


@pytest.mark.processes
async def test_the_command_shows_what_is_left_and_ends_when_nothing_is(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, process_config(tmp_path / "model")) as fleet:
        request = Request()
        call = asyncio.ensure_future(request.run(fleet.client, options_of(max_tokens=400)))
        await until(lambda: request.num_tokens >= 1)
        victim = fleet.busy("decode")
        assert victim is not None
        code, lines = await drain_command(fleet, victim.name, "--grace", str(SHORT_GRACE_S))
        assert code == 0, lines
        assert lines[0] == f"{victim.name}: 1 running, until they finish or the grace has passed"
        assert lines[-1].startswith(f"{victim.name} is drained; ")
        num_tokens = request.num_tokens
        await until(lambda: request.num_tokens > num_tokens)
        assert fleet.busy("decode") not in (None, victim)
        call.cancel()


@pytest.mark.processes
async def test_the_command_says_why_it_refuses(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, process_config(tmp_path / "model")) as fleet:
        first, second = (worker.name for worker in fleet.router.membership.decode)
        code, lines = await drain_command(fleet, "nobody")
        assert code == 1 and lines[-1].startswith("error: worker: there is no worker 'nobody'; known workers: ")
        assert f"{first} (127.0.0.1:" in lines[-1]
        assert (await drain_command(fleet, first))[0] == 0
        code, lines = await drain_command(fleet, second)
        assert code == 1 and f"{second} is the last ready decode worker" in lines[-1] and "--force" in lines[-1]
        assert (await drain_command(fleet, first, "--undo")) == (0, [f"{first} takes new work"])
        await until(lambda: _all_ready(fleet.router))
        assert (await drain_command(fleet, second))[0] == 0


# -- one process ------------------------------------------------------------------------------------------------------


def local_config(folder: Path, step_delay_s: float = 0.02) -> Config:
    return deployment_config(chat_folder(folder, step_delay_s=step_delay_s))


def busy_decode(deployment: Deployment) -> Worker:
    return next(worker for worker in deployment.router.membership.decode if worker.num_requests)


async def caught_decoding(deployment: Deployment) -> tuple[asyncio.Future[Completion], Worker]:
    """A request that has tokens, and the worker that decodes it."""
    request = Request()
    call = asyncio.ensure_future(request.run(deployment.client, options_of()))
    await until(lambda: request.num_tokens >= 3)
    return call, busy_decode(deployment)


async def test_a_running_request_ends_within_the_grace_where_it_is(tmp_path: Path) -> None:
    config = local_config(tmp_path / "model")
    async with running_deployment(config, num_decode=2) as deployment:
        call, victim = await caught_decoding(deployment)
        draining = asyncio.ensure_future(progress_of(deployment.client, victim.name, grace_s=FOR_EVER_S))
        await until(lambda: victim.state is MemberState.DRAINING)
        others = [await deployment.client.complete(options_of(4)) for _ in range(4)]
        assert {other.timings.num_attempts for other in others} == {1}, "new work went to the draining worker"
        assert not call.done() and victim.num_requests == 1
        completion = await call
        assert completion.timings.num_attempts == 1
        assert completion.choices[0].token_ids == right_tokens(config)
        progress = await draining
        assert [step.num_running for step in progress if step.num_running != 1] == [0]
        assert 0.0 < progress[0].grace_left_s <= FOR_EVER_S
        await deployment.assert_idle()


async def test_every_watcher_learns_of_a_drain_at_once(tmp_path: Path) -> None:
    """Long before the next regular status of an idle worker."""
    async with running_deployment(local_config(tmp_path / "model"), num_decode=2) as deployment:
        victim = deployment.router.membership.decode[0]
        for _ in range(5):
            await progress_of(deployment.client, victim.address)
            await until(lambda: victim.state is MemberState.DRAINING, timeout_s=0.5)
            assert (await deployment.client.undrain_worker(victim.address)).was_draining
            await until(lambda: victim.state is MemberState.READY, timeout_s=0.5)


async def test_a_repeated_drain_may_change_the_grace_and_nothing_else(tmp_path: Path) -> None:
    config = local_config(tmp_path / "model")
    async with running_deployment(config, num_decode=2) as deployment:
        call, victim = await caught_decoding(deployment)
        first = asyncio.ensure_future(progress_of(deployment.client, victim.name, grace_s=FOR_EVER_S))
        await until(lambda: victim.state is MemberState.DRAINING)
        async with deployment.client.drain_worker(victim.name) as again:
            assert (await anext(again)).grace_left_s > FOR_EVER_S / 2, "a repeat without a grace has changed it"
        progress = await progress_of(deployment.client, victim.name, grace_s=0.0)
        assert (progress[-1].num_running, progress[-1].grace_left_s) == (0, 0.0)
        assert (await first)[-1].num_running == 0
        completion = await call
        assert completion.timings.num_attempts == 2
        assert completion.choices[0].token_ids == right_tokens(config)


async def test_an_undone_drain_moves_nothing(tmp_path: Path) -> None:
    config = local_config(tmp_path / "model")
    async with running_deployment(config, num_decode=2) as deployment:
        call, victim = await caught_decoding(deployment)
        draining = asyncio.ensure_future(progress_of(deployment.client, victim.name, grace_s=0.3))
        await until(lambda: victim.state is MemberState.DRAINING)
        await deployment.client.undrain_worker(victim.name)
        with pytest.raises(FailedPrecondition, match="takes work again"):
            await draining
        completion = await call  # takes longer than the grace that was
        assert completion.timings.num_attempts == 1
        assert not (await deployment.client.undrain_worker(victim.name)).was_draining


async def test_the_last_ready_worker_of_a_role_is_drained_by_force_alone(tmp_path: Path) -> None:
    async with running_deployment(local_config(tmp_path / "model")) as deployment:
        for role in ("prefill", "decode"):
            with pytest.raises(FailedPrecondition, match=rf"{role}-0 is the last ready {role} worker"):
                await progress_of(deployment.client, f"{role}-0")
        await deployment.client.complete(options_of(2))
        await progress_of(deployment.client, "decode-0", force=True)
        await until(lambda: deployment.router.membership.decode[0].state is MemberState.DRAINING)
        await progress_of(deployment.client, "decode-0")  # it is no ready one: idempotent
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await deployment.client.complete(options_of(2))
        await deployment.client.undrain_worker("decode-0")
        await until(lambda: deployment.router.membership.decode[0].state is MemberState.READY)
        await deployment.client.complete(options_of(2))


async def test_orders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async with running_deployment(local_config(tmp_path / "model"), num_decode=2) as deployment:
        await until(lambda: all(one.state is MemberState.READY for one in deployment.router.membership.decode))
        with pytest.raises(NotFound, match=r"no worker 'x'; known workers: prefill-0 \(127.0.0.1:\d+\), decode-0"):
            await progress_of(deployment.client, "x")
        with pytest.raises(NotFound):
            await deployment.client.undrain_worker("x")
        for grace_s in (-1.0, 1e9, float("nan")):
            with pytest.raises(InvalidArgument, match="grace_s: must be 0 … 86400 seconds"):
                await progress_of(deployment.client, "decode-0", grace_s=grace_s)
        assert deployment.router.membership.decode[0].state is MemberState.READY


async def test_only_administrators_drain(tmp_path: Path) -> None:
    config = local_config(tmp_path / "model")
    values = config.model_dump()
    values["tenants"] = [
        {"name": "search", "api_keys": ["search-key"]},
        {"name": "ops", "api_keys": ["ops-key-ops"], "admin": True},
    ]
    async with running_deployment(Config(**values), num_decode=2) as deployment:
        async with AsyncClient(deployment.router.address, api_key="search-key") as client:
            with pytest.raises(PermissionDenied, match="'search'"):
                await client.undrain_worker("decode-0")
            with pytest.raises(PermissionDenied, match="only an administrator may drain workers"):
                async with client.drain_worker("decode-0") as progress:
                    await anext(progress)
        async with AsyncClient(deployment.router.address, api_key="ops-key-ops") as client:
            assert not (await client.undrain_worker("decode-0")).was_draining
