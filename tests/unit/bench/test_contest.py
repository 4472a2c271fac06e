"""Engines asked in turn: the same prompts for all, what fails is left out and named, tables of what is there."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.cpu import contest
from bench.cpu.cases import Case, cases
from bench.cpu.child import Child, ChildFailed
from bench.cpu.contest import Contest
from bench.cpu.demand import Shape
from bench.cpu.limits import Limits
from bench.cpu.page import write_part
from bench.cpu.systems import Machine, System, ours, peers
from bench.cpu.tables import Measured, tables

FAKE = """
import json, sys
log = open(sys.argv[1], "a")
print(json.dumps({"ready": True}), flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    log.write(sys.argv[2] + " " + line)
    log.flush()
    if number == int(sys.argv[3]):
        sys.exit("out of luck")
    print(json.dumps({"seconds": 0.5, "tokens": asked.get("steps", 0) * 2}), flush=True)
"""
SHAPE = Shape(30, 576, 1536, 9, 3, 64, 49_152)


@dataclass(frozen=True, slots=True)
class _Scripted(System):
    log: Path = Path()
    fails_at: int = -1

    def open(self, on: Machine) -> Child:
        command = [sys.executable, "-c", FAKE, str(self.log), self.name, str(self.fails_at)]
        return Child(self.name, command, {})


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "REST_S", 0.0)


def _run(systems: list[System], questions: list[Case]) -> Contest:
    made = Contest(systems, 2, time.monotonic() + 60, lambda text: None)
    made.run(questions, Machine(Path(), None, 1))
    return made


def test_all_are_asked_the_same_in_turn_and_warm_ups_are_not_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    case = Case(2, 5, True, 3, 10)
    made = _run([_Scripted(name, "ours", "bf16", log=log) for name in ("a", "b")], [case])
    asked = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert [text for name, text in asked if name == "a"] == [text for name, text in asked if name == "b"]
    turns = [name for name, _ in itertools.groupby(name for name, _ in asked)]
    assert turns == ["a", "b"] * 7  # three batches, three times steps, the end
    starts = [json.loads(text)["prompts"] for name, text in asked if name == "a" and '"start"' in text]
    assert len({str(prompts) for prompts in starts}) == 3
    assert made.results.prefill["a", case] == [20.0, 20.0]
    assert made.results.decode["b", case] == [12.0, 12.0]


def test_one_that_fails_is_left_out_and_named(tmp_path: Path) -> None:
    case = Case(1, 5, False, 3, 10)
    log = tmp_path / "log"
    systems = [_Scripted("a", "ours", "bf16", log=log, fails_at=2), _Scripted("b", "ours", "bf16", log=log)]
    results = _run(list(systems), [case]).results
    assert "out of luck" in results.failures["a"]
    assert results.decode["b", case] == [12.0, 12.0]
    assert ("a", case) not in results.decode
    decode = next(table for table in tables(_measured(systems, results, case)) if table.name == "decode")
    assert decode.rows == (("1, 10", None, "12 (12 – 12)"),)


def test_one_that_does_not_answer_in_time_fails() -> None:
    silent = Child("silent", [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"], {})
    try:
        silent.wait_ready()
        with pytest.raises(ChildFailed, match="silent has not answered within 0 s"):
            silent.decode(1, 0.01)
    finally:
        silent.close()


def _measured(systems: list[_Scripted], results: contest.Results, case: Case) -> Measured:
    limits = Limits(1e10, {"sum": 1e10}, 1e11, 9e10, 8e10)
    return Measured(systems, [case], results, SHAPE, limits, (), (), (), 2, 0.04, 0)


def test_needs_of_a_step() -> None:
    assert SHAPE.num_layer_weights == 106_168_320
    assert SHAPE.weight_bytes("bf16") == 2 * (106_168_320 + 576 * 49_152)
    assert SHAPE.kv_bytes(1, 16) == 368_640
    assert SHAPE.prefill_operations(1, 1) == 2 * 106_168_320 + 2 * 576 * 49_152 + 4 * 30 * 576


def test_an_environment_without_a_peer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/vllm").mkdir(parents=True)
    assert [system.kind for system in peers([tmp_path])] == ["vllm"]
    with pytest.raises(ValueError, match="neither vLLM nor OpenVINO"):
        peers([tmp_path / "other"])


def test_every_precision_asked_for_runs_and_plain_torch_is_spared_the_largest() -> None:
    systems = ours(["none", "int8", "int4"], plain=True)
    assert [system.precision for system in systems] == ["bf16", "int8", "int4", "bf16"]
    assert [systems[-1].takes(case) for case in cases(quick=False)] == [True, True, True, True, False, False]


def test_only_the_part_between_the_marks_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n")
    write_part(page, "x", "new\n")
    assert page.read_text() == "before\n<!-- x: begin -->\nnew\n<!-- x: end -->\nafter\n"
    with pytest.raises(ValueError, match="there is no <!-- y: begin -->"):
        write_part(page, "y", "")
