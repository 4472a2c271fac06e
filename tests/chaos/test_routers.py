"""Routers that are stopped for a while, one after the other: their connections stay open and bring nothing.

streams ─► client ─┬─► router 0 ─┬─► 2 prefill, 2 decode workers (scripted)
                   └─► router 1 ─┘
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.client import AsyncClient
from tests.chaos.load import SAMPLE_STREAMS, ClosedLoop, Window, scripted_questions, summary
from tests.support.routers import routed
from tests.support.workers import until

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

PROGRESS_TIMEOUT_S = 2.0
"""Above what a busy machine of two cores is ever late by."""
STOPPED_S = 3 * PROGRESS_TIMEOUT_S
"""Long enough for every stream to leave, and for one that then tries whether it is back."""
NUM_TOKENS = 100
SAMPLE_STOPS, SOAK_STOPS = 1, 30

Report = Callable[[str], None]


async def stop_again_and_again(folder: Path, num_stops: int, report: Report) -> None:
    """No stream may show it: each is complete and equal to the truth, and none stands still for long."""
    windows: list[Window] = []
    async with (
        routed(folder) as deployment,
        AsyncClient([r.address for r in deployment.routers], progress_timeout_s=PROGRESS_TIMEOUT_S) as client,
    ):
        questions = scripted_questions(deployment.model, NUM_TOKENS)
        async with ClosedLoop(client, questions, num_streams=SAMPLE_STREAMS) as loop:
            for number in range(num_stops):
                router, begin_s = deployment.routers[number % 2], loop.now_s()
                router.send(signal.SIGSTOP)
                try:
                    await until(lambda begin_s=begin_s: loop.now_s() > begin_s + STOPPED_S)  # type: ignore[misc]
                finally:
                    router.send(signal.SIGCONT)
                await loop.goes_on()
                windows.append(Window(begin_s, loop.now_s()))
        report(summary("2 routers", loop, {"SIGSTOP of a router": windows}))
        loop.check()
        assert max(loop.pause(window) for window in windows) < 2 * PROGRESS_TIMEOUT_S, "none waited for it"
        assert "request_resumed" in deployment.routers[1].log
        await until(lambda: all(watch.is_idle for watch in deployment.watches))


async def test_streams_leave_a_router_that_is_stopped(tmp_path: Path, report: Report) -> None:
    await stop_again_and_again(tmp_path, SAMPLE_STOPS, report)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_streams_survive_thirty_stops_of_routers(tmp_path: Path, report: Report) -> None:
    await stop_again_and_again(tmp_path, SOAK_STOPS, report)
