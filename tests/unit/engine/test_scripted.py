"""The scripted runner: its rule by hand, its sensitivity to every block, its modes and faults."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.forward_batch import Sampled, SampleRequest, SequenceSlice
from engine.runner import RunnerConfig, open_runner
from engine.scripted import (
    SCRIPT_FILE,
    ScriptConfig,
    ScriptedRunner,
    load_script_config,
    reference_continuation,
    scripted_next_token,
)
from kvferry.errors import FailedPrecondition
from kvferry.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 111]


def slice_of(
    token_ids: list[int],
    start: int,
    end: int,
    table: list[int],
    sampling: SamplingParams | None = GREEDY,
    outputs: int = 0,
) -> SequenceSlice:
    sample = None if sampling is None else SampleRequest(sampling, end, outputs)
    return SequenceSlice("s", token_ids[start:end], start, table, sample)


def runner_of(**config: Any) -> ScriptedRunner:
    return ScriptedRunner(ScriptConfig(**config), num_blocks=8, block_size=4)


def test_the_rule_by_hand() -> None:
    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8).digest()

    first = digest(bytes(8) + struct.pack("<q", 5))
    second = digest(first + struct.pack("<q", 6))
    state = int.from_bytes(digest(first + second), "little")
    config = ScriptConfig(vocab_size=100, lowest_token_id=10)
    assert scripted_next_token([5, 6], config) == 10 + state % 90
    one = scripted_next_token([5, 6], config)
    assert reference_continuation([5, 6], 2, config) == [one, scripted_next_token([5, 6, one], config)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_chunks_and_scattered_blocks_give_the_reference(chunk: int) -> None:
    runner = runner_of()
    table = [6, 1, 4, 0, 7]
    token_ids = list(PROMPT)
    for start in range(0, len(PROMPT), chunk):
        end = min(start + chunk, len(PROMPT))
        (sampled,) = runner.run([slice_of(token_ids, start, end, table)])
    for output in range(1, 9):
        assert sampled is not None
        assert sampled.token_id is not None
        token_ids.append(sampled.token_id)
        (sampled,) = runner.run([slice_of(token_ids, len(token_ids) - 1, len(token_ids), table, outputs=output)])
    assert token_ids[len(PROMPT) :] == reference_continuation(PROMPT, 8)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_any_lost_block_changes_the_token(block: int) -> None:
    runner = runner_of()
    table = [6, 1, 4]
    runner.run([slice_of(PROMPT, 0, 9, table, sampling=None)])
    runner.block_view(table[block])[:1] = b"\xff"
    assert runner.run([slice_of(PROMPT, 9, 10, table)]) != [Sampled(scripted_next_token(PROMPT))]


def test_swapped_blocks_change_the_token() -> None:
    runner = runner_of()
    runner.run([slice_of(PROMPT, 0, 9, [6, 1, 4], sampling=None)])
    assert runner.run([slice_of(PROMPT, 9, 10, [1, 6, 4])]) != [Sampled(scripted_next_token(PROMPT))]


def test_equal_prefixes_have_equal_blocks_elsewhere() -> None:
    one, other = runner_of(), runner_of()
    one.run([slice_of(PROMPT, 0, 10, [0, 1, 2], sampling=None)])
    other.run([slice_of([*PROMPT[:8], 5], 0, 9, [5, 6, 7], sampling=None)])
    assert bytes(one.block_view(0)) == bytes(other.block_view(5))
    assert bytes(one.block_view(1)) == bytes(other.block_view(6))
    assert bytes(one.block_view(2)) != bytes(other.block_view(7))
    other.block_view(3)[:] = one.copy_partial(2, 2)
    assert other.run([slice_of(PROMPT, 9, 10, [5, 6, 3])]) == [Sampled(scripted_next_token(PROMPT))]


def test_partial_copy_has_zeroed_tail() -> None:
    runner = runner_of()
    runner.run([slice_of(PROMPT, 0, 8, [2, 3], sampling=None)])
    copied = runner.copy_partial(2, 3)
    assert copied == bytes(runner.block_view(2)[:24]) + bytes(8)
    assert len(copied) == runner.layout.block_bytes == 32


def test_sampling_depends_on_seed_and_choice() -> None:
    params = [SamplingParams(max_tokens=9, seed=seed) for seed in (1, 2)]
    continuations = [reference_continuation(PROMPT, 5, sampling=one, choice=c) for one in params for c in (0, 1)]
    assert len({tuple(tokens) for tokens in continuations}) == 4
    (sampled,) = runner_of().run([slice_of(PROMPT, 0, 10, [0, 1, 2], params[0])])
    assert sampled == Sampled(continuations[0][0])


def test_script_mode_goes_by_output_index() -> None:
    runner = runner_of(mode="script", script=[7, 8, 9])
    tokens = [runner.run([slice_of(PROMPT, 0, 10, [0, 1, 2], outputs=index)])[0] for index in range(5)]
    assert tokens == [Sampled(token) for token in (7, 8, 9, 7, 8)]


def test_table_mode_goes_by_the_last_token() -> None:
    runner = runner_of(mode="table", table={111: 5})
    assert runner.run([slice_of(PROMPT, 0, 10, [0, 1, 2])]) == [Sampled(5)]
    assert runner.run([slice_of(PROMPT, 0, 9, [0, 1, 2])]) == [Sampled(99)]


def test_a_fault_fails_its_sequence_only() -> None:
    runner = runner_of(nan_at_output_index=[3])
    broken, whole = runner.run(
        [slice_of(PROMPT, 0, 10, [0, 1, 2], outputs=3), slice_of(PROMPT, 0, 10, [3, 4, 5], outputs=2)]
    )
    assert broken is not None
    assert broken.token_id is None
    assert "non-finite" in str(broken.error)
    assert whole == Sampled(scripted_next_token(PROMPT))


def test_delays_are_slept_once_a_step() -> None:
    slept: list[float] = []
    config = ScriptConfig(step_delay_s=0.5, token_delay_s=0.25)
    runner = ScriptedRunner(config, num_blocks=8, block_size=4, sleep=slept.append)
    runner.run([slice_of(PROMPT, 0, 8, [0, 1], None), slice_of(PROMPT, 0, 4, [2], None)])
    assert slept == [0.5 + 0.25 * 12]


def test_a_folder_opens_with_its_script(tmp_path: Path) -> None:
    (tmp_path / SCRIPT_FILE).write_text(json.dumps({"vocab_size": 64, "max_context": 99, "table": {"1": 2}}))
    runner = open_runner(tmp_path, RunnerConfig(num_blocks=3, block_size=4))
    assert isinstance(runner, ScriptedRunner)
    assert (runner.vocab_size, runner.max_context, runner.num_blocks, runner.layout.block_size) == (64, 99, 3, 4)
    assert runner.config.table == {1: 2}
    assert runner.layout.model_fingerprint != runner_of().layout.model_fingerprint


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", SCRIPT_FILE),
        ('{"vocab": 3}', "vocab"),
        ('{"mode": "script"}', "script"),
        ('{"mode": "other"}', "mode"),
        ('{"vocab_size": 4, "script": [4]}', "from 0 to 3"),
        ('{"vocab_size": 4, "lowest_token_id": 4}', "lowest_token_id"),
        ('{"step_delay_s": -1}', "step_delay_s"),
    ],
)
def test_a_wrong_script_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / SCRIPT_FILE).write_text(text)
    with pytest.raises(FailedPrecondition, match=named) as caught:
        load_script_config(tmp_path)
    assert SCRIPT_FILE in caught.value.message


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / SCRIPT_FILE).write_text("{}")
    code = (
        "import sys, pathlib; from engine.runner import RunnerConfig, open_runner;"
        f"open_runner(pathlib.Path({str(tmp_path)!r}), RunnerConfig(num_blocks=2));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
