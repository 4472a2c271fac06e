"""A connection that breaks between workers costs its own request a retry; a client that goes stops its work, soon.

client ─► [relay] ─► router ─► prefill ─► [relay] ─► decode
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import Unavailable
from kvferry.rpc import options
from kvtransfer.faults import Fault, FaultKind
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.relay import Relay
from tests.support.workers import core_of, set_faults, until

FOR_EVER_S = 600.0
STEP_DELAY_S = 0.01
LATE_BLOCK = 3


class Stream:
    """A request under way."""

    def __init__(self, client: AsyncClient, prompt: list[int], max_tokens: int) -> None:
        self._options = GenerateOptions(prompt=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._client = client
        self.completion = Completion()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> Completion:
        async with self._client.generate(self._options) as events:
            async for event in events:
                self.completion.add(event)
        self.completion.check_complete()
        return self.completion

    async def has_tokens(self, num_tokens: int) -> None:
        await until(lambda: any(len(choice.token_ids) >= num_tokens for choice in self.completion.choices))

    async def end(self) -> None:
        """Also of one that has noticed a loss itself."""
        self.task.cancel()
        with suppress(asyncio.CancelledError, Unavailable):
            await self.task


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(num_tokens)]


def hold_back(deployment: Deployment, block_index: int) -> None:
    """From now on each first attempt's shipment ends before that block, and stays open."""
    set_faults(deployment.prefill[0], Fault(FaultKind.DELAY, block_index, delay_s=FOR_EVER_S, attempt=1))


def num_shipped_blocks(deployment: Deployment) -> int:
    return deployment.decode[0].role.load().num_blocks_shipped


# -- between workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "grpc"], indirect=True)
async def test_a_connection_reset_in_mid_shipment_costs_that_request_a_retry_and_no_other(
    tmp_path: Path, transport: str
) -> None:
    """R018: eight others decode meanwhile what came over the same connection."""
    folder = chat_folder(tmp_path / "model", step_delay_s=STEP_DELAY_S)
    config, num_tokens, prompts = (
        deployment_config(folder, num_blocks=512),
        80,
        [random_prompt(n, 30) for n in range(9)],
    )
    async with Relay() as relay, running_deployment(config, ship_relay=relay) as deployment:
        others = [Stream(deployment.client, prompt, num_tokens) for prompt in prompts[1:]]
        await asyncio.gather(*(other.has_tokens(2) for other in others))
        hold_back(deployment, LATE_BLOCK)
        num_before = num_shipped_blocks(deployment)
        hit = Stream(deployment.client, prompts[0], num_tokens)
        await until(lambda: num_shipped_blocks(deployment) == num_before + LATE_BLOCK)
        assert relay.num_connections == 1 and not any(other.task.done() for other in others)
        await relay.cut()
        answers = await asyncio.gather(hit.task, *(other.task for other in others))
        script = load_script_config(folder)
        assert [answer.choices[0].token_ids for answer in answers] == [
            reference_continuation(prompt, num_tokens, script) for prompt in prompts
        ]
        assert [answer.timings.num_attempts for answer in answers] == [2] + [1] * len(others)
        await deployment.assert_idle()


# -- of a client ------------------------------------------------------------------------------------------------------


class Scene:
    """A deployment that computes one prompt at a time, and a client of it behind a relay."""

    def __init__(self, deployment: Deployment, client: AsyncClient, relay: Relay) -> None:
        self.deployment = deployment
        self.client = client
        self.relay = relay

    @property
    def work(self) -> tuple[int, int, int, int]:
        """What runs anywhere."""
        prefill, decode = self.deployment.prefill[0], self.deployment.decode[0]
        num_running = self.deployment.router.serving.num_running
        return (
            num_running,
            len(core_of(prefill).sequences),
            len(core_of(decode).sequences),
            decode.role.load().num_waiting,
        )


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    config: Config = deployment_config(
        chat_folder(folder, step_delay_s=STEP_DELAY_S), max_chunk_tokens=4, max_running=1, num_blocks=1024
    )
    async with (
        running_deployment(config) as deployment,
        Relay() as relay,
        AsyncClient(relay.address) as client,
    ):
        relay.forward_to(deployment.router.address)
        yield Scene(deployment, client, relay)


LONG_PROMPT = random_prompt(0, 3_000)
"""Computed in chunks of four tokens: seconds."""


@asynccontextmanager
async def queued(scene: Scene) -> AsyncIterator[Stream]:
    """Behind a prompt of another client, which the prefill worker is computing."""
    core = core_of(scene.deployment.prefill[0])
    other = Stream(scene.deployment.client, LONG_PROMPT, 1)
    await until(lambda: len(core.scheduler.running) == 1)
    stream = Stream(scene.client, random_prompt(1, 30), 10)
    await until(lambda: len(core.scheduler.waiting) == 1)
    yield stream
    assert not other.task.done()
    await other.end()


@asynccontextmanager
async def in_prefill(scene: Scene) -> AsyncIterator[Stream]:
    core = core_of(scene.deployment.prefill[0])
    stream = Stream(scene.client, LONG_PROMPT, 10)
    await until(lambda: any(sequence.num_computed_tokens >= 8 for sequence in core.sequences.values()))
    yield stream


@asynccontextmanager
async def shipping(scene: Scene) -> AsyncIterator[Stream]:
    hold_back(scene.deployment, LATE_BLOCK)
    stream = Stream(scene.client, random_prompt(1, 30), 10)
    await until(lambda: num_shipped_blocks(scene.deployment) == LATE_BLOCK)
    yield stream


@asynccontextmanager
async def decoding(scene: Scene) -> AsyncIterator[Stream]:
    stream = Stream(scene.client, random_prompt(1, 30), 3_000)
    await stream.has_tokens(3)
    yield stream


PHASES = (queued, in_prefill, shipping, decoding)
Go = Callable[[Scene, Stream], Awaitable[None]]


async def goes_and_all_stops(folder: Path, phase: Callable[[Scene], object], go: Go, timeout_s: float) -> None:
    async with scene(folder) as found:
        async with phase(found) as stream:  # type: ignore[attr-defined]
            assert not stream.task.done()
            others = (1, 1, 0, 0) if phase is queued else (0, 0, 0, 0)
            await go(found, stream)
            await until(lambda: found.work == others, timeout_s)
            await stream.end()
        await found.deployment.assert_idle()


async def cancel(scene: Scene, stream: Stream) -> None:
    stream.task.cancel()


async def fall_silent(scene: Scene, stream: Stream) -> None:
    """As where the client's machine has lost its power: no FIN, no reset, and nothing is answered."""
    scene.relay.drop()


async def be_parted(scene: Scene, stream: Stream) -> None:
    scene.relay.hold()


@pytest.mark.parametrize("phase", PHASES)
async def test_work_stops_within_a_second_of_a_cancel(tmp_path: Path, phase: Callable[[Scene], object]) -> None:
    """R095."""
    await goes_and_all_stops(tmp_path / "model", phase, cancel, 1.0)


@pytest.mark.parametrize(("phase", "go"), [*((phase, fall_silent) for phase in PHASES), (decoding, be_parted)])
async def test_work_stops_within_the_keepalive_of_a_client_that_is_lost_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Callable[[Scene], object], go: Go
) -> None:
    """R095, with pings every second in the place of every tenth."""
    times_ms = {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(
        options, "_KEEPALIVE", [(name, times_ms.get(name, value)) for name, value in options._KEEPALIVE]
    )
    await goes_and_all_stops(tmp_path / "model", phase, go, 1.5 + 1.0)
