"""Sustained load with the exporter of spans at work: no process logs wake-ups of its gRPC loop for nothing (R091)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry.client import AsyncClient, GenerateOptions
from tests.chaos.cluster import chaos_cluster
from tests.support.deployment import chat_folder, deployment_config
from tests.support.workers import free_address

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

NUM_CLIENTS, TIMEOUT_S = 16, 60.0
SIGNS = ("BlockingIOError", "Resource temporarily unavailable", "would block", "Traceback")


@pytest.mark.parametrize("num_requests", [300, pytest.param(20_000, marks=pytest.mark.soak)])
async def test_no_process_logs_a_wake_up_for_nothing(tmp_path: Path, num_requests: int) -> None:
    config = deployment_config(chat_folder(tmp_path / "model"), timeout_s=10.0)
    config = config.replace("telemetry", otlp_endpoint=free_address(), log_level="debug")  # where nobody listens
    async with chaos_cluster(Path(str(config.model.path)), config) as cluster:
        turns = iter(range(num_requests))

        async def ask(client: AsyncClient) -> None:
            for number in turns:
                options = GenerateOptions(prompt=[1 + number % 200, 2, 3], max_tokens=20, ignore_eos=True)
                completion = await client.complete(options, timeout_s=TIMEOUT_S)
                assert completion.usage.completion_tokens == 20

        await asyncio.gather(*(ask(cluster.client) for _ in range(NUM_CLIENTS)))
        for member in (*cluster.routers, *cluster.members):
            assert "request_finished" in member.log or member.role != "router"
            assert not [sign for sign in SIGNS if sign in member.log], member.log[-2000:]
