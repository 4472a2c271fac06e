"""A worker makes itself known to its routers: one `Join` stream to each, for as long as it runs.

    configured targets ─► addresses (names are followed) ─► Join ─► what the router makes of this worker, logged

A router that is down, refuses the worker or falls silent is asked again with growing pauses; work goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from functools import partial

from kvferry.config import JoinConfig
from kvferry.errors import InvalidArgument, KvferryError, Unavailable
from kvferry.rpc import HeartbeatWriter, RpcChannel, read_with_progress_deadline
from kvferry.rpc.listen import WILDCARD_HOSTS
from kvferry.rpc.names import FollowedTargets
from kvferry.tasks import run_until_first
from kvferry.telemetry import log_event
from kvferry.worker import WorkerIdentity
from proto.kvferry.v1 import membership_pb2, membership_pb2_grpc

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class Joining:
    """Who joins, as what.

    Attributes:
        address: host:port that routers and other workers reach it at.
        progress_timeout_s: silence after which a router counts as lost.
    """

    identity: WorkerIdentity
    address: str
    progress_timeout_s: float

    def to_pb(self) -> membership_pb2.JoinRequest:
        return membership_pb2.JoinRequest(
            worker_id=self.identity.worker_id,
            role=self.identity.role,
            address=self.address,
            progress_timeout_s=self.progress_timeout_s,
        )


class RouterJoins:
    """The streams to all routers, from `start` to `close`.

    Raises InvalidArgument for an address that nobody can connect to, where there are routers to tell it.
    """

    def __init__(self, config: JoinConfig, joining: Joining) -> None:
        if config.routers and joining.address.rpartition(":")[0] in WILDCARD_HOSTS:
            raise InvalidArgument(
                "--advertise", f"must be given with join.routers: {joining.address} is no address to connect to"
            )
        self._config = config
        self._joining = joining
        self._listed: dict[str, frozenset[str]] = {}  # by target
        self._joins: dict[str, asyncio.Task[None]] = {}  # by address
        self._targets = FollowedTargets(refresh_s=config.dns_refresh_s)

    def start(self) -> None:
        """Begins to join, in the background."""
        for target in self._config.routers:
            self._targets.add(target, partial(self._list, target))

    async def close(self) -> None:
        """Ends all streams: routers forget the worker once its watch has ended, too."""
        await self._targets.close()
        for task in self._joins.values():
            task.cancel()
        await asyncio.gather(*self._joins.values(), return_exceptions=True)

    def _list(self, target: str, addresses: frozenset[str]) -> None:
        self._listed[target] = addresses
        wanted: frozenset[str] = frozenset().union(*self._listed.values())
        for address in self._joins.keys() - wanted:
            self._joins.pop(address).cancel()
        for address in sorted(wanted - self._joins.keys()):
            self._joins[address] = asyncio.create_task(self._keep_joined(address))

    async def _keep_joined(self, router: str) -> None:
        key, loop = self._config.key, asyncio.get_running_loop()
        headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
        backoff_s, told = FIRST_BACKOFF_S, ""
        async with RpcChannel(router, headers=headers) as channel:
            while True:
                began_s = loop.time()
                try:
                    await self._join(channel, router)
                except KvferryError as error:
                    reason = error.message
                if loop.time() - began_s > self._joining.progress_timeout_s:  # it was there in between
                    backoff_s, told = FIRST_BACKOFF_S, ""
                if reason != told:
                    told = reason
                    log_event(logger, "router_not_joined", level=logging.WARNING, router=router, reason=reason)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _join(self, channel: RpcChannel, router: str) -> None:
        """Joins and follows what the router says until the stream ends; always raises."""
        timeout_s = self._joining.progress_timeout_s
        stub = membership_pb2_grpc.MembershipServiceStub(channel.grpc)
        async with channel.duplex(stub.Join) as call:
            async with HeartbeatWriter(
                call.write, membership_pb2.JoinRequest, interval_s=timeout_s / 3, stall_timeout_s=timeout_s, peer=router
            ) as writer:

                async def introduce() -> None:
                    await writer.write(self._joining.to_pb())
                    await loop.create_future()  # nothing more is to be said

                async def follow() -> None:
                    told = None
                    while (response := await read_with_progress_deadline(call, timeout_s, router)) is not None:
                        if response != told:
                            told = response
                            _log_state(router, response)

                loop = asyncio.get_running_loop()
                await run_until_first(follow(), introduce())
            raise Unavailable(f"{router} ended the stream")


def _log_state(router: str, response: membership_pb2.JoinResponse) -> None:
    level = logging.WARNING if response.state == "refused" else logging.INFO
    log_event(logger, "router_says", level=level, router=router, state=response.state, reason=response.reason)
