"""A whole deployment in the test's own event loop: real router, real workers, real gRPC, one exporter for all spans."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.scripted import SCRIPT_FILE
from kvferry.client import AsyncClient
from kvferry.config import Config, EngineConfig, ModelConfig, RouterConfig, TransferConfig
from kvferry.telemetry import Telemetry, start_telemetry
from kvferry.worker_process import RunningWorker
from router.app import RouterApp
from tests.support.relay import Relay
from tests.support.tokenizers import write_chatml_folder
from tests.support.workers import DEFAULTS, assert_idle, free_address, running_worker

LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs, and a client of it."""

    router: RouterApp
    prefill: Sequence[RunningWorker]
    decode: Sequence[RunningWorker]
    client: AsyncClient
    telemetry: Telemetry
    exporter: InMemorySpanExporter

    async def assert_idle(self) -> None:
        """Nothing is left of any request: LEAK."""
        await assert_idle(*self.prefill, *self.decode)
        assert self.router.serving.num_running == 0


def chat_folder(folder: Path, **script: object) -> Path:
    """A scripted model with a tokenizer and a chat template."""
    write_chatml_folder(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / SCRIPT_FILE).write_text(json.dumps({"vocab_size": vocab_size, **script}))
    return folder


def deployment_config(folder: Path, *, dtype: str = "float32", timeout_s: float = 5.0, **engine: Any) -> Config:
    """Configuration over a model folder; small blocks and a small pool unless `engine` says otherwise."""
    values = {"block_size": 4, "num_blocks": 128, **engine}
    return Config(
        model=ModelConfig(name=folder.name, path=str(folder), dtype=dtype),  # type: ignore[arg-type]
        engine=EngineConfig(**values),
        transfer=TransferConfig(progress_timeout_s=timeout_s, transport=DEFAULTS.transport),
        router=RouterConfig(grpc_listen=LOOPBACK, http_listen=LOOPBACK),
    )


@asynccontextmanager
async def running_deployment(
    config: Config,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    client_tracing: bool = False,
    ship_relay: Relay | None = None,
) -> AsyncIterator[Deployment]:
    """A router with its workers for the length of the block; `ship_relay` stands in prefill's hop to a single decode
    worker."""
    exporter = InMemorySpanExporter()
    async with AsyncExitStack() as stack:

        async def workers(
            role: str, number: int, listen: str = LOOPBACK, advertise: str | None = None
        ) -> list[RunningWorker]:
            return [
                await stack.enter_async_context(
                    running_worker(
                        role,
                        config,
                        listen=listen,
                        advertise=advertise,
                        worker_id=f"{role}-{index}",
                        exporter=exporter,
                    )
                )
                for index in range(number)
            ]

        prefill = await workers("prefill", num_prefill)
        if ship_relay is None:
            decode = await workers("decode", num_decode)
            decode_addresses = [worker.address for worker in decode]
        else:
            decode_addresses = [free_address()]
            ship_relay.forward_to(decode_addresses[0])
            decode = await workers("decode", 1, listen=decode_addresses[0], advertise=ship_relay.address)
        router_config = config.replace(
            "router", prefill=[worker.address for worker in prefill], decode=decode_addresses
        )
        telemetry = start_telemetry(config.telemetry, "router", "router", exporter=exporter)
        stack.push_async_callback(telemetry.shutdown)
        router = await stack.enter_async_context(RouterApp(router_config, telemetry))
        assert await router.wait_ready(10.0), router.why_not_ready()
        tracer = telemetry.tracer if client_tracing else None
        client = await stack.enter_async_context(AsyncClient(router.address, tracer=tracer))
        yield Deployment(router, prefill, decode, client, telemetry, exporter)
