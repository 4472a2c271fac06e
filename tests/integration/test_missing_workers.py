"""Workers that are missing, from the router's start on or later: what can be served is, and readiness is the truth."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.config import Config
from kvferry.errors import Unavailable
from kvferry.rpc import RpcChannel
from kvferry.telemetry import start_telemetry
from router.app import RouterApp
from tests.support.commands import CommandServer, plain_environment
from tests.support.deployment import chat_folder, deployment_config
from tests.support.relay import Relay
from tests.support.worker_processes import worker_process
from tests.support.workers import free_address, running_worker, until

PROMPT = list(range(20, 50))
NUM_TOKENS = 8
AT_ONCE_S = 2.0
"""Far below every time limit of the product (`progress_timeout_s` is 5 s here), far above what a busy machine takes."""
READY_TIMEOUT_S = 10.0
DECODE_SPAN = "kvferry.v1.DecodeService/Decode"
ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


@dataclass(frozen=True, slots=True)
class Routed:
    """A router, and a client of it."""

    router: RouterApp
    client: AsyncClient
    config: Config

    async def check_serves(self) -> None:
        """EQ."""
        options = GenerateOptions(prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        completion = await self.client.complete(options)
        script = load_script_config(Path(self.config.model.path or ""))
        assert completion.choices[0].token_ids == reference_continuation(PROMPT, NUM_TOKENS, script)

    async def check_refuses(self, words: str) -> None:
        """At once."""
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(Unavailable, match=words):
                await self.client.complete(GenerateOptions(prompt=PROMPT, max_tokens=NUM_TOKENS))


@asynccontextmanager
async def routed(config: Config, *, prefill: Sequence[str], decode: Sequence[str]) -> AsyncIterator[Routed]:
    """The router starts at once, whoever of these is there."""
    telemetry = start_telemetry(config.telemetry, "router", "router")
    app = RouterApp(config.replace("router", prefill=prefill, decode=decode), telemetry)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(telemetry.shutdown)
        async with asyncio.timeout(AT_ONCE_S):
            router = await stack.enter_async_context(app)
        yield Routed(router, await stack.enter_async_context(AsyncClient(router.address)), config)


# -- lost later -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
async def test_without_prefill_nothing_reaches_decode_and_its_return_is_enough(tmp_path: Path) -> None:
    """R119."""
    config, address, exporter = (
        deployment_config(chat_folder(tmp_path / "model")),
        free_address(),
        InMemorySpanExporter(),
    )

    def num_decode_calls() -> int:
        return sum(span.name == DECODE_SPAN for span in exporter.get_finished_spans())

    async with (
        running_worker("decode", config, exporter=exporter) as decode,
        routed(config, prefill=[address], decode=[decode.address]) as deployment,
    ):
        for _ in range(2):  # killed, and once more
            async with worker_process(tmp_path, config, "prefill_svc", listen=address) as prefill:
                assert await deployment.router.wait_ready(READY_TIMEOUT_S)
                await deployment.check_serves()
                await until(lambda: num_decode_calls() > 0)
                prefill.send(signal.SIGKILL)
                await until(lambda: bool(deployment.router.models.missing))
            exporter.clear()
            await asyncio.gather(
                *(deployment.check_refuses(f"no prefill worker is ready .*{address}") for _ in range(20))
            )
            assert num_decode_calls() == 0 and decode.server.calls.num_running(frozenset({"Decode"})) == 0


# -- missing from the start -------------------------------------------------------------------------------------------


async def check_readiness(
    commands: CommandServer, deployment: Routed, down: Collection[str], addresses: Mapping[str, str]
) -> None:
    """Health over gRPC and HTTP, and `kvferry workers`, say what is true."""
    is_ready = "prefill-0" not in down and not {"decode-0", "decode-1"} <= set(down)
    async with RpcChannel(deployment.router.address) as channel, httpx.AsyncClient() as http:
        health = await health_pb2_grpc.HealthStub(channel.grpc).Check(health_pb2.HealthCheckRequest())
        response = await http.get(f"{deployment.router.http_url}/health")
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert health.status == (serving if is_ready else not_serving)
    assert response.status_code == (200 if is_ready else 503)
    if not is_ready:
        told = " ".join(response.json()["reasons"])
        assert "connecting" in told and any(addresses[name] in told for name in down)
    shown = {worker["address"]: worker for worker in await workers_command(commands, deployment.router.address)}
    states = {name: str(shown[address]["state"]) for name, address in addresses.items()}
    assert states == {name: "connecting" if name in down else "ready" for name in addresses}
    assert all(shown[addresses[name]]["reason"] for name in down)


async def workers_command(commands: CommandServer, address: str) -> list[dict[str, object]]:
    """What `kvferry workers --json` writes."""
    done = await commands.run("workers", "--json", "--router", address, environment=plain_environment())
    shown: list[dict[str, object]] = json.loads(done.stdout)
    return shown


@pytest.mark.processes
@pytest.mark.parametrize(
    ("down", "how"),
    [
        (["decode-1"], "refused"),
        (["decode-1"], "silent"),
        (["prefill-0"], "silent"),
        (list(ROLES), "refused"),
        pytest.param(["prefill-0"], "refused", marks=pytest.mark.soak),
        pytest.param(list(ROLES), "silent", marks=pytest.mark.soak),
    ],
)
async def test_a_router_starts_with_workers_missing_and_tells_the_truth(
    tmp_path: Path, down: list[str], how: str, commands: CommandServer
) -> None:
    """R121: nobody listens at their addresses, or what listens there never answers."""
    config = deployment_config(chat_folder(tmp_path / "model"), timeout_s=1.0)
    async with AsyncExitStack() as stack:
        relays = {name: await stack.enter_async_context(Relay()) for name in ROLES}
        for name, role in ROLES.items():
            worker = await stack.enter_async_context(running_worker(role, config, worker_id=name))
            relays[name].forward_to(worker.address)
        for name in down:
            await relays[name].refuse() if how == "refused" else relays[name].hold()
        addresses = {name: relay.address for name, relay in relays.items()}
        of_role = {role: [addresses[name] for name in ROLES if ROLES[name] == role] for role in ("prefill", "decode")}
        deployment = await stack.enter_async_context(routed(config, **of_role))
        membership = deployment.router.membership
        await until(lambda: sum(worker.status is not None for worker in membership.workers) == len(ROLES) - len(down))
        await check_readiness(commands, deployment, down, addresses)
        if down == ["decode-1"]:
            await deployment.check_serves()
        else:
            await deployment.check_refuses("no prefill worker is ready")
        for name in down:
            relays[name].pass_on()
            await relays[name].cut()
        await until(
            lambda: len([worker for worker in membership.workers if worker.state.value == "ready"]) == len(ROLES)
        )
        await check_readiness(commands, deployment, [], addresses)
        await deployment.check_serves()
