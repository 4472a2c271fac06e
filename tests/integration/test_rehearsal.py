"""Failures that an operator switches on by configuration: each is committed and said, and no token changes."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from engine.scripted import ScriptConfig, load_script_config, reference_continuation
from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.cluster import Endpoints, LocalCluster
from kvferry.config import Config
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.pair import Prompts
from tests.support.pair_request import Ending, PairRequest
from tests.support.worker_processes import worker_process
from tests.support.workers import make_spec, running_worker, scripted_config, scripted_folder

TIMEOUT_S = 1.0
"""Progress timeout where a peer falls silent."""
PROMPT = list(range(20, 42))
"""Five full blocks of four and a partial one."""
NUM_BLOCKS = 6
OUTPUT_TOKENS = 12


def rehearsing(config: Config, **faults: Any) -> Config:
    return config.replace("faults", allow_faults=True, **faults)


@pytest.fixture(params=["grpc", "shm"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    config = deployment_config(chat_folder(tmp_path / "model"), timeout_s=TIMEOUT_S, max_chunk_tokens=4)
    return config.replace("transfer", transport=request.param)


async def ask(client: AsyncClient) -> Completion:
    options = GenerateOptions(prompt=PROMPT, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    return await client.complete(options, timeout_s=60.0)


def is_right(config: Config, answer: Completion) -> bool:
    assert config.model.path is not None
    script = load_script_config(Path(config.model.path))
    return list(answer.choices[0].token_ids) == reference_continuation(PROMPT, OUTPUT_TOKENS, script)


# -- shipments --------------------------------------------------------------------------------------------------------


def fault_events(deployment: Deployment) -> list[tuple[str, int]]:
    """Kinds and blocks of the faults that spans of shipments tell of."""
    for worker in deployment.prefill:
        assert worker.context.telemetry.provider.force_flush(5_000)
    spans: Sequence[ReadableSpan] = deployment.exporter.get_finished_spans()
    return [
        (str((event.attributes or {})["kvferry.fault.kind"]), int((event.attributes or {})["kvferry.block_index"]))  # type: ignore[arg-type]
        for span in spans
        if span.name == "kvferry.ship"
        for event in span.events
        if event.name == "fault_committed"
    ]


async def test_every_block_that_arrives_wrong_once_is_sent_again(config: Config) -> None:
    wrong_once = rehearsing(config, shipping=[{"kind": "corrupt", "nth": 1}])
    async with running_deployment(wrong_once) as deployment:
        answer = await ask(deployment.client)
        assert is_right(config, answer) and answer.timings.num_attempts == 1
        for worker in (*deployment.prefill, *deployment.decode):
            assert worker.role.load().num_nacks == NUM_BLOCKS
        await deployment.assert_idle()
        assert sorted(fault_events(deployment)) == [("corrupt", index) for index in range(NUM_BLOCKS)]


async def test_a_late_block_only_takes_longer(config: Config) -> None:
    late = rehearsing(config, shipping=[{"kind": "delay", "block_index": 2, "delay_s": 1.5 * TIMEOUT_S}])
    async with running_deployment(late) as deployment:
        answer = await ask(deployment.client)
        assert is_right(config, answer) and answer.timings.num_attempts == 1
        await deployment.assert_idle()
        assert fault_events(deployment) == [("delay", 2)]


@pytest.mark.parametrize("kind", ["corrupt", "drop", "duplicate", "stall"])
async def test_a_first_attempt_that_fails_is_repeated(config: Config, kind: str) -> None:
    """A stalled stream stays open and its sender is well: only the progress timeout can end it."""
    first_fails = rehearsing(config, shipping=[{"kind": kind, "block_index": 2, "attempt": 1}])
    async with running_deployment(first_fails) as deployment:
        answer = await ask(deployment.client)
        assert is_right(config, answer) and answer.timings.num_attempts == 2
        await deployment.assert_idle()
        assert set(fault_events(deployment)) == {(kind, 2)}


# -- killed at a step -------------------------------------------------------------------------------------------------


def events_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.mark.processes
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_ends_before_the_configured_step(tmp_path: Path, role: str) -> None:
    config = scripted_config(scripted_folder(tmp_path / "model"), max_chunk_tokens=4)
    faulty = rehearsing(config, **{f"kill_{role}_at_step": 3})
    other = "decode" if role == "prefill" else "prefill"
    prompts = Prompts(ScriptConfig())
    async with (
        running_worker(other, config) as survivor,
        worker_process(tmp_path, faulty, f"{role}_svc") as killed,
    ):
        ends = {other: survivor.address, role: killed.address}
        request = PairRequest(ends["prefill"], ends["decode"], make_spec("r", PROMPT, OUTPUT_TOKENS))
        assert await killed.exit_code() == -signal.SIGKILL
        await request.end(Ending.CHANNELS)
        right = prompts.continue_(PROMPT, OUTPUT_TOKENS)
        num_tokens = len(request.result.token_ids)
        assert request.result.token_ids == right[:num_tokens]
        assert num_tokens <= (0 if role == "prefill" else 1 + 2), "the third step was run"
    on, *_, last = events_of(killed.log)
    assert (on["event"], on["level"], on["faults"]) == ("faults_on", "warning", ["kill before step 3"])
    assert (last["event"], last["kind"], last["step"]) == ("fault_committed", "kill", 3)


@pytest.mark.processes
async def test_a_stream_survives_the_death_of_its_decode_worker(tmp_path: Path) -> None:
    """Steps take time, so that tokens get out before the process ends."""
    config = deployment_config(chat_folder(tmp_path / "model", step_delay_s=0.02))

    def decode_pid(endpoints: Endpoints) -> int:
        return next(worker.pid for worker in endpoints.workers if worker.role == "decode")

    killed = rehearsing(config, kill_decode_at_step=8)
    async with LocalCluster(killed) as cluster, AsyncClient(cluster.endpoints.grpc) as client:
        pid_before = decode_pid(cluster.endpoints)
        answer = await ask(client)
        assert is_right(config, answer)
        assert answer.timings.num_attempts > 1
        assert decode_pid(cluster.endpoints) != pid_before
