"""A router from start to end: wires the parts, tells when it serves, drains.

configuration ─► tokenizer ─► membership ─► ports bound ─► a pair is ready ─► ready line ─► SIGTERM: drain ─► exit
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from kvferry.config import Config
from kvferry.errors import InvalidArgument
from kvferry.rpc import RpcServer
from kvferry.telemetry import Telemetry, log_event
from proto.kvferry.v1 import admin_pb2_grpc, cache_pb2_grpc, inference_pb2_grpc
from router import admin_service, cache_service
from router.admission import RetryBudget
from router.auth import Authenticator
from router.cluster import Cluster
from router.http import HttpServer, make_app
from router.membership import Membership
from router.metrics import RouterMetrics
from router.selection import PairSelector
from router.service import SERVICE_NAME, InferenceServicer, RouterParts
from router.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

MESSAGE_OVERHEAD_BYTES = 1 << 20
"""gRPC's own limit lies this far above ours: a request just too large gets our answer, which names the limit."""
MAX_WORKER_MESSAGE_BYTES = 4 << 20


class RouterApp:
    """A running router; use it as `async with`. Also how tests run one in their own process.

    Attributes:
        address: host:port of its gRPC server.
        http_url: URL of its HTTP server.
        membership: its workers.
        servicer: its public service.
    """

    def __init__(self, config: Config, telemetry: Telemetry) -> None:
        self._config = config
        self._telemetry = telemetry
        self._is_draining = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config, telemetry = self._config, self._telemetry
        if not config.router.decode:
            raise InvalidArgument("router.decode", "no decode worker is configured; at least one address is needed")
        tokenizer = load_tokenizer(config)
        self._stack.callback(tokenizer.close)
        self.membership = Membership(
            prefill=config.router.prefill,
            decode=config.router.decode,
            progress_timeout_s=config.transfer.progress_timeout_s,
            max_message_bytes=MAX_WORKER_MESSAGE_BYTES,
            vocab_size=tokenizer.vocab_size,
            tracer=telemetry.tracer,
        )
        metrics = RouterMetrics(telemetry.metrics, self.membership)
        self.servicer = InferenceServicer(
            RouterParts(config, self.membership, tokenizer, self._cluster(metrics), metrics, telemetry)
        )
        self._server = RpcServer(
            tracer=telemetry.tracer,
            max_message_bytes=config.router.max_request_bytes + MESSAGE_OVERHEAD_BYTES,
            background_methods=admin_service.BACKGROUND_METHODS,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.servicer, self._server.grpc)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self._cache_servicer(), self._server.grpc)
        admin = admin_service.AdminServicer(Authenticator(config), self.membership)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server.grpc)
        services = (SERVICE_NAME, cache_service.SERVICE_NAME, admin_service.SERVICE_NAME)
        self.address = await self._server.start(config.router.grpc_listen, services, serving=False)
        self._stack.push_async_callback(self._server.drain, 0.0)
        http = HttpServer(make_app(telemetry.metrics.registry, self.why_not_ready), config.router.http_listen)
        self.http_url = (await self._stack.enter_async_context(http)).url
        await self._stack.enter_async_context(self.membership)
        self._health_task = asyncio.create_task(self._tell_health())
        self._stack.push_async_callback(self._end_health)
        log_event(logger, "serving", address=self.address, http=self.http_url, model=config.model.public_name)

    def _cache_servicer(self) -> cache_service.CacheServicer:
        return cache_service.CacheServicer(
            Authenticator(self._config),
            self.membership,
            {tier.rank: tier.name for tier in self._config.tiers},
            self.servicer.limits,
            self.servicer.tokenize,
        )

    def _cluster(self, metrics: RouterMetrics) -> Cluster:
        config = self._config
        return Cluster(
            membership=self.membership,
            selector=PairSelector(self.membership, config.tenants),
            retries=RetryBudget(config.router.retry_budget, config.router.max_queue),
            progress_timeout_s=config.transfer.progress_timeout_s,
            recovery_wait_s=config.router.recovery_wait_s,
            max_attempts=config.router.max_attempts,
            tracer=self._telemetry.tracer,
            count_retry=metrics.count_retry,
        )

    def why_not_ready(self) -> tuple[str, ...]:
        """Why no request could be served now; empty when one could."""
        return ("the router is shutting down",) if self._is_draining else self.membership.missing

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether a request could be served within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.membership.missing:
                    await self.membership.wait_changed()
        except TimeoutError:
            return False
        return True

    async def drain(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Refuses new requests; running ones get `grace_s`, or until `hurry`, and end with a status after that."""
        self._is_draining = True
        self.servicer.drain()
        await self._end_health()  # else it might say SERVING again
        await self._server.drain(grace_s, hurry)

    async def _tell_health(self) -> None:
        """Keeps the gRPC health service at what is true."""
        while True:
            await self._server.set_serving(not self.membership.missing)
            await self.membership.wait_changed()

    async def _end_health(self) -> None:
        self._health_task.cancel()
        await asyncio.gather(self._health_task, return_exceptions=True)


def load_tokenizer(config: Config) -> TextTokenizer:
    """The tokenizer of the configured model folder."""
    if config.model.path is None:
        raise InvalidArgument("model.path", "is not set; it names the prepared model folder the tokenizer is read from")
    return TextTokenizer.load(Path(config.model.path))
