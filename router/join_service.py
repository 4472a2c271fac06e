"""Workers that make themselves known: each keeps one `Join` stream, and is listed for as long as it lives.

    Join ─► may it join ─► who, where ─► listed, so watched ─► told of every change of its state

Nothing of what a worker says of itself is believed but its role and address: what it serves, and how it fares, the
watch tells, so only workers that this router can reach itself are used.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.config import RouterConfig, is_host_port
from kvferry.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from kvferry.rpc import HeartbeatWriter, read_with_progress_deadline
from kvferry.rpc.listen import WILDCARD_HOSTS
from kvferry.tasks import run_until_first
from kvferry.telemetry import log_event
from kvferry.worker import check_progress_timeout
from proto.kvferry.v1 import membership_pb2 as pb
from proto.kvferry.v1 import membership_pb2_grpc
from router.auth import JoinKeys
from router.membership import Membership
from router.worker import Role, Worker

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

    Context = ServicerContext[pb.JoinRequest, pb.JoinResponse]

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["MembershipService"].full_name
BACKGROUND_METHODS = frozenset({"Join"})
"""Lives as long as the worker; the end of the router does not wait for it."""

FIRST_MESSAGE_TIMEOUT_S = 10.0
MAX_JOINS = 1024
"""Streams of this kind; each makes the router connect to an address of the caller's choice."""
MAX_WORKER_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class Joining:
    """Who joins, checked."""

    worker_id: str
    role: Role
    address: str
    progress_timeout_s: float

    @classmethod
    def from_pb(cls, message: pb.JoinRequest) -> Joining:
        """Raises InvalidArgument naming the field and the limit."""
        roles = {role.value: role for role in Role}
        if message.role not in roles:
            raise InvalidArgument("role", f"must be one of {', '.join(roles)}, got {message.role!r:.80}")
        if not is_host_port(message.address, lowest_port=1):
            raise InvalidArgument("address", f"must be host:port, got {message.address!r:.80}")
        if message.address.rpartition(":")[0] in WILDCARD_HOSTS:
            raise InvalidArgument("address", f"{message.address} is no address to connect to")
        if len(message.worker_id) > MAX_WORKER_ID_CHARS or not message.worker_id.isprintable():
            raise InvalidArgument("worker_id", f"must be at most {MAX_WORKER_ID_CHARS} printable characters")
        check_progress_timeout("progress_timeout_s", message.progress_timeout_s)
        return cls(message.worker_id, roles[message.role], message.address, message.progress_timeout_s)


class JoinServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Serves workers."""

    def __init__(self, config: RouterConfig, membership: Membership) -> None:
        self._accepts = config.accept_joins
        self._keys = JoinKeys(config)
        self._membership = membership
        self._numbers = itertools.count(1)
        self._num_open = 0

    async def Join(  # type: ignore[override]  # a coroutine that writes
        self, _requests: object, context: Context
    ) -> None:
        if not self._accepts:
            raise PermissionDenied("this router lets no worker join: router.accept_joins is false", field="join")
        self._keys.check(context.invocation_metadata())
        with self._place():
            first = await read_with_progress_deadline(context, FIRST_MESSAGE_TIMEOUT_S, "the worker")
            if first is None:
                raise InvalidArgument("role", "the first message must say who joins")
            joining = Joining.from_pb(first)
            with self._listed(joining):
                await self._serve(joining, context)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places there are, for the length of the block."""
        if self._num_open >= MAX_JOINS:
            raise ResourceExhausted(f"{MAX_JOINS} workers have joined, which is the most")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    @contextmanager
    def _listed(self, joining: Joining) -> Iterator[None]:
        """The worker in the membership for the length of the block."""
        source = f"join {next(self._numbers)}"
        role, address = joining.role, joining.address
        log_event(logger, "worker_joined", worker=joining.worker_id, role=role.value, address=address)
        self._membership.list_workers(source, role, frozenset({address}))
        try:
            yield
        finally:
            log_event(logger, "worker_join_ended", worker=joining.worker_id, role=role.value, address=address)
            self._membership.list_workers(source, role, frozenset())

    async def _serve(self, joining: Joining, context: Context) -> None:
        timeout_s = joining.progress_timeout_s

        def state() -> pb.JoinResponse:
            worker = self._worker(joining)
            return pb.JoinResponse(state=worker.state.value, reason=worker.reason)

        async with HeartbeatWriter(
            context.write, state, interval_s=timeout_s / 3, stall_timeout_s=timeout_s, peer=joining.worker_id
        ) as writer:

            async def tell() -> None:
                changes, told = self._membership.changes, None
                while True:
                    number, now = changes.number, state()
                    if now != told:
                        told = now
                        await writer.write(now)
                    await changes.wait_beyond(number)

            async def listen() -> None:
                while await read_with_progress_deadline(context, timeout_s, joining.worker_id) is not None:
                    pass

            await run_until_first(tell(), listen())

    def _worker(self, joining: Joining) -> Worker:
        workers = self._membership.workers
        return next(worker for worker in workers if (worker.role, worker.address) == (joining.role, joining.address))
