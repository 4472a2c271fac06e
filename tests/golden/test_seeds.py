"""Real (tiny) models: a seed gives the same tokens whatever happens to the request and whoever runs beside it (R077).

The truth is each choice alone in an engine without services, float32.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.local import choice_name, generate
from engine.opening import open_core
from kvferry.client import Client, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.sampling import LogitRules, SamplingParams
from router.resume import prompt_digest
from tests.golden.parity import random_prompts
from tests.golden.test_memory_parity import KINDS, DisturbedDriver, preempt_one
from tests.integration.test_missing_workers import routed
from tests.integration.test_prompt_fields import raw
from tests.support.deployment import Deployment, deployment_config, running_deployment
from tests.support.models import VOCAB_SIZE, save_tiny_model
from tests.support.worker_processes import worker_process
from tests.support.workers import core_of, running_worker

NUM_TOKENS = 20
TIMEOUT_S = 90.0
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7},
    {"top_p": 0.9, "seed": 2**63 + 5, "n": 4},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 0, "logprobs": 2},
    {
        "temperature": 0.9,
        "seed": 3,
        "n": 4,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
    },
    {"seed": 4, "logit_bias": {5: 2.0, 9: -3.0}, "allowed_token_ids": tuple(range(3, 90)), "min_tokens": 9},
    {"seed": 4, "n": 2, "stop_token_ids": tuple(range(40, 60)), "min_tokens": 4},
    {"temperature": 0.0, "seed": 9, "repetition_penalty": 1.5, "presence_penalty": -0.5},
]
RULES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids")
LENGTHS = (3, 17, 40, 12, 25, 9, 33)
Tokens = list[list[int]]
"""Of each choice."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def config_of(folder: Path, **engine: Any) -> Config:
    return deployment_config(
        folder, timeout_s=30.0, **{"block_size": 8, "num_blocks": 400, "max_chunk_tokens": 16, **engine}
    )


def sampling_of(asked: dict[str, Any]) -> SamplingParams:
    """What the router makes of the fields."""
    fields = {name: value for name, value in asked.items() if name not in ("n", "logprobs")}
    rules = {name: fields.pop(name) for name in RULES if name in fields}
    rules["bias"] = tuple(fields.pop("logit_bias", {}).items())
    return SamplingParams(max_tokens=NUM_TOKENS, rules=LogitRules(**rules), **fields)


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Tokens]:
    driver = DisturbedDriver(open_core(config_of(folder)), at_once=1)
    found = []
    for prompt, fields in zip(random_prompts(LENGTHS, VOCAB_SIZE), ASKED, strict=True):
        choices = []
        for choice in range(fields.get("n", 1)):
            one = driver.sequence(prompt, sampling_of(fields))
            one.choice = choice
            name = one.seq_id
            choices.append(generate(driver.core, [one])[choice_name(name, choice)].token_ids)
        found.append(choices)
    assert all(len({tuple(tokens) for tokens in choices}) == len(choices) for choices in found)
    assert any(len(tokens) < NUM_TOKENS for tokens in found[5]), "some choice ends by a stop id"
    return found


def options(prompt: Sequence[int], fields: dict[str, Any]) -> GenerateOptions:
    return GenerateOptions(prompt=list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True, **fields)


async def asked(client: Client, rng: random.Random) -> list[Tokens]:
    """All of them at once, in an order of their own, among others: with a seed, with none, and cancelled."""
    jobs = []
    numbers = list(range(len(ASKED)))
    rng.shuffle(numbers)
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            one = client.complete(options(prompts[number], ASKED[number]), timeout_s=TIMEOUT_S)
            jobs.append((number, group.create_task(one)))
            (other,) = random_prompts([rng.randrange(1, 40)], VOCAB_SIZE, seed=rng.getrandbits(30))
            match rng.randrange(3):
                case 0:
                    group.create_task(unseeded(client, other))
                case 1:
                    group.create_task(client.complete(options(other, {"seed": number}), timeout_s=TIMEOUT_S))
                case 2:
                    group.create_task(cancelled(client, other, rng.randrange(4)))
    answers = {number: job.result() for number, job in jobs}
    return [ids(answers[number]) for number in range(len(ASKED))]


def ids(answer: Completion) -> Tokens:
    return [choice.token_ids for choice in answer.choices]


async def unseeded(client: Client, prompt: Sequence[int]) -> None:
    """The seed that was drawn for it gives it again."""
    first = await client.complete(options(prompt, {"temperature": 1.0}), timeout_s=TIMEOUT_S)
    again = await client.complete(options(prompt, {"seed": first.started.sampling.seed}), timeout_s=TIMEOUT_S)
    assert ids(again) == ids(first)


async def cancelled(client: Client, prompt: Sequence[int], num_events: int) -> None:
    async with client.generate(options(prompt, {"seed": 1, "n": 2}), timeout_s=TIMEOUT_S) as events:
        for _ in range(num_events):
            await anext(events)


@pytest.mark.parametrize("kind", KINDS)
def test_in_an_engine_that_preempts_at_random(folder: Path, truth: list[Tokens], kind: str) -> None:
    for every, num_blocks in ((3, 400), (8, 40)):
        core = open_core(config_of(folder, preemption=kind, num_blocks=num_blocks))
        driver = DisturbedDriver(core, every=every, at_once=40)
        made = [
            driver.sequence(prompt, sampling_of(fields), fields.get("n", 1))
            for prompt, fields in zip(random_prompts(LENGTHS, VOCAB_SIZE), ASKED, strict=True)
        ]
        assert driver.run(made) == truth
        assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("num_prefill", [1, 0])
@pytest.mark.parametrize("kind", KINDS)
async def test_in_a_deployment_in_company(folder: Path, truth: list[Tokens], kind: str, num_prefill: int) -> None:
    """The first round ships the prompts, later ones hit the cache; decode preempts at random moments."""
    config, rng = config_of(folder, preemption=kind), random.Random(3)
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        assert await asked(deployment.client, rng) == truth
        async with preempting(deployment, rng):
            for _ in range(2):
                assert await asked(deployment.client, rng) == truth
        assert core_of(deployment.decode[0]).stats().num_preemptions > 0
        await deployment.assert_idle()


@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_resumed_by_the_client(folder: Path, truth: list[Tokens], num_prefill: int) -> None:
    """As after a router's death: another one goes on behind what the client has of each choice."""
    async with running_deployment(config_of(folder), num_prefill=num_prefill) as deployment:
        for prompt, fields, whole in zip(random_prompts(LENGTHS, VOCAB_SIZE), ASKED, truth, strict=True):
            received = [tokens[: min(3 + 4 * choice, len(tokens) - 1)] for choice, tokens in enumerate(whole)]
            request = options(prompt, fields).to_pb()
            request.resume.prompt_digest = prompt_digest(prompt)
            for choice, token_ids in enumerate(received):
                request.resume.choices.add(index=choice, token_ids=token_ids)
            for message in await raw(deployment, request):
                received[message.delta.index] += message.delta.token_ids
            assert received == whole
        await deployment.assert_idle()


@asynccontextmanager
async def preempting(deployment: Deployment, rng: random.Random) -> AsyncIterator[None]:
    """Now and then a running sequence of the decode worker is preempted."""

    async def disturb() -> None:
        while True:
            await deployment.decode[0].role.engine.run(lambda core: preempt_one(core, rng))  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    disturbing = asyncio.create_task(disturb())
    try:
        yield
    finally:
        disturbing.cancel()
        await asyncio.wait([disturbing])


@pytest.mark.processes
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_when_a_worker_is_killed(tmp_path: Path, folder: Path, truth: list[Tokens], role: str) -> None:
    config, rng = config_of(folder), random.Random(4)
    faults: dict[str, Any] = {f"kill_{role}_at_step": 12 if role == "decode" else 3}
    faulty = config.replace("faults", allow_faults=True, **faults)
    async with (
        running_worker("prefill", config) as prefill,
        running_worker("decode", config) as decode,
        worker_process(tmp_path, faulty, f"{role}_svc") as killed,
    ):
        addresses = {"prefill": [prefill.address], "decode": [decode.address]}
        addresses[role].insert(0, killed.address)
        async with routed(config, **addresses) as deployment:
            assert await deployment.router.wait_ready(20.0)
            async with asyncio.timeout(60.0):
                while killed.process.poll() is None:
                    assert await asked(deployment.client, rng) == truth
            assert await asked(deployment.client, rng) == truth
