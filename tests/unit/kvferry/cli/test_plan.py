"""`kvferry plan`, as a process, for a scripted model and a known file."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from pathlib import Path
from typing import Protocol

import pytest

from kvferry.cli.plan import MAX_MEMORY_BYTES, parse_size
from kvferry.errors import InvalidArgument
from tests.support.commands import CommandServer, Outcome, plain_environment

pytestmark = pytest.mark.processes


class Plan(Protocol):
    """Runs `kvferry plan ARGUMENTS` to its end."""

    async def __call__(self, *arguments: str, cwd: Path) -> Outcome: ...


@pytest.fixture
def plan(commands: CommandServer) -> Plan:
    async def run(*arguments: str, cwd: Path) -> Outcome:
        return await commands.run("plan", *arguments, environment=plain_environment(), cwd=cwd)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """8 bytes of KV a token."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "kvferry_scripted.json").write_text("{}")
    return folder


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_len,output_len\n" + "100,4\n" * 5)
    return path


async def test_json_holds_settings_figures_and_reasons(plan: Plan, model: Path, lengths: Path, tmp_path: Path) -> None:
    arguments = ("--lengths", str(lengths), "--memory", "8320", "--model", str(model), "--json")
    outcome = await plan(*arguments, cwd=tmp_path)
    assert (outcome.code, outcome.stderr) == (0, "")
    made = json.loads(outcome.stdout)
    assert made["settings"] == {"block_size": 8, "kv_memory_bytes": 8320, "watermark": 0.01, "max_running": 10}
    assert (made["concurrency"], made["bytes_per_token"]) == (10, 8)
    assert len(made["reasons"]) == 4


async def test_text_can_be_pasted_into_the_configuration(
    plan: Plan, model: Path, lengths: Path, tmp_path: Path
) -> None:
    outcome = await plan("--lengths", str(lengths), "--memory", "8320", "--model", str(model), cwd=tmp_path)
    assert outcome.code == 0, outcome.stderr
    assert "[engine]\nblock_size = 8\nkv_memory_bytes = 8320\nwatermark = 0.01\nmax_running = 10\n" in outcome.stdout
    assert "tail waste" in outcome.stdout


@pytest.mark.parametrize(
    ("memory", "text", "expected"),
    [
        ("1KiB", "100,4\n5\n", "line 2: 1 cells"),
        ("512B", "100,4\n", "512 bytes hold 64 tokens"),
        ("lots", "100,4\n", "--memory: must be a size such as 8GiB"),
        ("9" * 400, "100,4\n", "--memory: must be at most 1125899906842624 bytes"),
        ("1KiB", f"100,4\n{'9' * 5000},4\n", "line 2: prompt_len must be a whole number from 1 to 1048576"),
        ("1MiB", "100,4\n100,3997\n", "line 2: prompt_len + output_len are 4097 tokens; the model's context is 4096"),
    ],
)
async def test_errors_are_one_line(
    plan: Plan, memory: str, text: str, expected: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    outcome = await plan("--lengths", str(path), "--memory", memory, "--model", str(model), cwd=tmp_path)
    assert (outcome.code, outcome.stdout) == (2 if expected.startswith("--") else 1, "")
    assert expected in outcome.stderr and outcome.stderr.count("\n") == 1


async def test_context_of_the_configuration_counts(plan: Plan, model: Path, lengths: Path, tmp_path: Path) -> None:
    arguments = ("--lengths", str(lengths), "--memory", "8320", "--model", str(model))
    outcome = await plan(*arguments, "--set", "engine.max_context=103", cwd=tmp_path)
    assert outcome.code == 1
    assert "line 2: prompt_len + output_len are 104 tokens; the model's context is 103" in outcome.stderr


async def test_terminal_sees_progress_and_a_pipe_does_not(
    plan: Plan, model: Path, lengths: Path, tmp_path: Path
) -> None:
    arguments = ("plan", "--lengths", str(lengths), "--memory", "8320", "--model", str(model), "--json")
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.cli.app", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    stdout, _ = await process.communicate()
    shown = os.read(ours, 1 << 16).decode(errors="replace")  # a read ends after 4 KiB, within a character or not
    os.close(ours)
    assert process.returncode == 0 and json.loads(stdout)["concurrency"] == 10
    assert "simulating requests" in shown and "%" in shown
    assert (await plan(*arguments[1:], cwd=tmp_path)).stderr == ""


async def test_help_has_an_example(plan: Plan, tmp_path: Path) -> None:
    outcome = await plan("--help", cwd=tmp_path)
    assert outcome.code == 0
    assert "Example: kvferry plan --lengths lengths.csv --memory 8GiB" in outcome.stdout


@pytest.mark.parametrize(
    ("text", "expected"), [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 ki", 1536), ("42", 42), ("3b", 3)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


def test_sizes_are_bounded() -> None:
    assert parse_size("1024TiB") == MAX_MEMORY_BYTES
    for text in ("1024.1TiB", "1" + "0" * 400, "9" * 5000 + "GiB"):
        with pytest.raises(InvalidArgument, match="--memory: must be at most 1125899906842624 bytes") as caught:
            parse_size(text)
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "8 apples", "1e9"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="must be a size"):
        parse_size(text)
