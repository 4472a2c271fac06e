"""Counters, gauges and the HTTP side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.errors import FailedPrecondition, InvalidArgument, Unavailable
from router.block_index import BlockIndex
from router.service import SERVICE_NAME
from tests.support.fake_workers import FakeNetwork, Point
from tests.support.workers import until
from tests.unit.router.conftest import Router, StartRouter, ask

OUTPUT = list(range(35, 60))


def outcomes(router: Router) -> dict[tuple[str, str], float]:
    """Ended requests by outcome and phase."""
    return {
        (sample.labels["outcome"], sample.labels["phase"]): sample.value
        for family in router.telemetry.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "kvferry_requests_total"
    }


async def test_started_is_finished_plus_failed_plus_cancelled(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_prefill=2) as network, start_router(network) as router:
        await router.generate(ask(max_tokens=4))
        network.fail(Point.PREFILL_START, Unavailable("died"))
        await router.generate(ask(max_tokens=4))  # retried
        with pytest.raises(InvalidArgument):
            await router.generate(ask(temperature=-1))
        network.fail(Point.DECODE_START, FailedPrecondition("no"))
        with pytest.raises(FailedPrecondition):
            await router.generate(ask())
        network.hold(Point.TOKEN, 3)
        call, num_tokens = router.stub.Generate(ask()), 0
        async for message in call:
            num_tokens += len(message.delta.token_ids)
            if num_tokens == 3:
                break
        assert router.sample("kvferry_requests_running") == 1
        assert router.sample("kvferry_requests_waiting") == 0
        call.cancel()
        await network.all_ended()
        await router.app.drain(1.0)
        assert outcomes(router) == {
            ("finished", "done"): 2,
            ("failed", "validation"): 1,
            ("failed", "registering"): 1,
            ("cancelled", "decoding"): 1,
        }
        assert router.sample("kvferry_requests_started_total") == 5
        served = {"gen_ai_request_model": "tiny", "kvferry_tier": "standard"}
        assert router.sample("gen_ai_server_time_to_first_token_seconds_count", **served) == 3
        assert router.sample("gen_ai_server_time_per_output_token_seconds_count", **served) == 3
        assert router.sample("kvferry_retries_total", reason="UNAVAILABLE") == 1
        assert router.sample("kvferry_requests_running") == router.sample("kvferry_requests_waiting") == 0


async def test_workers_are_shown_on_metrics(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router, httpx.AsyncClient() as http:
        response = await http.get(f"{router.app.http_url}/metrics")
        text = response.text
        decode, prefill = network.decode[0].address, network.prefill[0].address
        blocks = f'kvferry_worker_blocks{{address="{decode}",role="decode",state="free",worker="decode-0"}} 1000.0'
        assert blocks in text
        of_decode = f'address="{decode}",role="decode",worker="decode-0"'
        for name in ("integrity_faults", "unsound_blocks"):
            assert f"kvferry_worker_{name}_total{{{of_decode}}} 0.0" in text
        assert f'kvferry_worker_ready{{address="{prefill}",role="prefill",worker="prefill-0"}} 1.0' in text
        assert network.calls == []


async def test_what_is_known_of_prefix_caches_is_on_metrics(start_router: StartRouter) -> None:
    """Also that the index has no room for all of it."""
    network = FakeNetwork(OUTPUT)
    network.decode[0].block_hashes = [bytes(32), bytes(31) + b"1"]
    with patch("router.app.BlockIndex", partial(BlockIndex, max_blocks=1)):
        async with network, start_router(network) as router:
            of_worker = {
                worker.role: {"address": worker.address, "role": worker.role, "worker": worker.name}
                for worker in network.workers
            }
            name = "kvferry_worker_known_blocks"
            await until(lambda: router.sample(f"{name}_partial", **of_worker["decode"]) == 1)
            assert router.sample(name, **of_worker["decode"]) == 1
            assert router.sample(f"{name}_partial", **of_worker["prefill"]) == 0
            assert router.sample(name, **of_worker["prefill"]) == 0


async def test_health_is_whether_a_request_could_be_served(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router, httpx.AsyncClient() as http:
        url = router.app.http_url
        assert (await http.get(f"{url}/health")).status_code == 200
        await network.decode[0].stop()
        while not router.app.models.missing:
            await router.app.membership.changes.wait_next()
        response = await http.get(f"{url}/health")
        assert response.status_code == 503
        assert network.decode[0].address in response.json()["reasons"][0]
        assert (await http.get(f"{url}/live")).status_code == 200
        await network.decode[0].start()
        assert await router.app.wait_ready(5)
        assert (await http.get(f"{url}/health")).status_code == 200
        await router.app.drain(0.0)
        assert (await http.get(f"{url}/health")).json()["reasons"] == ["the router is shutting down"]


async def test_grpc_health_follows_the_workers_and_the_drain(start_router: StartRouter) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        stub = health_pb2_grpc.HealthStub(router.channel.grpc)
        states = aiter(stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME)))
        async with asyncio.timeout(10):
            assert await _next_other(states, not_serving) == serving
            await network.prefill[0].stop()
            assert await _next_other(states, serving) == not_serving
            await network.prefill[0].start()
            assert await _next_other(states, not_serving) == serving
            draining = asyncio.create_task(router.app.drain(0.0))
            assert await _next_other(states, serving) == not_serving
            await draining


async def _next_other(states: AsyncIterator[Any], state: int) -> int:
    """The next state told that is not `state`."""
    async for message in states:
        if message.status != state:
            return int(message.status)
    raise AssertionError("the health stream ended")


@pytest.mark.parametrize("setting", ["grpc_listen", "http_listen"])
async def test_a_port_in_use_is_named(start_router: StartRouter, setting: str) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        address = router.app.address if setting == "grpc_listen" else router.app.http_url.removeprefix("http://")
        with pytest.raises(FailedPrecondition, match=f"cannot listen on {address}"):
            async with start_router(network, wait=False, **{setting: address}):
                pass
