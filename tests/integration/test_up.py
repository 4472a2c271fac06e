"""The command itself: `kvferry up` with the real model in real processes, driven by the commands scripts rely on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.commands import plain_environment
from tests.support.forks import ROOT

EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KVFERRY = [sys.executable, "-m", "kvferry.cli.app"]
TIMEOUT_S = 90.0

pytestmark = [pytest.mark.model, pytest.mark.processes]


def run_command(*arguments: str, expect: int = 0) -> str:
    """Standard output of one `kvferry` command."""
    done = subprocess.run([*KVFERRY, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == expect, done.stderr
    return done.stdout if expect == 0 else done.stderr


@pytest.fixture(scope="module")
def up(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A running `kvferry up`; its ready line."""
    log = tmp_path_factory.mktemp("up") / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                *KVFERRY,
                *("up", "--prefill", "1", "--decode", "1", "--model", str(smollm2_folder), "--dtype", "float32"),
                *("--ready-json", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"),
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield {**json.loads(line), "up_pid": process.pid}
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def generate(up: dict[str, Any], *arguments: str) -> dict[str, Any]:
    output = run_command("generate", "--target", up["grpc"], "--json", *arguments)
    answer: dict[str, Any] = json.loads(output)
    return answer


def test_the_ready_line_names_three_processes_and_the_model(up: dict[str, Any], smollm2_folder: Path) -> None:
    assert set(up) >= {"grpc", "http", "model", "workers"}
    assert up["model"]["path"] == str(smollm2_folder)
    workers = json.loads(run_command("workers", "--target", up["grpc"], "--json"))
    keys = ("id", "role", "pid", "address")
    assert [tuple(w[key] for key in keys) for w in workers] == [tuple(w[key] for key in keys) for w in up["workers"]]
    pids = {up["up_pid"], up["router"]["pid"], *(worker["pid"] for worker in up["workers"])}
    assert len(pids) == 4
    for pid in pids:
        os.kill(pid, 0)


def test_generate_answers_with_ids_text_usage_and_timings(up: dict[str, Any]) -> None:
    options = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos")
    text = generate(up, *options, "The capital of France is")
    assert "Paris" in text["choices"][0]["text"]
    assert len(text["choices"][0]["token_ids"]) == 8
    assert text["usage"]["completion_tokens"] == 8
    assert text["timings"]["num_blocks_shipped"] > 0
    ids = generate(up, *options, "--prompt-token-ids", ",".join(["504", "3575", "282", "4649", "314"]))
    assert ids["choices"][0]["token_ids"] == text["choices"][0]["token_ids"]
    assert set(ids["usage"]) >= {"prompt_tokens", "completion_tokens", "cached_tokens"}


def test_health_and_metrics_are_served(up: dict[str, Any]) -> None:
    assert httpx.get(f"{up['http']}/health", timeout=10).status_code == 200
    metrics = httpx.get(f"{up['http']}/metrics", timeout=10).text
    assert "gen_ai_server_time_to_first_token_seconds_count" in metrics
    assert "kvferry_requests_total" in metrics


def test_a_bad_request_is_one_clear_line(up: dict[str, Any]) -> None:
    line = run_command("generate", "--target", up["grpc"], "--temperature", "-1", "hello", expect=1)
    assert "temperature" in line and "Traceback" not in line and len(line.strip().splitlines()) == 1


@pytest.mark.soak
def test_a_killed_worker_is_started_again_and_serves(up: dict[str, Any]) -> None:
    prompt = ("--max-tokens", "4", "--temperature", "0", "--ignore-eos", "One two three four")
    before = generate(up, *prompt)["choices"][0]["token_ids"]
    victim = next(worker for worker in up["workers"] if worker["role"] == "prefill")
    os.kill(victim["pid"], signal.SIGKILL)
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        workers = json.loads(run_command("workers", "--target", up["grpc"], "--json"))
        prefill = next(worker for worker in workers if worker["role"] == "prefill")
        if prefill["state"] == "ready" and prefill["pid"] != victim["pid"]:
            break
        time.sleep(0.2)  # another process's state; there is nothing to wait on
    assert generate(up, *prompt)["choices"][0]["token_ids"] == before


def output_of(program: str) -> str:
    """What it writes; fails where it writes an error or does not end."""
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stderr) == (0, ""), program
    return done.stdout


def test_the_readmes_examples_run_and_say_what_they_should(up: dict[str, Any]) -> None:
    """Each as a program of its own."""
    examples = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    places = {"127.0.0.1:50051": up["grpc"], "http://127.0.0.1:8000": up["http"]}
    for name, place in places.items():
        examples = [example.replace(name, place) for example in examples]
    with ThreadPoolExecutor(len(examples)) as threads:
        chat, streams, fields, errors, openai = threads.map(output_of, examples)
    assert "Paris" in chat and "Paris" in streams and openai
    assert "kind=<FinishKind.LENGTH" in streams
    *beams, answer, score, ids = fields.splitlines()
    assert len(beams) >= 2 and answer == "yes" and float(score) < 0 and ids.endswith("Paris is in France")
    assert errors.startswith("sampling.top_p sampling.top_p: 2")
