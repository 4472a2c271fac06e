"""The routers that a client may call: whose turn it is, and which are left alone for a while since they failed.

A call of which nothing has come goes to another router when one is unavailable: a plain call to each at most, a request
within a budget, so that routers that all refuse do not get their load multiplied. Plain calls to a single router are
retried there, by gRPC itself (`rpc/retries.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from opentelemetry.trace import Tracer

from kvferry.client_fields import check_list
from kvferry.config import DNS_SCHEME, is_host_port
from kvferry.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvferry.retry_budget import RetryBudget
from kvferry.rpc import RpcChannel, retrying
from proto.kvferry.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

MAX_RESPONSE_BYTES = 64 << 20
"""A message with logprobs of a long prompt is large."""
AVOID_FAILED_S = 2.0
"""How long a router that failed is asked only when no other is left: what a restart takes, at the least."""
PROBE_S = 15.0
"""How long the first request that tries a router again tries alone: the others must not wait for one that hangs."""
REPEAT_SHARE = 0.1
"""Requests repeated at another router, as a share of all."""

_SERVICES = [
    service
    for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, cache_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
]
_Answer = TypeVar("_Answer")


def check_address(name: str, address: object) -> None:
    """Raises InvalidArgument, for the argument of that name, unless it is host:port or dns:///host:port."""
    if not isinstance(address, str) or not is_host_port(address.removeprefix(DNS_SCHEME), lowest_port=1):
        raise InvalidArgument(name, f"must be HOST:PORT, such as 127.0.0.1:50051, got {address!r:.80}")


class Router:
    """One router.

    Attributes:
        address: host:port.
        has_heartbeats: whether its last response had them.
    """

    def __init__(
        self, address: str, *, tracer: Tracer | None, headers: Mapping[str, str], service_config: str | None = None
    ) -> None:
        self.address = address
        self.channel = RpcChannel(
            address,
            tracer=tracer,
            max_message_bytes=MAX_RESPONSE_BYTES,
            headers=headers,
            service_config=service_config,
        )
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel.grpc)
        self.admin_stub = admin_pb2_grpc.AdminServiceStub(self.channel.grpc)
        self.cache_stub = cache_pb2_grpc.CacheServiceStub(self.channel.grpc)
        self.avoided_until_s = 0.0  # on the monotonic clock
        self.has_heartbeats = False
        self.failed_at_s: float | None = None  # for the last time since its last answer

    @property
    def is_avoided(self) -> bool:
        return time.monotonic() < self.avoided_until_s

    def failed(self) -> None:
        """It was unavailable."""
        self.failed_at_s = time.monotonic()
        self.avoided_until_s = self.failed_at_s + AVOID_FAILED_S

    def answered(self) -> None:
        """It took a request. What comes of those it took before says nothing: a router that drains ends them, too."""
        self.failed_at_s = None
        self.avoided_until_s = 0.0

    def chosen(self) -> None:
        """A request goes there; after a failure the first one tries alone."""
        if self.failed_at_s is not None:
            self.avoided_until_s = time.monotonic() + PROBE_S


class Routers:
    """All routers of a client; none knows of the others.

    Attributes:
        repeats: budget of requests that are sent to another router.
    """

    def __init__(
        self, targets: str | Sequence[str], *, tracer: Tracer | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        named: Sequence[str] = (targets,) if isinstance(targets, str) else targets
        check_list("target", named, "HOST:PORT or a list of them")
        for address in named:
            check_address("target", address)
        addresses = tuple(dict.fromkeys(named))
        if not addresses:
            raise InvalidArgument("target", "is empty; at least one router's host:port is needed")
        service_config = retrying(_SERVICES) if len(addresses) == 1 else None
        self._all = [
            Router(address, tracer=tracer, headers=headers or {}, service_config=service_config)
            for address in addresses
        ]
        self._num_turns = 0
        self.repeats = RetryBudget(REPEAT_SHARE)

    @property
    def all(self) -> Sequence[Router]:
        return tuple(self._all)

    @property
    def are_all_avoided(self) -> bool:
        return all(router.is_avoided for router in self._all)

    async def close(self) -> None:
        """Closes all connections; running requests are cancelled."""
        for router in self._all:
            await router.channel.close()

    def next(self, tried: Collection[Router] = ()) -> Router:
        """The next in turn of those not tried, at best one that is connected and has not just failed.

        Else the one that failed first.
        """
        start = self._num_turns % len(self._all)
        self._num_turns += 1
        in_turn = [*self._all[start:], *self._all[:start]]
        left = [router for router in in_turn if router not in tried]
        failed_first = min(left, key=lambda router: router.failed_at_s or 0.0)
        well = [router for router in left if not router.is_avoided]
        connected = (router for router in well if not router.channel.is_down)
        chosen = next(connected, well[0] if well else failed_first)
        chosen.chosen()
        return chosen

    async def ask(self, call: Callable[[Router], Awaitable[_Answer]]) -> _Answer:
        """The answer of a router that is there. Raises Unavailable when none is."""
        tried: list[Router] = []
        while True:
            router = self.next(tried)
            try:
                answer = await call(router)
            except (Unavailable, DeadlineExceeded):  # the deadline of a plain call is ours
                router.failed()
                tried.append(router)
                if len(tried) == len(self._all):
                    raise
            else:
                router.answered()
                return answer
