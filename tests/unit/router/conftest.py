"""A router in the test's own process, in front of scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.config import Config, ModelConfig, RouterConfig, ShutdownConfig, TenantConfig, TransferConfig
from kvferry.rpc import RpcChannel
from kvferry.telemetry import Telemetry, start_telemetry
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import inference_pb2_grpc
from router.app import RouterApp
from tests.support.fake_workers import FakeNetwork
from tests.support.tokenizers import write_chatml_folder


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    messages: list[pb.GenerateResponse]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for message in self.messages for token_id in message.delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(message.delta.text for message in self.messages)

    @property
    def started(self) -> pb.Started:
        return self.messages[0].started

    @property
    def finish(self) -> pb.ChoiceFinish:
        return self.messages[-2].finish

    @property
    def completed(self) -> pb.Completed:
        return self.messages[-1].completed


@dataclass(frozen=True, slots=True)
class Router:
    """A running router and a client of it."""

    app: RouterApp
    channel: RpcChannel
    telemetry: Telemetry
    exporter: InMemorySpanExporter

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel.grpc)

    async def generate(self, request: pb.GenerateRequest, timeout_s: float = 10.0) -> Answer:
        async with self.channel.stream(self.stub.Generate, request, timeout_s=timeout_s) as call:
            return Answer([message async for message in call])

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where there is none yet."""
        return self.telemetry.metrics.registry.get_sample_value(name, labels) or 0.0


StartRouter = Callable[..., AbstractAsyncContextManager[Router]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chatml_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_router(model_folder: Path) -> StartRouter:
    """`async with start_router(network) as router`; waits until it is ready unless told otherwise."""

    @asynccontextmanager
    async def start(
        network: FakeNetwork | None = None,
        *,
        wait: bool = True,
        progress_timeout_s: float = 5.0,
        aliases: tuple[str, ...] = (),
        models: tuple[ModelConfig, ...] = (),
        tenants: tuple[TenantConfig, ...] = (),
        **router: object,
    ) -> AsyncIterator[Router]:
        addresses = (
            {} if network is None else {"prefill": network.prefill_addresses, "decode": network.decode_addresses}
        )
        listen = {"grpc_listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}
        config = Config(
            model=ModelConfig(name="tiny", path=str(model_folder), aliases=aliases),
            models=models,
            tenants=tenants,
            router=RouterConfig.model_validate({**listen, **addresses, **router}),
            transfer=TransferConfig(progress_timeout_s=progress_timeout_s),
            shutdown=ShutdownConfig(grace_s=1.0),
        )
        exporter = InMemorySpanExporter()
        telemetry = start_telemetry(config.telemetry, "router", "router", exporter=exporter)
        async with RouterApp(config, telemetry) as app:
            if wait:
                assert await app.wait_ready(5.0)
            async with RpcChannel(app.address) as channel:
                yield Router(app, channel, telemetry, exporter)
        await telemetry.shutdown()

    return start


def ask(
    *token_ids: int,
    max_tokens: int | None = 8,
    temperature: float = 0.0,
    stop: tuple[str, ...] = (),
    label: str = "",
    **fields: object,
) -> pb.GenerateRequest:
    """A request with token ids as its prompt."""
    request = pb.GenerateRequest(request_id=label, sampling=pb.SamplingOptions(temperature=temperature))
    request.token_ids.ids.extend(token_ids or (5, 6, 7))
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    request.stopping.stop.extend(stop)
    request.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return request
