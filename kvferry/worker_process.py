"""A worker process from start to end, the same for both roles; what differs is a `WorkerRole`.

configuration ─► model loaded, warm-up step ─► port bound ─► ready line ─► … ─► SIGTERM: drain ─► exit code 0

While it serves, its health service says whether it takes work, and whether its step loop makes progress.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc.aio

from kvferry import __version__
from kvferry.block_changes import BlockFeed
from kvferry.config import Config, load_config
from kvferry.drain import WorkerDrain
from kvferry.errors import KvferryError, WorkerDraining
from kvferry.host_memory import keep_message_buffers
from kvferry.join import Joining, RouterJoins
from kvferry.kv_layout import KvLayout
from kvferry.moves import MovedSequences
from kvferry.process import StopSignals, print_ready
from kvferry.rpc import RpcServer, check_can_listen, run
from kvferry.rpc.listen import WILDCARD_HOSTS, parse_address
from kvferry.step_log import MappedStepLog, NoStepLog, StepLog
from kvferry.tasks import Changes
from kvferry.telemetry import Telemetry, configure_logging, log_event, start_telemetry
from kvferry.wire import layout_to_pb
from kvferry.worker import WorkerIdentity, WorkerState
from kvferry.worker_cache import WORKER_CACHE_SERVICE, MemoryAdmin, WorkerCacheServicer
from kvferry.worker_service import BACKGROUND_METHODS, WORKER_SERVICE, WorkerServicer
from proto.kvferry.v1 import cache_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

LINK_METHOD = "Link"
"""A shipment's control stream between two workers lives as long as they do."""
HEALTH_INTERVAL_S = 0.5
"""How soon the health service says that the step loop is stuck."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a role is opened with."""

    config: Config
    identity: WorkerIdentity
    state: WorkerState
    telemetry: Telemetry
    step_log: StepLog
    moves: MovedSequences


class WorkerRole(Protocol):
    """One role, open and warmed up."""

    @property
    def services(self) -> tuple[str, ...]:
        """Full names of its gRPC services."""

    @property
    def capabilities(self) -> types_pb2.Capabilities: ...

    @property
    def memory(self) -> MemoryAdmin: ...

    @property
    def blocks(self) -> BlockFeed: ...

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds its servicers."""

    def on_bound(self, address: str) -> None:
        """Learns where peers reach it."""

    def load(self) -> worker_pb2.WorkerLoad: ...

    def keep_moved(self) -> None:
        """What still runs is about to end, to go on elsewhere: keeps what is worth shipping (`kvferry/moves.py`)."""

    def is_alive(self) -> bool:
        """False while its step loop is stuck."""

    async def close(self) -> None:
        """Ends its threads and channels."""


OpenRole = Callable[[WorkerContext], WorkerRole]


def capabilities_of(config: Config, *, layout: KvLayout, max_context: int, vocab_size: int) -> types_pb2.Capabilities:
    """What a worker tells routers about its model."""
    return types_pb2.Capabilities(
        model=config.model.public_name,
        model_path=config.model.path or "",
        max_context=max_context,
        vocab_size=vocab_size,
        layout=layout_to_pb(layout),
        version=__version__,
    )


def main(role: str, open_role: OpenRole) -> None:
    """Entry point of `python -m prefill_svc` and `python -m decode_svc`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}_svc",
        description=f"The {role} worker. Usually started by `kvferry up` or `kvferry {role}`.",
        epilog=f"example: python -m {role}_svc --config kvferry.toml --listen 127.0.0.1:0 --worker-id {role}-0",
    )
    parser.add_argument("--config", type=Path, help="TOML file with the whole configuration")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port to listen on; port 0 for any")
    parser.add_argument("--advertise", help="host:port that peers reach this worker at; default: where it listens")
    parser.add_argument(
        "--worker-id",
        help=f"name in logs, traces and `kvferry workers`; default: {role}-HOST:PORT, where peers reach this worker",
    )
    parser.add_argument("--steps-file", type=Path, help="keeps the last steps, for whoever reports a crash")
    options = parser.parse_args()
    keep_message_buffers()
    try:
        config = load_config(options.config)
        check_can_listen(options.listen)  # at once, not after the model is loaded
        listen = options.listen if options.worker_id or options.advertise else _with_port(options.listen)
        worker_id = options.worker_id or default_worker_id(role, options.advertise or listen)
        configure_logging(config.telemetry, role, worker_id)
        step_log = MappedStepLog(options.steps_file) if options.steps_file else NoStepLog()
        run(_serve(role, open_role, config, listen, options.advertise, worker_id, step_log))
    except KvferryError as error:
        sys.exit(f"error: {error.message}")


def default_worker_id(role: str, address: str) -> str:
    """ROLE-HOST:PORT; the machine's name stands for a host that means all of its addresses."""
    host, _, port = address.rpartition(":")
    return f"{role}-{socket.gethostname() if host in WILDCARD_HOSTS else host}:{port}"


def _with_port(listen: str) -> str:
    """`listen` with port 0 replaced by a free port: a name made of it must be known before the model is loaded."""
    address = parse_address(listen)
    if address.port:
        return listen
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address.host, 0))
        return f"{listen.rpartition(':')[0]}:{probe.getsockname()[1]}"


async def _serve(
    role: str,
    open_role: OpenRole,
    config: Config,
    listen: str,
    advertise: str | None,
    worker_id: str,
    step_log: StepLog,
) -> None:
    signals = StopSignals().install()
    telemetry = start_telemetry(config.telemetry, role, worker_id)
    worker = await start_worker(
        role,
        open_role,
        config,
        listen,
        advertise=advertise,
        worker_id=worker_id,
        telemetry=telemetry,
        step_log=step_log,
    )
    print_ready(address=worker.address, epoch=worker.context.identity.epoch)
    await signals.requested.wait()
    log_event(logger, "draining", grace_s=config.shutdown.grace_s)
    await worker.stop(config.shutdown.grace_s, signals.hurried)
    await telemetry.shutdown()
    log_event(logger, "stopped")


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that serves."""

    context: WorkerContext
    role: WorkerRole
    server: RpcServer
    drain: WorkerDrain
    address: str
    health: asyncio.Task[None]
    joins: RouterJoins

    async def stop(self, grace_s: float = 0.0, hurry: asyncio.Event | None = None) -> None:
        """No new work; what runs gets `grace_s`, and then the progress timeout to move, less once `hurry` is set.

        What is left after that ends with a status.
        """
        self.context.state.end()
        self.health.cancel()  # else it might overtake what the drain says
        await asyncio.wait([self.health])
        await self.server.set_serving(False)
        await self.drain.end(grace_s, self.context.config.transfer.progress_timeout_s, hurry)
        name = self.context.identity.worker_id
        await self.server.drain(0.0, hurry, WorkerDraining(f"worker {name} is shutting down; moved"))
        await self.joins.close()
        await self.role.close()


async def _tell_health(server: RpcServer, state: WorkerState, is_alive: Callable[[], bool]) -> None:
    """Keeps the health service at what is true."""
    while True:
        number, alive = state.changes.number, is_alive()
        await server.set_alive(alive)
        await server.set_serving(alive and not state.is_draining)
        await state.changes.wait_beyond(number, HEALTH_INTERVAL_S)


async def start_worker(
    role: str,
    open_role: OpenRole,
    config: Config,
    listen: str,
    *,
    worker_id: str,
    telemetry: Telemetry,
    advertise: str | None = None,
    step_log: StepLog | None = None,
) -> RunningWorker:
    """Opens the role and serves it; also how tests run workers in one process."""
    if faults := config.faults.of_role(role):
        log_event(logger, "faults_on", level=logging.WARNING, faults=faults)
    state = WorkerState()
    work_changes = Changes()
    moves = MovedSequences(work_changes)
    identity = WorkerIdentity.new(worker_id, role)
    context = WorkerContext(config, identity, state, telemetry, step_log or NoStepLog(), moves)
    opened = open_role(context)
    server = RpcServer(
        tracer=telemetry.tracer, background_methods=BACKGROUND_METHODS | {LINK_METHOD}, changes=work_changes
    )
    opened.add_to(server.grpc)
    drain = WorkerDrain(identity, state, server.calls, moves, opened.keep_moved, config.shutdown.grace_s)
    servicer = WorkerServicer(identity, state, drain, opened.capabilities, opened.load, opened.is_alive, opened.blocks)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    cache_pb2_grpc.add_WorkerCacheServiceServicer_to_server(WorkerCacheServicer(opened.memory), server.grpc)
    try:
        bound = await server.start(listen, (*opened.services, WORKER_SERVICE, WORKER_CACHE_SERVICE))
        address = advertise or bound
        joins = RouterJoins(config.join, Joining(context.identity, address, config.transfer.progress_timeout_s))
    except BaseException:
        await opened.close()
        raise
    opened.on_bound(address)
    joins.start()
    health = asyncio.create_task(_tell_health(server, state, opened.is_alive))
    log_event(logger, "serving", address=address, model=config.model.public_name, epoch=context.identity.epoch)
    return RunningWorker(context, opened, server, drain, address, health, joins)
