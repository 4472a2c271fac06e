"""Links that are cut, half-open, parted for a while, late or slow, in each hop: tokens stay right and streams go on.

A relay misbehaves in front of a random worker: in the router's hop to it, or in prefill's hop to a decode worker. Hops
of the others stay well, so that there is always a pair that serves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.client import AsyncClient, GenerateOptions
from kvferry.errors import Unavailable
from tests.chaos.cluster import ChaosCluster, chaos_cluster
from tests.chaos.load import NUM_STREAMS, SAMPLE_STREAMS, ClosedLoop, Window, scripted_questions, summary
from tests.support.deployment import chat_folder, deployment_config
from tests.support.relay import Direction, Relay

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

PROGRESS_TIMEOUT_S = 1.0
NUM_TOKENS = 40
SOAK_ROUNDS = 5
RETRY_BUDGET = 1.0
"""Troubles follow each other faster than a budget of a tenth refills, each at half of the requests in flight."""
LATE_S = 0.1
"""Less than the progress timeout: slow, and nobody is lost."""
FAR_TOO_LATE_S = 2.5 * PROGRESS_TIMEOUT_S
SLOW_BYTES_PER_S = 20_000
"""Enough for heartbeats and tokens, a long time for the blocks of a prompt."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scene:
    """A link of a running deployment that is about to misbehave.

    Attributes:
        relay: stands in the link.
        noticed: returns when the router gives the worker behind it no more work; at once where it is not the router's.
    """

    loop: ClosedLoop
    relay: Relay
    noticed: Callable[[], Awaitable[None]]


async def cut(scene: Scene) -> None:
    """All connections are reset, and new ones may be made at once."""
    await scene.relay.cut()


async def cut_and_refuse(scene: Scene) -> None:
    """As where a worker has died with its machine up."""
    await scene.relay.refuse()
    await scene.relay.cut()
    await scene.noticed()


async def half_open(scene: Scene) -> None:
    """As where a machine has lost its power: connections stay, and nothing comes any more."""
    scene.relay.drop()
    await scene.noticed()


async def one_way(scene: Scene) -> None:
    """It hears and is not heard."""
    scene.relay.drop(Direction.FROM_TARGET)
    await scene.noticed()


async def parted(scene: Scene) -> None:
    """Nothing passes for longer than anybody waits, then everything does, late."""
    scene.relay.hold()
    await scene.noticed()
    await asyncio.sleep(PROGRESS_TIMEOUT_S)  # what comes after it has to be too late


async def late(scene: Scene) -> None:
    scene.relay.delay(LATE_S)


async def far_too_late(scene: Scene) -> None:
    scene.relay.delay(FAR_TOO_LATE_S)


async def slow(scene: Scene) -> None:
    scene.relay.throttle(SLOW_BYTES_PER_S)


Trouble = Callable[[Scene], Awaitable[None]]
SAMPLE: tuple[Trouble, ...] = (cut, half_open, parted)
ALL: tuple[Trouble, ...] = (*SAMPLE, late, slow, cut_and_refuse, one_way, far_too_late)


@dataclass(frozen=True, slots=True)
class Hop:
    """Between which processes the link lies."""

    name: str
    role: str
    is_routers: bool

    def scene(self, cluster: ChaosCluster, loop: ClosedLoop, rng: random.Random) -> Scene:
        """A link to a random worker."""
        member = rng.choice(cluster.of_role(self.role))
        relay = member.router_relay if self.is_routers else member.ship_relay
        assert relay is not None

        async def noticed() -> None:
            if self.is_routers:
                await cluster.noticed(member)

        return Scene(loop, relay, noticed)


HOPS = (
    Hop("router to prefill", "prefill", is_routers=True),
    Hop("router to decode", "decode", is_routers=True),
    Hop("prefill to decode", "decode", is_routers=False),
)


async def trouble_a_hop(
    folder: Path, hop: Hop, transport: str, troubles: Sequence[Trouble], report: Report, *, num_rounds: int = 1
) -> None:
    """One trouble after the other at a random worker; the streams go on in each, and all is ready before the next."""
    path = chat_folder(folder / "scripted", step_delay_s=0.005, token_delay_s=0.0001)
    config = deployment_config(path, timeout_s=PROGRESS_TIMEOUT_S, num_blocks=1024, max_chunk_tokens=32)
    config = config.replace("transfer", transport=transport).replace("router", retry_budget=RETRY_BUDGET)
    rng, windows = random.Random(num_rounds), dict[str, list[Window]]()
    async with chaos_cluster(folder, config, has_relays=True) as cluster:
        num_streams = NUM_STREAMS if num_rounds > 1 else SAMPLE_STREAMS
        async with ClosedLoop(cluster.client, scripted_questions(path, NUM_TOKENS), num_streams=num_streams) as loop:
            for trouble in [*troubles] * num_rounds:
                scene, begin_s = hop.scene(cluster, loop, rng), loop.now_s()
                await trouble(scene)
                await loop.goes_on()
                scene.relay.pass_on()
                if (
                    not hop.is_routers
                ):  # no status tells when it is well: a peer that is back resets what it does not know
                    await scene.relay.cut()
                await cluster.all_ready()
                windows.setdefault(trouble.__name__, []).append(Window(begin_s, loop.now_s()))
                await loop.goes_on()
        report(summary(f"{hop.name} over {transport}", loop, windows))
        loop.check()
        await cluster.all_idle()


@pytest.mark.parametrize("hop", HOPS[1:2], ids=lambda hop: hop.name)
async def test_streams_survive_a_link_in_trouble(tmp_path: Path, hop: Hop, report: Report) -> None:
    await trouble_a_hop(tmp_path, hop, "grpc", SAMPLE, report)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: hop.name)
async def test_streams_survive_links_in_trouble_over_and_over(
    tmp_path: Path, hop: Hop, transport: str, report: Report
) -> None:
    await trouble_a_hop(tmp_path, hop, transport, ALL, report, num_rounds=SOAK_ROUNDS)


# -- the client's own hop ---------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_a_client_behind_a_bad_link_gets_every_token(tmp_path: Path) -> None:
    """Late, slow, or parted for a while: what was made meanwhile waits for it."""
    path = chat_folder(tmp_path / "scripted", step_delay_s=0.005)
    config = deployment_config(path, timeout_s=PROGRESS_TIMEOUT_S, num_blocks=1024)
    async with chaos_cluster(tmp_path, config) as cluster, AsyncClient(cluster.client_relay.address) as client:
        async with ClosedLoop(client, scripted_questions(path, NUM_TOKENS)) as loop:
            for trouble in (late, slow):
                await trouble(Scene(loop, cluster.client_relay, cluster.all_ready))
                await loop.goes_on()
                cluster.client_relay.pass_on()
            cluster.client_relay.hold()
            await cluster.all_idle()  # no stream waits for its client
            cluster.client_relay.pass_on()
            await loop.goes_on()
        loop.check()


@pytest.mark.parametrize("how", ["cut", pytest.param("half-open", marks=pytest.mark.soak)])
async def test_what_runs_for_a_client_that_was_lost_is_freed(tmp_path: Path, how: str) -> None:
    """Long before it would have ended by itself; a half-open link shows by its keepalive alone."""
    path = chat_folder(tmp_path / "scripted", step_delay_s=0.05)
    config = deployment_config(path, num_blocks=4096)
    options = GenerateOptions(prompt=[5, 6, 7], max_tokens=4_000, ignore_eos=True)
    async with chaos_cluster(tmp_path, config) as cluster, AsyncClient(cluster.client_relay.address) as client:
        with pytest.raises(Unavailable):
            async with client.generate(options) as events:
                async for event in events:
                    if event.HasField("delta"):
                        break
                await lose(cluster.client_relay, how)
                await cluster.all_idle()
                async for _ in events:
                    pass


async def lose(relay: Relay, how: str) -> None:
    if how == "cut":
        await relay.cut()
    else:
        relay.drop()
