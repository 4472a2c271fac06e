"""Killed, drained or parted amid what carries state: the output is that of the quiet run (R071, R085, R089).

State are a grammar half followed, counts of penalties, a bad word half written, and text held back for a stop string.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import AsyncClient, Choice, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.sampling import FinishKind
from kvferry.telemetry import start_telemetry
from proto.kvferry.v1 import types_pb2
from router.app import RouterApp
from router.worker import Worker
from tests.support.deployment import chat_folder, deployment_config, running_deployment
from tests.support.drains import Request, progress_of
from tests.support.models import save_tiny_model
from tests.support.relay import Direction, Relay
from tests.support.worker_processes import WorkerProcess, worker_process
from tests.support.workers import assert_idle, free_address, running_worker, until

PROMPT = [(3 * place) % 250 for place in range(37)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 90, "maxLength": 120},
        "tags": {"type": "array", "items": {"enum": ["red", 3, None]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
A, B = 32, 33
"""The tokens of these letters."""
RULES: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {A: 3.5, B: 3.5, 300: -4.0},
    "bad_words": ["AB", "BA"],
}
ASKED: Mapping[str, GenerateOptions] = {
    "json": GenerateOptions(prompt=PROMPT, json_schema=json.dumps(SCHEMA), seed=5, max_tokens=400, logprobs=2),
    "four": GenerateOptions(prompt=PROMPT, n=4, seed=6, max_tokens=160, logprobs=2, ignore_eos=True, **RULES),
}
NUM_SEEN = 40
"""Tokens of a choice behind which the worker goes: the document is in its long string, and bad words were near."""
LOGPROB_TOLERANCE = 1e-4
"""Of float32: what was decoded token by token is computed again in one chunk."""
OFFER_BYTES = 100
"""Less than a shipment's offer, more than what an idle connection says meanwhile: a cut before it costs no attempt."""
TIMEOUT_S = 60.0


def model_config(folder: Path) -> Config:
    return deployment_config(save_tiny_model(folder / "llama", "llama"), timeout_s=20.0, block_size=8, num_blocks=512)


def is_close(one: types_pb2.TokenLogprob, other: types_pb2.TokenLogprob) -> bool:
    """The same token, as likely; so are the most likely ones, of which equally likely ones may change places."""
    pairs = [(one, other), *zip(one.top, other.top, strict=True)]
    has_first = one.top[0].logprob - one.top[1].logprob > LOGPROB_TOLERANCE
    return (
        one.token_id == other.token_id
        and (one.top[0].token_id == other.top[0].token_id or not has_first)
        and all(math.isclose(a.logprob, b.logprob, abs_tol=LOGPROB_TOLERANCE) for a, b in pairs)
    )


def assert_same(found: Completion, quiet: Completion) -> None:
    """Ids, text, finish, log-probabilities and usage."""
    assert len(found.choices) == len(quiet.choices)
    for one, other in zip(found.choices, quiet.choices, strict=True):
        assert (one.token_ids, one.text, one.finish) == (other.token_ids, other.text, other.finish)
        assert len(one.logprobs) == len(other.logprobs)
        assert all(map(is_close, one.logprobs, other.logprobs)), one.index
    assert found.usage.completion_tokens == quiet.usage.completion_tokens


def assert_keeps_its_word(name: str, choices: Iterable[Choice]) -> None:
    """What was asked for is in the quiet run; else nothing would be proved."""
    for choice in choices:
        assert choice.finish is not None and len(choice.token_ids) > NUM_SEEN + 20
        if name == "json":
            assert set(json.loads(choice.text)) == {"name", "tags"}
        else:
            pairs = set(pairwise(choice.token_ids))
            assert not pairs & {(A, B), (B, A)} and {A, B} <= set(choice.token_ids)


async def quiet_run(client: AsyncClient, options: GenerateOptions) -> Completion:
    return await client.complete(options, timeout_s=TIMEOUT_S)


@dataclass(frozen=True)
class Mortal:
    """A router before one prefill worker here and decode workers that are processes."""

    router: RouterApp
    client: AsyncClient
    processes: Mapping[str, WorkerProcess]

    @property
    def busy(self) -> Worker:
        """The decode worker that has a request."""
        return next(worker for worker in self.router.membership.decode if worker.num_requests)

    async def killed(self, options: GenerateOptions, num_seen: int = NUM_SEEN) -> Completion:
        """The whole response to a request whose decode worker dies when each choice has so many tokens."""
        request = Request()
        call = asyncio.create_task(request.run(self.client, options))
        await until(lambda: _num_seen(request.completion, options) >= num_seen)
        process = self.processes[self.busy.address]
        process.send(signal.SIGKILL)
        assert await process.exit_code() == -signal.SIGKILL
        completion = await asyncio.wait_for(call, TIMEOUT_S)
        assert completion.timings.num_attempts > 1
        return completion


def _num_seen(completion: Completion, options: GenerateOptions) -> int:
    """Of the choice with the fewest tokens."""
    has_all = len(completion.choices) == (options.n or 1)
    return min(len(choice.token_ids) for choice in completion.choices) if has_all else 0


@asynccontextmanager
async def mortal_decode(folder: Path, config: Config, num_decode: int) -> AsyncIterator[Mortal]:
    async with AsyncExitStack() as stack:
        starts = [worker_process(folder, config, "decode_svc") for _ in range(num_decode)]
        processes = [await one for one in asyncio.as_completed([stack.enter_async_context(start) for start in starts])]
        prefill = await stack.enter_async_context(running_worker("prefill", config))
        addresses = {"prefill": [prefill.address], "decode": [process.address for process in processes]}
        telemetry = start_telemetry(config.telemetry, "router", "router")
        stack.push_async_callback(telemetry.shutdown)
        router = await stack.enter_async_context(RouterApp(config.replace("router", **addresses), telemetry))
        await until(lambda: all(worker.status for worker in router.membership.workers))
        client = await stack.enter_async_context(AsyncClient(router.address))
        yield Mortal(router, client, {process.address: process for process in processes})
        await assert_idle(prefill)


@pytest.mark.processes
async def test_a_decode_worker_killed_in_mid_json_and_in_four_penalised_choices(tmp_path: Path) -> None:
    async with mortal_decode(tmp_path, model_config(tmp_path), num_decode=3) as mortal:
        for name, options in ASKED.items():
            quiet = await quiet_run(mortal.client, options)
            assert_keeps_its_word(name, quiet.choices)
            assert quiet.timings.num_attempts == 1
            assert_same(await mortal.killed(options), quiet)


# --- text held back for a stop string: a scripted model writes it byte by byte ---

STOP = "=" * 20 + "END" + "=" * 20
HELD_AT = 4 + len("=" * 20 + "EN")
"""Tokens behind which half of the stop string is held back."""


@pytest.mark.processes
@pytest.mark.parametrize(("ending", "includes_stop"), [(STOP, False), (STOP, True), (STOP.replace("D", "!"), False)])
async def test_a_decode_worker_killed_while_half_a_stop_string_is_held(
    tmp_path: Path, ending: str, includes_stop: bool
) -> None:
    """What is held belongs to no worker: the next one's tokens complete it, or release it whole."""
    written = f"so: {ending} and more"
    async with mortal_decode(tmp_path, scripted_config(tmp_path, written), num_decode=2) as mortal:
        options = GenerateOptions(
            prompt=[300, 301], max_tokens=len(written), stop=[STOP], include_stop_str_in_output=includes_stop
        )
        completion = await mortal.killed(options, HELD_AT)
        (choice,) = completion.choices
        has_stop = ending == STOP
        assert choice.finish is not None
        assert choice.finish.kind is (FinishKind.STOP_STRING if has_stop else FinishKind.LENGTH)
        assert choice.text == ((f"so: {STOP}" if includes_stop else "so: ") if has_stop else written)
        assert completion.usage.completion_tokens == len(choice.token_ids)
        assert len(choice.token_ids) == (len(f"so: {STOP}") if has_stop else len(written))


def scripted_config(folder: Path, written: str) -> Config:
    """A model that writes this text, a byte a token."""
    model = chat_folder(folder / "scripted")
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    stand_ins = {" ": "Ġ"}
    script = [vocabulary[stand_ins.get(char, char)] for char in written]
    chat_folder(model, mode="script", script=script, step_delay_s=0.02)
    return deployment_config(model, timeout_s=10.0)


# --- drained and parted ---


@pytest.mark.parametrize("name", ASKED)
async def test_a_drained_decode_worker_takes_nothing_along(tmp_path: Path, name: str) -> None:
    """Its blocks go to the other one; what else there is follows from the tokens."""
    config = model_config(tmp_path).replace("router", min_moved_tokens=8)
    options = ASKED[name]
    async with running_deployment(config, num_decode=2) as deployment:
        quiet = await quiet_run(deployment.client, options)
        assert_keeps_its_word(name, quiet.choices)
        await deployment.client.flush_prefix_cache()
        request = Request()
        call = asyncio.create_task(request.run(deployment.client, options))
        await until(lambda: _num_seen(request.completion, options) >= NUM_SEEN)
        source = next(worker for worker in deployment.router.membership.decode if worker.num_requests)
        await progress_of(deployment.client, source.name, grace_s=0.0)
        completion = await call
        assert completion.timings.num_attempts > 1
        assert_same(completion, quiet)
        moved = next(worker for worker in deployment.decode if worker.address == source.address)
        assert moved.role.load().num_moved_sequences == (options.n or 1)
        await deployment.assert_idle()


@pytest.mark.parametrize("name", ASKED)
async def test_a_prefill_worker_parted_behind_its_first_tokens(tmp_path: Path, name: str) -> None:
    """The first tokens are with the client, the shipment is not: another attempt goes on behind them."""
    config, options = model_config(tmp_path), replace(ASKED[name], max_tokens=60)
    async with Relay() as relay, running_deployment(config, num_prefill=2, ship_relay=relay) as deployment:
        quiet = await quiet_run(deployment.client, options)
        await deployment.client.flush_prefix_cache()
        request = Request()
        relay.hold(Direction.TO_TARGET)
        num_before = relay.num_read_bytes(Direction.TO_TARGET)
        call = asyncio.create_task(request.run(deployment.client, options))
        await until(lambda: _num_seen(request.completion, options) == 1)
        await until(lambda: relay.num_read_bytes(Direction.TO_TARGET) > num_before + OFFER_BYTES)
        await relay.cut()
        relay.pass_on()
        completion = await call
        assert completion.timings.num_attempts > 1
        assert_same(completion, quiet)
        await deployment.assert_idle()


@pytest.mark.processes
async def test_a_prefill_worker_killed_behind_its_first_tokens(tmp_path: Path) -> None:
    """As above, with a real death; another worker comes up when the first tokens were seen."""
    config, options, spare = model_config(tmp_path), replace(ASKED["four"], max_tokens=60), free_address()
    async with Relay() as relay, running_deployment(config, ship_relay=relay) as deployment, AsyncExitStack() as stack:
        quiet = await quiet_run(deployment.client, options)
        mortal = await stack.enter_async_context(worker_process(tmp_path, config, "prefill_svc"))
        decode = [worker.address for worker in deployment.router.membership.decode]
        client = await stack.enter_async_context(second_router(config, [mortal.address, spare], decode))
        relay.hold(Direction.TO_TARGET)
        request = Request()
        call = asyncio.create_task(request.run(client, options))
        await until(lambda: _num_seen(request.completion, options) == 1)
        await stack.enter_async_context(running_worker("prefill", config, listen=spare))
        mortal.send(signal.SIGKILL)
        assert await mortal.exit_code() == -signal.SIGKILL
        relay.pass_on()
        completion = await asyncio.wait_for(call, TIMEOUT_S)
        assert completion.timings.num_attempts > 1
        assert_same(completion, quiet)
        await deployment.assert_idle()


@asynccontextmanager
async def second_router(config: Config, prefill: list[str], decode: list[str]) -> AsyncIterator[AsyncClient]:
    """A client of a router before these workers, of which some are there."""
    telemetry = start_telemetry(config.telemetry, "router", "router")
    config = config.replace("router", prefill=prefill, decode=decode)
    async with RouterApp(config, telemetry) as router, AsyncClient(router.address) as client:
        assert await router.wait_ready(30.0), router.why_not_ready()
        yield client
    await telemetry.shutdown()
