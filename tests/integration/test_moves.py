"""Sequences that leave a draining decode worker: their blocks are shipped from there, and the tokens are the same."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import FailedPrecondition
from kvferry.rpc import RpcChannel
from kvferry.sampling import SamplingParams
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.telemetry import Attributes, SpanNames
from kvferry.wire import spec_to_pb
from kvferry.worker_process import RunningWorker
from kvtransfer.faults import Fault, FaultKind
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.drains import Request, progress_of
from tests.support.models import save_tiny_model
from tests.support.workers import core_of, running_worker, scripted_config, scripted_folder, set_faults, until

PROMPT = list(range(20, 100))
BLOCK_SIZE = 4
NUM_PROMPT_BLOCKS = len(PROMPT) // BLOCK_SIZE
MAX_TOKENS = 60
MIN_MOVED_TOKENS = 8
"""Of a choice; the requests here are caught with more, or with fewer on purpose."""
STEP_S = 0.02
FOR_EVER_S = 600.0


def moving_config(folder: Path, **engine: Any) -> Config:
    return deployment_config(folder, block_size=BLOCK_SIZE, **engine).replace(
        "router", min_moved_tokens=MIN_MOVED_TOKENS
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return moving_config(chat_folder(tmp_path / "model", step_delay_s=STEP_S))


def options_of(**values: Any) -> GenerateOptions:
    return GenerateOptions(**{"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, **values})


def right_tokens(config: Config, sampling: SamplingParams | None = None, choice: int = 0) -> list[int]:
    assert config.model.path is not None
    script = load_script_config(Path(config.model.path))
    return reference_continuation(PROMPT, MAX_TOKENS, script, sampling, choice)


def busy(deployment: Deployment) -> RunningWorker:
    """The decode worker that has a request."""
    worker = next(worker for worker in deployment.router.membership.decode if worker.num_requests)
    return next(running for running in deployment.decode if running.address == worker.address)


def other(deployment: Deployment, worker: RunningWorker) -> RunningWorker:
    return next(running for running in deployment.decode if running is not worker)


def num_computed(*workers: RunningWorker) -> int:
    """Tokens of prompts that they have computed."""
    return sum(core_of(worker).stats().num_prefill_tokens for worker in workers)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move came to.

    Attributes:
        source: where the request was.
        num_recomputed: tokens computed again there, and at prefill workers.
    """

    completion: Completion
    source: RunningWorker
    num_recomputed: int
    num_recomputed_by_prefill: int

    @property
    def num_sequences(self) -> int:
        return self.source.role.load().num_moved_sequences

    @property
    def num_blocks(self) -> int:
        return self.source.role.load().num_blocks_moved


async def moved(
    deployment: Deployment, options: GenerateOptions, *, after_tokens: int = 3 * MIN_MOVED_TOKENS, grace_s: float = 0.0
) -> Moved:
    """Runs a request, drains the worker that decodes it when it has so many tokens, and waits for both."""
    request = Request()
    call = asyncio.ensure_future(request.run(deployment.client, options))
    await until(lambda: request.num_tokens >= after_tokens)
    source = busy(deployment)
    before = num_computed(source), num_computed(*deployment.prefill)
    progress = await progress_of(deployment.client, source.context.identity.worker_id, grace_s=grace_s)
    assert progress[-1].num_running == 0
    completion = await call
    await deployment.assert_idle()
    return Moved(completion, source, num_computed(source) - before[0], num_computed(*deployment.prefill) - before[1])


SAMPLING = {
    "greedy": SamplingParams(MAX_TOKENS, temperature=0.0),
    "sampled": SamplingParams(MAX_TOKENS, temperature=1.0, top_p=0.9, seed=11),
}


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["prefill worker", "decode computes prompts"])
@pytest.mark.parametrize("kind", SAMPLING)
async def test_only_the_tail_is_computed_again(config: Config, kind: str, num_prefill: int) -> None:
    sampling = SAMPLING[kind]
    options = options_of(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
    async with running_deployment(config, num_prefill=num_prefill, num_decode=2) as deployment:
        result = await moved(deployment, options)
    assert result.completion.choices[0].token_ids == right_tokens(config, sampling)
    assert result.completion.timings.num_attempts == 2
    assert 0 < result.num_recomputed <= BLOCK_SIZE
    assert result.num_recomputed_by_prefill == 0
    assert result.num_sequences == 1
    assert result.num_blocks >= NUM_PROMPT_BLOCKS + 3 * MIN_MOVED_TOKENS // BLOCK_SIZE


async def test_every_choice_moves_with_its_own_blocks(config: Config) -> None:
    sampling = SamplingParams(MAX_TOKENS, temperature=1.0, seed=5)
    async with running_deployment(config, num_decode=2) as deployment:
        options = options_of(temperature=1.0, seed=5, n=3)
        result = await moved(deployment, options, after_tokens=3 * 2 * MIN_MOVED_TOKENS)
    for choice in range(3):
        assert result.completion.choices[choice].token_ids == right_tokens(config, sampling, choice)
    assert result.completion.timings.num_attempts == 4, "one together, one for each choice"
    assert result.num_recomputed <= 3 * BLOCK_SIZE
    assert result.num_recomputed_by_prefill == 0
    assert result.num_sequences == 3
    assert result.num_blocks < 2 * NUM_PROMPT_BLOCKS, "the prompt's blocks were shipped more than once"


async def test_what_the_new_worker_holds_is_not_shipped(config: Config) -> None:
    async with running_deployment(config, num_decode=2) as deployment:
        request = Request()
        call = asyncio.ensure_future(request.run(deployment.client, options_of(temperature=0.0)))
        await until(lambda: request.num_tokens >= 1)
        source = busy(deployment)
        await deployment.client.complete(options_of(max_tokens=2))  # where there is less to do: the prompt is there now
        assert other(deployment, source).role.load().num_blocks_shipped >= NUM_PROMPT_BLOCKS
        await until(lambda: request.num_tokens >= 3 * MIN_MOVED_TOKENS)
        await progress_of(deployment.client, source.context.identity.worker_id, grace_s=0.0)
        completion = await call
        assert completion.choices[0].token_ids == right_tokens(config)
        num_blocks = source.role.load().num_blocks_moved
        assert 3 * MIN_MOVED_TOKENS // BLOCK_SIZE <= num_blocks <= MAX_TOKENS // BLOCK_SIZE
        await deployment.assert_idle()


@pytest.mark.parametrize("why", ["short output", "past the cache", "nothing is cached", "switched off"])
async def test_the_ordinary_way(config: Config, why: str) -> None:
    """Prefill computes the output again, or all where nothing may be cached."""
    after_tokens = 2 if why == "short output" else 3 * MIN_MOVED_TOKENS
    if why == "nothing is cached":
        config = config.replace("engine", prefix_caching=False)
    if why == "switched off":
        config = config.replace("router", min_moved_tokens=0)
    async with running_deployment(config, num_decode=2) as deployment:
        options = options_of(temperature=0.0, bypass_prefix_cache=why == "past the cache")
        result = await moved(deployment, options, after_tokens=after_tokens)
    assert result.completion.choices[0].token_ids == right_tokens(config)
    assert result.completion.timings.num_attempts == 2
    assert (result.num_sequences, result.num_blocks, result.num_recomputed) == (0, 0, 0)
    assert result.num_recomputed_by_prefill >= after_tokens - BLOCK_SIZE


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
async def test_a_real_model_says_the_same(tmp_path: Path, architecture: str) -> None:
    """The second one lets go of blocks that left its attention window; they may be cached still."""
    folder = save_tiny_model(tmp_path / "model", architecture)
    async with running_deployment(moving_config(folder), num_decode=2) as deployment:
        options = options_of(temperature=0.8, seed=3, max_tokens=200)
        quiet = await deployment.client.complete(options)
        await deployment.client.flush_prefix_cache()
        result = await moved(deployment, options)
    assert result.completion.choices[0].token_ids == quiet.choices[0].token_ids
    assert result.completion.timings.num_attempts == 2
    assert result.num_sequences == 1
    assert result.num_recomputed <= BLOCK_SIZE


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.STALL, FaultKind.CORRUPT])
async def test_a_move_that_fails_becomes_an_ordinary_resume(config: Config, kind: FaultKind) -> None:
    """Also where the fault is mended: a corrupt block is sent again, and the move goes on."""
    config = config.replace("transfer", progress_timeout_s=1.0)
    async with running_deployment(config, num_decode=2) as deployment:
        for worker in deployment.decode:
            set_faults(worker, Fault(kind, block_index=2, nth=1))
        result = await moved(deployment, options_of(temperature=0.0))
    assert result.completion.choices[0].token_ids == right_tokens(config)
    is_mended = kind is FaultKind.CORRUPT
    assert result.completion.timings.num_attempts == (2 if is_mended else 3)
    assert result.num_sequences == is_mended


@pytest.mark.parametrize("end", ["time over", "second signal"])
async def test_the_end_of_the_process_waits_for_a_move_but_not_for_ever(config: Config, end: str) -> None:
    """No longer than the progress timeout, and not at all after a second signal."""
    timeout_s = 1.0 if end == "time over" else FOR_EVER_S
    config = config.replace("transfer", progress_timeout_s=timeout_s)
    async with running_deployment(config, num_decode=2) as deployment:
        for worker in deployment.decode:
            set_faults(worker, Fault(FaultKind.DELAY, block_index=2, delay_s=FOR_EVER_S))
        request, hurry = Request(), asyncio.Event()
        call = asyncio.ensure_future(request.run(deployment.client, options_of(temperature=0.0)))
        await until(lambda: request.num_tokens >= 3 * MIN_MOVED_TOKENS)
        source = busy(deployment)
        stopping = asyncio.ensure_future(source.stop(0.0, hurry))
        await until(lambda: other(deployment, source).role.load().num_blocks_shipped >= 2)
        if end == "second signal":
            assert not stopping.done()
            hurry.set()
        await asyncio.wait_for(stopping, 10.0)
        completion = await call
        assert completion.choices[0].token_ids == right_tokens(config)
        assert completion.timings.num_attempts == 3


async def test_a_process_that_ends_waits_for_nobody_who_does_not_come(config: Config) -> None:
    """Its client leaves in the very moment: what is kept for it is forgotten, and the process ends."""
    config = config.replace("transfer", progress_timeout_s=0.5)
    async with running_deployment(config, num_decode=2) as deployment:
        request = Request()
        call = asyncio.ensure_future(request.run(deployment.client, options_of(temperature=0.0)))
        await until(lambda: request.num_tokens >= 3 * MIN_MOVED_TOKENS)
        source = busy(deployment)
        source.role.keep_moved()
        assert source.context.moves.num_kept == 1
        call.cancel()
        await until(lambda: source.context.moves.num_kept == 0)
        await asyncio.wait_for(source.stop(), 10.0)


async def test_the_trace_and_the_metrics_show_the_move(config: Config) -> None:
    async with running_deployment(config, num_decode=2) as deployment:
        result = await moved(deployment, options_of(temperature=0.0))
        name = result.source.context.identity.worker_id
        for worker in (*deployment.prefill, *deployment.decode):
            assert await asyncio.to_thread(worker.context.telemetry.provider.force_flush, 5_000)
        assert await asyncio.to_thread(deployment.telemetry.provider.force_flush, 5_000)
        spans = deployment.exporter.get_finished_spans()
        registry = deployment.telemetry.metrics.registry
        assert registry.get_sample_value("kvferry_moved_sequences_total") == 1
        assert registry.get_sample_value("kvferry_moved_blocks_total") == result.num_blocks
    attempts = [span for span in spans if span.name == "kvferry.attempt"]
    assert [_attribute(span, Attributes.MOVED_FROM) for span in attempts] == [None, name]
    ships = [span for span in spans if span.name == SpanNames.SHIP]
    from_decode = [span for span in ships if span.resource.attributes["service.name"] == "kvferry-decode"]
    assert [_attribute(span, Attributes.NUM_BLOCKS) for span in from_decode] == [result.num_blocks]
    assert attempts[1].context is not None and from_decode[0].context is not None
    assert from_decode[0].context.trace_id == attempts[1].context.trace_id


def _attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


async def test_a_decode_worker_ships_only_what_it_let_go_of(tmp_path: Path) -> None:
    config = scripted_config(scripted_folder(tmp_path / "model"))
    async with running_worker("decode", config) as decode, RpcChannel(decode.address) as channel:
        spec = SequenceSpec(AttemptId("r", 2), (1, 2, 3), 3, SamplingParams(8))
        target = worker_pb2.ShipTarget(address=decode.address, epoch=1)
        request = worker_pb2.PrefillRequest(sequence=spec_to_pb(spec), target=target, progress_timeout_s=5.0)
        stub = worker_pb2_grpc.PrefillServiceStub(channel.grpc)
        with pytest.raises(FailedPrecondition, match="keeps nothing of choice 0 of request r"):
            async with channel.stream(stub.Prefill, request) as call:
                await call.read()
