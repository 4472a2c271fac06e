"""A random worker is killed, or stopped for a while, whenever all are ready again: clients see a pause and no more."""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.config import Config
from tests.chaos.cluster import ChaosCluster, Member, chaos_cluster
from tests.chaos.load import (
    NUM_STREAMS,
    SAMPLE_STREAMS,
    ClosedLoop,
    Question,
    Window,
    model_questions,
    scripted_questions,
    summary,
)
from tests.support.deployment import chat_folder, deployment_config
from tests.support.models import save_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.chaos]

PROGRESS_TIMEOUT_S = 1.0
"""So that a stopped worker is noticed soon; above what a busy machine of two cores is ever late by."""
RETRY_BUDGET = 1.0
"""Failures follow each other faster than a budget of a tenth refills, each at up to all requests in flight."""
NUM_TOKENS = 60
SAMPLE_FAILURES, SOAK_FAILURES = 2, 30
"""The sample takes a worker of each role."""

Report = Callable[[str], None]
Fail = Callable[[ChaosCluster, Member], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Model:
    """What is served, and what is asked of it."""

    name: str
    config: Config
    questions: Iterator[Question]


def scripted_model(folder: Path) -> Model:
    """Its token follows from every byte of the KV memory, so that a wrong, stale or lost block shows."""
    path = chat_folder(folder / "scripted", step_delay_s=0.01, token_delay_s=0.0001)
    config = deployment_config(path, timeout_s=PROGRESS_TIMEOUT_S, num_blocks=1024, max_chunk_tokens=32)
    return Model("scripted", config, scripted_questions(path, NUM_TOKENS))


def llama_model(folder: Path) -> Model:
    """Real numerics, in float32."""
    path = save_tiny_model(folder / "llama", "llama")
    config = deployment_config(path, timeout_s=PROGRESS_TIMEOUT_S, block_size=16, num_blocks=256, max_chunk_tokens=64)
    return Model("llama", config, model_questions(config, NUM_TOKENS))


async def kill(cluster: ChaosCluster, member: Member) -> None:
    """And start anew."""
    await member.kill()
    await member.start()


async def stop_until_noticed(cluster: ChaosCluster, member: Member) -> None:
    """What it has in its buffers comes late, when others have taken its work over."""
    member.send(signal.SIGSTOP)
    try:
        await cluster.noticed(member)
    finally:
        member.send(signal.SIGCONT)


MODELS: Mapping[str, Callable[[Path], Model]] = {"scripted": scripted_model, "llama": llama_model}
FAILURES: Mapping[str, Fail] = {"SIGKILL": kill, "SIGSTOP": stop_until_noticed}


def victims(members: Sequence[Member], seed: int = 0) -> Iterator[Member]:
    """All of them in random order, then again in another one."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(members, len(members))


async def fail_again_and_again(folder: Path, model_name: str, signs: Sequence[str], report: Report) -> None:
    """One failure of a random worker after the other; `signs` names them."""
    model, windows = MODELS[model_name](folder), dict[str, list[Window]]()
    config = model.config.replace("router", retry_budget=RETRY_BUDGET)
    async with chaos_cluster(folder, config) as cluster:
        num_streams = NUM_STREAMS if len(signs) > SAMPLE_FAILURES else SAMPLE_STREAMS
        async with ClosedLoop(cluster.client, model.questions, num_streams=num_streams) as loop:
            for sign, victim in zip(signs, victims(cluster.members), strict=False):
                begin_s = loop.now_s()
                await FAILURES[sign](cluster, victim)
                await cluster.all_ready()
                windows.setdefault(sign, []).append(Window(begin_s, loop.now_s()))
                await loop.goes_on()  # a request hit by every failure in turn makes no progress, and three end it
        report(summary(model.name, loop, windows))
        loop.check()
        await cluster.all_idle()


@pytest.mark.parametrize("sign", FAILURES)
async def test_streams_survive_the_loss_of_any_worker(tmp_path: Path, sign: str, report: Report) -> None:
    await fail_again_and_again(tmp_path, "scripted", [sign] * SAMPLE_FAILURES, report)


@pytest.mark.soak
async def test_streams_of_a_real_model_survive_the_loss_of_any_worker(tmp_path: Path, report: Report) -> None:
    await fail_again_and_again(tmp_path, "llama", list(FAILURES), report)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("sign", FAILURES)
@pytest.mark.parametrize("model_name", MODELS)
async def test_streams_survive_thirty_losses(tmp_path: Path, model_name: str, sign: str, report: Report) -> None:
    await fail_again_and_again(tmp_path, model_name, [sign] * SOAK_FAILURES, report)
