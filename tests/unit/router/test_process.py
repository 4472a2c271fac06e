"""The router as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.config import Config, ModelConfig, to_toml
from kvferry.errors import Unavailable
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import inference_pb2_grpc
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.conftest import ask

OUTPUT = list(range(35, 60))

pytestmark = pytest.mark.processes


@asynccontextmanager
async def router_process(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m router` with a configuration file; killed at the end if it still runs."""
    config = folder / "kvferry.toml"
    config.write_text(to_toml(Config(model=ModelConfig(name="tiny", path=str(folder)))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--config", str(config)),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def addresses(network: FakeNetwork) -> list[str]:
    return ["--prefill", ",".join(network.prefill_addresses), "--decode", ",".join(network.decode_addresses)]


ANY_PORTS = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")


async def ready_line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = json.loads(await process.stdout.readline())
    assert isinstance(line, dict)
    return line


async def test_ready_line_then_serves_then_drains_on_sigterm(model_folder: Path) -> None:
    async with (
        FakeNetwork(OUTPUT) as network,
        router_process(model_folder, *ANY_PORTS, *addresses(network)) as process,
    ):
        ready = await ready_line(process)
        assert ready["serving"] is True
        assert ready["http"].startswith("http://127.0.0.1:")
        async with RpcChannel(ready["address"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
            async with channel.stream(stub.Generate, ask(max_tokens=3)) as call:
                assert [message async for message in call][-1].completed.usage.completion_tokens == 3
            network.hold(Point.TOKEN, 3)
            with pytest.raises(Unavailable, match="shutting down"):
                async with channel.stream(stub.Generate, ask()) as running:
                    await network.reached(Point.TOKEN, 3)
                    process.send_signal(signal.SIGTERM)
                    await _not_serving(channel)
                    process.send_signal(signal.SIGTERM)  # the second one ends the grace period
                    async for _ in running:
                        pass
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        await network.all_ended()


async def _not_serving(channel: RpcChannel) -> None:
    """Returns when the health service says so."""
    stub = health_pb2_grpc.HealthStub(channel.grpc)
    async for message in stub.Watch(health_pb2.HealthCheckRequest()):
        if message.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            return


async def test_a_port_in_use_is_one_line_and_no_traceback(model_folder: Path) -> None:
    async with FakeNetwork(OUTPUT) as network:
        taken = network.decode[0].address
        arguments = ("--listen", taken, "--http", "127.0.0.1:0", *addresses(network))
        async with router_process(model_folder, *arguments) as process:
            async with asyncio.timeout(60):
                _, errors = await process.communicate()
            assert process.returncode == 1
            assert f"error: cannot listen on {taken}" in errors.decode()
            assert "Traceback" not in errors.decode()


async def test_the_router_never_loads_torch() -> None:
    code = "import sys, router.__main__, router.app; sys.exit(any(name in sys.modules for name in ('torch', 'triton')))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    async with asyncio.timeout(60):
        assert await process.wait() == 0
