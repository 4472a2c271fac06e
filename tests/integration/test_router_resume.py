"""Routers that are killed and started again under load, as real processes: no stream may show it (R120, R123, R130).

8 streams ─► client ─┬─► router 0 ─┬─► 2 prefill, 2 decode workers (scripted)
                     └─► router 1 ─┘
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.client import AsyncClient, ChatMessage, Completion, GenerateOptions
from kvferry.sync_client import Client
from tests.support.routers import routed
from tests.support.workers import until

NUM_STREAMS = 8
NUM_TOKENS = 60
KILLS = (signal.SIGKILL, signal.SIGTERM)
"""Of one router after the other."""
SOAK_KILLS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL) * 3
REQUEST_TIMEOUT_S = 60.0

pytestmark = pytest.mark.processes


def options_of(number: int) -> GenerateOptions:
    """Drawn noise, text and chat prompts that each router tokenises, several choices, stop strings that may come."""
    prompts = ("Once upon a time", [5, 6, 7, 8, 9, 10 + number], [ChatMessage("user", f"number {number}")])
    return GenerateOptions(
        prompt=prompts[number % 3],
        max_tokens=NUM_TOKENS,
        min_tokens=NUM_TOKENS - 20,
        n=1 + number % 2,
        seed=1000 + number,
        stop=["a", "e"] if number % 4 == 0 else (),
        request_id="the same label for all",
    )


def shown(completion: Completion) -> list[object]:
    return [(choice.token_ids, choice.text, choice.finish) for choice in completion.choices]


async def all_advance(num_tokens: Sequence[int]) -> None:
    """Returns once every stream has a few tokens more."""
    wanted = [number + 5 for number in num_tokens]
    await until(lambda: all(now >= then for now, then in zip(num_tokens, wanted, strict=True)), 60.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(SOAK_KILLS, marks=pytest.mark.soak)], ids=["sample", "soak"])
async def test_killed_routers_change_no_stream(
    tmp_path: Path, kills: Sequence[signal.Signals], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvferry.client_resume")
    async with routed(tmp_path) as deployment, AsyncClient([r.address for r in deployment.routers]) as client:
        golden = [
            await client.complete(options_of(number), timeout_s=REQUEST_TIMEOUT_S) for number in range(NUM_STREAMS)
        ]
        num_tokens, has_ended = [0] * NUM_STREAMS, asyncio.Event()

        async def stream(number: int) -> int:
            """Over and over until the last kill, each response equal to the uncut one; how many there were."""
            for num_responses in itertools.count():
                if has_ended.is_set():
                    return num_responses
                completion = Completion()
                async with client.generate(options_of(number), timeout_s=REQUEST_TIMEOUT_S) as events:
                    async for event in events:
                        completion.add(event)
                        num_tokens[number] += len(event.delta.token_ids)
                completion.check_complete()
                assert shown(completion) == shown(golden[number])
                assert completion.usage.prompt_tokens == golden[number].usage.prompt_tokens
                assert completion.usage.completion_tokens == golden[number].usage.completion_tokens
            raise AssertionError("unreachable")

        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(stream(number)) for number in range(NUM_STREAMS)]
            for number, kill in enumerate(kills):
                await all_advance(num_tokens)
                router = deployment.routers[number % 2]
                await router.end(kill)
                await router.start()
            has_ended.set()
        assert all(task.result() > 0 for task in streams)
        await until(lambda: all(watch.is_idle for watch in deployment.watches))
    resumed = [record for record in caplog.records if record.message == "response_resumed"]
    assert len(resumed) >= len(kills)
    assert all(vars(record)["fields"]["pause_s"] < REQUEST_TIMEOUT_S for record in resumed)


async def test_one_router_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """Text goes on behind what came, from a router that knows nothing of it."""
    async with (
        routed(tmp_path, num_routers=1, num_workers=1) as deployment,
        AsyncClient(deployment.routers[0].address, resume=True) as client,
    ):
        (router,), options, was_killed = deployment.routers, options_of(3), False
        golden, completion = await client.complete(options, timeout_s=REQUEST_TIMEOUT_S), Completion()
        async with client.generate(options, timeout_s=REQUEST_TIMEOUT_S) as events:
            async for event in events:
                completion.add(event)
                if not was_killed and sum(len(choice.token_ids) for choice in completion.choices) >= 20:
                    was_killed = True
                    await router.end()
                    await router.start()
        assert shown(completion) == shown(golden)
        assert "request_resumed" in router.log
        await until(lambda: all(watch.is_idle for watch in deployment.watches))


async def test_a_synchronous_client_outlives_a_router_too(tmp_path: Path) -> None:
    """With a session, whose worker both routers know by its address."""
    options = dataclasses.replace(options_of(2), session_id="s")
    pieces: list[str] = []

    def program(addresses: Sequence[str]) -> str:
        with Client(addresses) as client:
            golden = client.complete(options, timeout_s=REQUEST_TIMEOUT_S).text
            with client.stream(options, timeout_s=REQUEST_TIMEOUT_S) as text:
                pieces.extend(text)  # one by one
        return golden

    async with routed(tmp_path, num_workers=1) as deployment:
        reading = asyncio.create_task(asyncio.to_thread(program, [router.address for router in deployment.routers]))
        await until(lambda: len(pieces) >= 5 or reading.done(), 60.0)
        for router in deployment.routers:  # whichever serves it
            await router.end()
        await deployment.routers[0].start()
        assert await reading == "".join(pieces)
        assert "request_resumed" in deployment.routers[0].log
        await deployment.routers[1].start()
        await until(lambda: all(watch.is_idle for watch in deployment.watches))
