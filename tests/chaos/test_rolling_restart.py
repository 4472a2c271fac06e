"""Every worker and router is drained and replaced, one after the other, under load: clients see pauses and no more.

8 streams ─► client ─┬─► router ─┬─► 2 prefill, 2 decode workers
                     └─► router ─┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosCluster, Member, chaos_cluster
from tests.chaos.load import SAMPLE_STREAMS, ClosedLoop, Window, summary
from tests.chaos.test_kills import MODELS

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

GRACE_S = 0.4
"""Some streams end within it, the others have to go on elsewhere."""
SOAK_S = 600.0

Report = Callable[[str], None]


async def replace(cluster: ChaosCluster, member: Member, *, by_order: bool) -> None:
    """Drains a process and starts another at its address; `by_order`: the worker is told by a router before SIGTERM."""
    if by_order:
        async with cluster.client.drain_worker(member.address) as progress:
            async for _ in progress:
                pass
    await member.drain()
    await member.start()
    await cluster.all_ready()


async def replace_all(
    folder: Path, model_name: str, duration_s: float, report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    """Round after round until the time is over, every second one of the workers by order of a router. Without any time,
    one round of a worker of each role and both routers."""
    caplog.set_level(logging.INFO, logger="kvferry.client_resume")
    model, windows, num_rounds = MODELS[model_name](folder), dict[str, list[Window]](), 0
    config = model.config.replace("shutdown", grace_s=GRACE_S)
    async with chaos_cluster(folder, config, num_routers=2) as cluster:
        async with ClosedLoop(cluster.client, model.questions, num_streams=SAMPLE_STREAMS) as loop:
            end_s = loop.now_s() + duration_s
            while num_rounds == 0 or loop.now_s() < end_s:
                members = cluster.members if duration_s else cluster.members[::2]
                for member in (*members, *cluster.routers):
                    begin_s = loop.now_s()
                    await replace(cluster, member, by_order=num_rounds % 2 == 1 and member.role != "router")
                    windows.setdefault(member.role, []).append(Window(begin_s, loop.now_s()))
                num_rounds += 1
            await loop.goes_on()
        said = [record.message for record in caplog.records]
        report(f"{summary(model.name, loop, windows)}; {said.count('response_resumed')} resumed by the client")
        loop.check()
        await cluster.all_idle()


async def test_streams_survive_a_rolling_restart(
    tmp_path: Path, report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    await replace_all(tmp_path, "scripted", 0.0, report, caplog)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 300)
@pytest.mark.parametrize("model_name", MODELS)
async def test_streams_survive_rolling_restarts_for_ten_minutes(
    tmp_path: Path, model_name: str, report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    await replace_all(tmp_path, model_name, SOAK_S, report, caplog)
