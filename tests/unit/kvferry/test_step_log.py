"""The file of an engine's last steps, as it is found after the engine has gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core import EngineCore, EngineLimits
from engine.local import generate
from engine.scripted import ScriptedRunner
from engine.sequence import Sequence
from kvferry.errors import FailedPrecondition
from kvferry.sampling import SamplingParams
from kvferry.step_log import NUM_STEPS, MappedStepLog, StepRecord, read_steps

SECOND_NS = 10**9


def test_the_last_steps_are_read_oldest_first(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    log = MappedStepLog(file)
    for number in range(1, 3 * NUM_STEPS + 2):
        log.begin(number, number * SECOND_NS, num_sequences=2, num_tokens=number)
        log.end(number, number * SECOND_NS + SECOND_NS // 2)
    steps = read_steps(file)
    assert [step.number for step in steps] == list(range(2 * NUM_STEPS + 2, 3 * NUM_STEPS + 2))
    last = 3 * NUM_STEPS + 1
    assert steps[-1] == StepRecord(last, float(last), 0.5, num_sequences=2, num_tokens=last)


def test_a_step_that_did_not_end_has_no_duration(tmp_path: Path) -> None:
    """Also where its place in the ring held another one."""
    log = MappedStepLog(tmp_path / "steps")
    for number in range(1, NUM_STEPS + 1):
        log.begin(number, SECOND_NS, 1, 1)
        log.end(number, 2 * SECOND_NS)
    log.begin(NUM_STEPS + 1, SECOND_NS, 1, 9)
    assert read_steps(tmp_path / "steps")[-1] == StepRecord(NUM_STEPS + 1, 1.0, None, 1, 9)


def test_a_new_life_begins_with_an_empty_file(tmp_path: Path) -> None:
    MappedStepLog(tmp_path / "steps").begin(7, SECOND_NS, 1, 1)
    MappedStepLog(tmp_path / "steps")
    assert read_steps(tmp_path / "steps") == []


def test_no_file_or_half_a_one_is_no_error(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none") == []
    (tmp_path / "half").write_bytes(b"\1" * 17)
    assert read_steps(tmp_path / "half") == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"cannot write .*/none/steps: No such file or directory"):
        MappedStepLog(tmp_path / "none" / "steps")


KILLED = """
import os, pathlib, signal, sys
from kvferry.step_log import MappedStepLog
log = MappedStepLog(pathlib.Path(sys.argv[1]))
log.begin(1, 10**9, 3, 4)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_steps_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "steps")], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_steps(tmp_path / "steps") == [StepRecord(1, 1.0, None, 3, 4)]


def test_an_engine_tells_every_step(tmp_path: Path) -> None:
    core = EngineCore(ScriptedRunner(num_blocks=64), EngineLimits(max_batched_tokens=8, max_running=8))
    core.step_log = MappedStepLog(tmp_path / "steps")
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    generate(core, [Sequence("one", list(range(10)), sampling)])
    steps = read_steps(tmp_path / "steps")
    assert [(step.number, step.num_sequences, step.num_tokens) for step in steps] == [
        (1, 1, 8),
        (2, 1, 2),
        (3, 1, 1),
        (4, 1, 1),
    ]
    assert all(step.duration_s is not None for step in steps)
