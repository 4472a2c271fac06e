"""Routers, two prefill and two decode workers as real processes, each hop behind a relay where a test wants that.

    client ─► [relay] ─► router ─► [relay] ─► prefill ─► [relay: the address decode advertises] ─► decode
                            └────► [relay] ─────────────────────────────────────────────────────────┘

A process that was ended is started again at the address it had, so that its clients and its peers find it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvferry.client import AsyncClient
from kvferry.config import Config
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import inference_pb2, inference_pb2_grpc
from tests.support.relay import Relay
from tests.support.worker_processes import WorkerProcess, worker_process
from tests.support.workers import free_address

NUM_OF_ROLE = 2
STATE_TIMEOUT_S = 30.0
"""A deadline for the machine, on which several models may load at once, not for the product."""
POLL_INTERVAL_S = 0.02

AskAddresses = Callable[[], Awaitable[list[str]]]


class Member:
    """One worker or router of the deployment over all the lives of its process.

    Attributes:
        role: prefill, decode or router.
        address: where the routers reach it; where clients reach it, for a router.
        router_relay: stands in the router's hop to it, where there are relays.
        ship_relay: stands in prefill's hop to a decode worker, where there are relays.
    """

    def __init__(self, folder: Path, config: Config, role: str) -> None:
        self.role = role
        self.router_relay: Relay | None = None
        self.ship_relay: Relay | None = None
        self._folder, self._config = folder, config
        self._listen = free_address()
        self._life = AsyncExitStack()
        self._process: WorkerProcess

    @property
    def address(self) -> str:
        return self._listen if self.router_relay is None else self.router_relay.address

    @property
    def relays(self) -> list[Relay]:
        return [relay for relay in (self.router_relay, self.ship_relay) if relay is not None]

    @property
    def pid(self) -> int:
        return self._process.process.pid

    @property
    def log(self) -> str:
        """What the process that runs now, or ran last, wrote."""
        return self._process.log.read_text()

    async def insert_relays(self, stack: AsyncExitStack) -> None:
        """Before it starts; they end with `stack`."""
        self.router_relay = await stack.enter_async_context(Relay())
        if self.role == "decode":
            self.ship_relay = await stack.enter_async_context(Relay())
        for relay in self.relays:
            relay.forward_to(self._listen)

    async def start(self) -> Self:
        """Returns when it serves."""
        advertised = [] if self.ship_relay is None else ["--advertise", self.ship_relay.address]
        module = "router" if self.role == "router" else f"{self.role}_svc"
        self._process = await self._life.enter_async_context(
            worker_process(self._folder, self._config, module, *advertised, listen=self._listen)
        )
        return self

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to its process."""
        self._process.send(number)

    async def kill(self) -> None:
        """Returns when the process has gone."""
        self.send(signal.SIGKILL)
        assert await self._process.exit_code() == -signal.SIGKILL
        await self._life.aclose()

    async def drain(self) -> None:
        """SIGTERM; returns when the process has ended what it had and gone."""
        self.send(signal.SIGTERM)
        assert await self._process.exit_code() == 0, self.log
        assert "Traceback" not in self.log, self.log
        await self._life.aclose()

    async def close(self) -> None:
        await self._life.aclose()


@dataclass(frozen=True, slots=True)
class ChaosCluster:
    """What runs.

    Attributes:
        members: the workers.
        routers: in front of them.
        client: reaches all routers, past `client_relay`.
        client_relay: stands in the hop of clients that connect to the first router there.
    """

    members: Sequence[Member]
    routers: Sequence[Member]
    client: AsyncClient
    client_relay: Relay

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    async def all_ready(self) -> None:
        """Returns when every router gives work to every worker in its present life."""
        await self._until_none("some router does not call ready", self._not_ready)

    async def noticed(self, member: Member) -> None:
        """Returns when no router gives anything to this worker any more."""

        async def still_ready() -> list[str]:
            infos = [info for router in self.routers for info in await workers_of(router)]
            return [info.address for info in infos if info.address == member.address and info.state == "ready"]

        await self._until_none("some router still calls ready", still_ready)

    async def all_idle(self) -> None:
        """LEAK: returns when no block of any worker is held, by the statuses it sends."""
        await self._until_none("blocks are still held by", self._holding)

    async def _not_ready(self) -> list[str]:
        missing: list[str] = []
        for router in self.routers:
            states = {info.address: (info.state, info.pid) for info in await workers_of(router)}
            missing += [member.address for member in self.members if states[member.address] != ("ready", member.pid)]
        return missing

    async def _holding(self) -> list[str]:
        infos = [info for router in self.routers for info in await workers_of(router)]
        return [info.address for info in infos if info.num_available_blocks != info.num_blocks or info.num_requests]

    async def _until_none(self, problem: str, ask: AskAddresses) -> None:
        addresses: list[str] = []
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                while addresses := await ask():  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise AssertionError(f"{problem}: {', '.join(addresses)}") from None


async def workers_of(router: Member) -> Sequence[inference_pb2.WorkerInfo]:
    """What a router says of the workers. Over a connection of its own: the clients' are as they found them."""
    async with RpcChannel(router.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
        response = await channel.unary(stub.ListWorkers, inference_pb2.ListWorkersRequest(), timeout_s=STATE_TIMEOUT_S)
    return tuple(response.workers)


@asynccontextmanager
async def chaos_cluster(
    folder: Path, config: Config, *, has_relays: bool = False, num_routers: int = 1
) -> AsyncIterator[ChaosCluster]:
    """The whole deployment, ready, for the length of the block; every process is ended by its id."""
    async with AsyncExitStack() as stack:
        members = [Member(folder, config, role) for role in ("prefill", "decode") for _ in range(NUM_OF_ROLE)]
        for member in members:
            if has_relays:
                await member.insert_relays(stack)
        addresses = {role: [one.address for one in members if one.role == role] for role in ("prefill", "decode")}
        router_config = config.replace("router", **addresses)
        routers = [Member(folder, router_config, "router") for _ in range(num_routers)]
        for member in (*members, *routers):
            stack.push_async_callback(member.close)
        await asyncio.gather(*(member.start() for member in (*members, *routers)))
        relay = await stack.enter_async_context(Relay())
        relay.forward_to(routers[0].address)
        client = await stack.enter_async_context(AsyncClient([router.address for router in routers]))
        cluster = ChaosCluster(members, routers, client, relay)
        await cluster.all_ready()
        yield cluster
