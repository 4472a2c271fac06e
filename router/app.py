"""A router from start to end: wires the parts, tells when it serves, drains.

configuration ─► tokenizers ─► membership ─► ports bound ─► a pair is ready ─► ready line ─► SIGTERM: drain ─► exit
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Self

from kvferry.config import Config, ModelConfig
from kvferry.errors import InvalidArgument, RouterDraining
from kvferry.retry_budget import RetryBudget
from kvferry.rpc import RpcServer
from kvferry.rpc.server import STATUS_GRACE_S
from kvferry.telemetry import Telemetry, log_event
from proto.kvferry.v1 import admin_pb2_grpc, cache_pb2_grpc, inference_pb2_grpc, membership_pb2_grpc
from router import admin_service, cache_service, join_service
from router.auth import Authenticator
from router.block_index import BlockIndex
from router.cluster import Cluster
from router.discovery import Discovery
from router.generation_defaults import NO_DEFAULTS, GenerationDefaults, read_generation_defaults
from router.http import HttpServer, make_app
from router.membership import Membership, ModelIdentity
from router.metrics import RouterMetrics
from router.model_workers import ModelWorkers
from router.models import Model, Models
from router.openai.app import add_routes
from router.selection import PairSelector
from router.service import SERVICE_NAME, InferenceServicer
from router.serving import RouterParts, Serving
from router.text.tokenizer import TextTokenizer
from router.tools.formats import tool_format

logger = logging.getLogger(__name__)

MESSAGE_OVERHEAD_BYTES = 1 << 20
"""gRPC's own limit lies this far above ours: a request just too large gets our answer, which names the limit."""
MAX_WORKER_MESSAGE_BYTES = 4 << 20
DRAINING = "the router is shutting down"
SERVICES = (SERVICE_NAME, cache_service.SERVICE_NAME, admin_service.SERVICE_NAME, join_service.SERVICE_NAME)


class RouterApp:
    """A running router; use it as `async with`. Also how tests run one in their own process.

    Attributes:
        address: host:port of its gRPC server.
        http_url: URL of its HTTP server.
        membership: its workers.
        models: what it serves.
        serving: what clients ask for.
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
        if not (config.router.decode or config.router.accept_joins):
            raise InvalidArgument("router.decode", "names no decode worker, and router.accept_joins is false")
        tokenizers = self._load_tokenizers()
        self.membership = self._make_membership(tokenizers)
        metrics = RouterMetrics(telemetry.metrics, self.membership)
        self.models = self._make_models(tokenizers, metrics)
        self.serving = Serving(RouterParts(config, self.membership, self.models, metrics, telemetry))
        self._server = RpcServer(
            tracer=telemetry.tracer,
            max_message_bytes=config.router.max_request_bytes + MESSAGE_OVERHEAD_BYTES,
            background_methods=admin_service.BACKGROUND_METHODS | join_service.BACKGROUND_METHODS,
        )
        self._add_servicers()
        await self._stack.enter_async_context(self.membership)
        self.address = await self._server.start(config.router.grpc_listen, SERVICES, serving=False)
        self._stack.push_async_callback(self._server.drain, 0.0)
        self.http_url = (await self._stack.enter_async_context(self._make_http())).url
        self._stack.push_async_callback(self._server.calls.end_all, STATUS_GRACE_S, RouterDraining(DRAINING))
        await self._stack.enter_async_context(Discovery(self.membership, config.router))
        self._health_task = asyncio.create_task(self._tell_health())
        self._stack.push_async_callback(self._end_health)
        names = ", ".join(model.name for model in self.models.all)
        log_event(logger, "serving", address=self.address, http=self.http_url, model=names)

    def _make_http(self) -> HttpServer:
        registry = self._telemetry.metrics.registry
        app = make_app(registry, self.why_not_ready)
        add_routes(app, self.serving, self._server.calls, registry)
        return HttpServer(app, self._config.router.http_listen)

    def _add_servicers(self) -> None:
        config, server = self._config, self._server.grpc
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(self.serving), server)
        cache = cache_service.CacheServicer(config, self.membership, self.models)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
        admin = admin_service.AdminServicer(Authenticator(config), self.membership)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        joins = join_service.JoinServicer(config.router, self.membership)
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(joins, server)

    def _make_membership(self, tokenizers: Sequence[tuple[ModelConfig, TextTokenizer]]) -> Membership:
        config = self._config
        return Membership(
            [ModelIdentity(model.public_name, tokenizer.vocab_size, model.aliases) for model, tokenizer in tokenizers],
            local_prefill=config.router.has_local_prefill,
            progress_timeout_s=config.transfer.progress_timeout_s,
            max_message_bytes=MAX_WORKER_MESSAGE_BYTES,
            tracer=self._telemetry.tracer,
            blocks=BlockIndex(),
        )

    def _load_tokenizers(self) -> list[tuple[ModelConfig, TextTokenizer]]:
        loaded: list[tuple[ModelConfig, TextTokenizer]] = []
        for model in self._config.served_models:
            tokenizer = load_tokenizer(model)
            self._stack.callback(tokenizer.close)
            loaded.append((model, tokenizer))
        return loaded

    def _make_models(self, tokenizers: Sequence[tuple[ModelConfig, TextTokenizer]], metrics: RouterMetrics) -> Models:
        config = self._config
        retries = RetryBudget(config.router.retry_budget, config.router.max_queue)
        models: list[Model] = []
        for model, tokenizer in tokenizers:
            workers = ModelWorkers(self.membership, model.public_name)
            cluster = Cluster(
                workers=workers,
                selector=PairSelector(
                    workers,
                    config.tenants,
                    max_session_lead=config.router.max_session_lead,
                    count_session=metrics.count_session,
                ),
                retries=retries,
                progress_timeout_s=config.transfer.progress_timeout_s,
                recovery_wait_s=config.router.recovery_wait_s,
                max_attempts=config.router.max_attempts,
                min_moved_tokens=config.router.min_moved_tokens,
                tracer=self._telemetry.tracer,
                count_retry=metrics.count_retry,
                count_move=metrics.count_move,
            )
            form = tool_format(model.tool_format, tokenizer.chat_template.tool_source)
            models.append(
                Model(
                    model.public_name,
                    model.aliases,
                    tokenizer,
                    workers,
                    cluster,
                    form,
                    compact_json=model.compact_json,
                    defaults=_generation_defaults(model),
                )
            )
        return Models(models)

    def why_not_ready(self) -> tuple[str, ...]:
        """Why no request could be served now; empty when one could."""
        return (DRAINING,) if self._is_draining else self.models.missing

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether a request could be served within `timeout_s`, whatever its model."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(model.workers.missing for model in self.models.all):
                    await self.membership.changes.wait_next()
        except TimeoutError:
            return not self.models.missing
        return True

    async def drain(self, grace_s: float, hurry: asyncio.Event | None = None) -> None:
        """Refuses new requests; running ones get `grace_s`, or until `hurry`, and end with a status after that."""
        self._is_draining = True
        self.serving.drain()
        await self._end_health()  # else it might say SERVING again
        await self._server.drain(grace_s, hurry, RouterDraining(DRAINING))

    async def _tell_health(self) -> None:
        """Keeps the gRPC health service at what is true."""
        while True:
            number = self.membership.changes.number
            await self._server.set_serving(not self.models.missing)
            await self.membership.changes.wait_beyond(number)

    async def _end_health(self) -> None:
        self._health_task.cancel()
        await asyncio.gather(self._health_task, return_exceptions=True)


def load_tokenizer(model: ModelConfig) -> TextTokenizer:
    """The tokenizer of a configured model's folder."""
    if model.path is None:
        raise InvalidArgument(
            "model.path", f"is not set for {model.name}; it names the prepared folder that the tokenizer is read from"
        )
    return TextTokenizer.load(Path(model.path))


def _generation_defaults(model: ModelConfig) -> GenerationDefaults:
    """Those of a configured model's folder, told in the log where they are its own."""
    if model.generation_config == "none" or model.path is None:
        return NO_DEFAULTS
    defaults = read_generation_defaults(Path(model.path))
    if defaults != NO_DEFAULTS:
        log_event(logger, "generation_defaults", model=model.public_name, **asdict(defaults))
    return defaults
