"""`kvferry up` with stand-ins for the three services: order, ready line, demonstration, failures, ending."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from kvferry.cli.up import timing_columns
from kvferry.client import Completion
from kvferry.config import EngineConfig
from proto.kvferry.v1 import inference_pb2

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
WORKER = """
import os, pathlib, signal, sys
from kvferry.config import load_config
from kvferry.process import print_ready
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
config = load_config(pathlib.Path(options["--config"]))
assert config.model.path and config.engine.num_threads == int(os.environ["OMP_NUM_THREADS"])
if os.environ.get("FAKE_FAILURE") == __spec__.name:
    sys.stderr.write("error: model.safetensors: tensor x is missing\\n"); sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print_ready(address=f"127.0.0.1:{os.getpid() % 60000 + 1}")
while True:
    signal.pause()
"""
ROUTER = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.fake_router import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder whose modules `prefill_svc`, `decode_svc` and `router` are stand-ins."""
    for name, code in (("prefill_svc", WORKER), ("decode_svc", WORKER), ("router", ROUTER)):
        (tmp_path / f"{name}.py").write_text(code)
    model = tmp_path / "model"
    model.mkdir()
    (model / "kvferry_scripted.json").write_text("{}")
    return tmp_path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _up(folder: Path, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.cli.app", "up", "--model", str(folder / "model"), *arguments),
        *("--set", "supervisor.probe_timeout_s=600"),  # the stand-ins answer no probes
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**kept, "COLUMNS": "120", "NO_COLOR": "1", **environment},
    )


def _ports() -> list[str]:
    return ["--grpc-listen", f"127.0.0.1:{_free_port()}", "--http-listen", f"127.0.0.1:{_free_port()}"]


async def test_ready_line_then_serving_until_sigterm_with_exit_code_0(folder: Path) -> None:
    process = await _up(folder, "--prefill", "1", "--decode", "2", "--dtype", "float32", "--ready-json", *_ports())
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert ready["model"] == {"name": "model", "path": str(folder / "model")}
    assert ready["http"] == "http://127.0.0.1:1"
    assert [(worker["id"], worker["role"]) for worker in ready["workers"]] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    pids = [worker["pid"] for worker in ready["workers"]] + [ready["router"]["pid"]]
    assert len(set(pids)) == 4
    process.send_signal(signal.SIGTERM)
    _, stderr = await process.communicate()
    assert process.returncode == 0
    events = {event["event"]: event for event in map(json.loads, stderr.splitlines())}  # nothing else on stderr
    start = events["cluster_starting"]
    assert (start["num_prefill"], start["num_decode"]) == (1, 2)
    assert start["kv_memory_bytes"] == EngineConfig(engines_per_machine=3).pool_bytes()
    assert events["child_ready"]["after_s"] > 0
    assert events["draining"]["grace_s"] == 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_demonstration_streams_and_shows_where_the_time_went(folder: Path) -> None:
    process = await _up(folder, "--demo", "--once", *_ports())
    stdout, stderr = (output.decode() for output in await process.communicate())
    assert process.returncode == 0, stderr
    assert "> What is the capital of France?\nParis is it.\n" in stdout
    assert "decode-0 ready (" in stderr
    for words in ("queue", "20.0 ms", "decode tokens/s", "4.0", "blocks shipped", "4 in, 3 out"):
        assert words in stdout


FAULTS = ("--set", "faults.allow_faults=true", "--set", "faults.kill_decode_at_step=3")


async def test_faults_committed_on_purpose_are_an_event_before_anything_starts(folder: Path) -> None:
    process = await _up(folder, "--prefill", "0", "--ready-json", *FAULTS, *_ports())
    assert process.stdout is not None
    assert await process.stdout.readline()  # the workers took their part of the configuration
    process.send_signal(signal.SIGTERM)
    _, stderr = await process.communicate()
    warning, *events = map(json.loads, stderr.splitlines())
    assert (warning["event"], warning["level"], warning["role"]) == ("faults_on", "warning", "decode")
    assert warning["faults"] == ["kill before step 3"]
    assert [event["event"] for event in events].count("faults_on") == 0, "prefill workers commit none"


async def test_faults_committed_on_purpose_are_a_warning_to_people(folder: Path) -> None:
    shipping = 'faults.shipping=[{"kind": "drop", "block_index": 1}]'
    process = await _up(folder, "--demo", "--once", *FAULTS, "--set", shipping, *_ports())
    _, stderr = await process.communicate()
    assert process.returncode == 0, stderr
    assert stderr.decode().splitlines()[:2] == [
        "warning: prefill workers fail on purpose: drop, block 1",
        "warning: decode workers fail on purpose: kill before step 3; drop, block 1",
    ]


async def test_faults_that_no_worker_would_commit_are_refused(folder: Path) -> None:
    shipping = ("--set", "faults.allow_faults=true", "--set", 'faults.shipping=[{"kind": "drop"}]')
    process = await _up(folder, "--prefill", "0", *shipping, *_ports())
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode() == "error: faults: drop, every block: needs a prefill worker, and there is none\n"


async def test_worker_that_fails_is_one_clear_line(folder: Path) -> None:
    process = await _up(folder, *_ports(), FAKE_FAILURE="decode_svc")
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().count("tensor x is missing") == 1
    last = stderr.decode().splitlines()[-1]
    assert last == "error: decode-0 ended with exit code 1 before it was ready: model.safetensors: tensor x is missing"


async def test_worker_that_the_router_refuses_is_named(folder: Path) -> None:
    process = await _up(folder, *_ports(), FAKE_WORKER_STATE="refused")
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().splitlines()[-1] == "error: the router refuses worker prefill-0: why"


async def test_port_in_use_is_said_at_once(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        process = await _up(folder, "--grpc-listen", listen)
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().splitlines()[-1] == f"error: cannot listen on {listen}: Address already in use"


async def test_sigterm_while_starting_ends_the_children_too(folder: Path) -> None:
    process = await _up(folder, *_ports(), FAKE_WORKER_STATE="connecting")
    assert process.stderr is not None
    while b"child_ready" not in (line := await process.stderr.readline()) or b"router" not in line:
        assert line, "ended before the router was ready"
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0


def test_times_up_to_the_first_token_add_up() -> None:
    timings = inference_pb2.Timings(queue_s=0.001, prefill_s=0.02, ship_s=0.01, time_to_first_token_s=0.05)
    columns = timing_columns(Completion(timings=timings))
    rows = dict(zip(columns["where the time went"], columns[""], strict=True))
    assert (rows["queue"], rows["prefill"], rows["other"]) == ("1.0 ms", "20.0 ms", "29.0 ms")
    assert rows["first token, sum"] == "50.0 ms"
