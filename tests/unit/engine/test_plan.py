"""Planning, on lengths whose blocks can be counted by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from engine import plan as planning
from engine.forward_batch import SequenceSlice
from engine.plan import (
    MAX_WORK,
    WATERMARKS,
    Choice,
    PercentLines,
    PlanInput,
    PlanRunner,
    choices,
    choose,
    drawn,
    holding,
    main,
    make_plan,
    read_layout,
    read_max_context,
    scale_of,
)
from kvferry.errors import FailedPrecondition, ResourceExhausted
from kvferry.kv_layout import KvLayout
from kvferry.lengths import RequestLength

LAYOUT = KvLayout(1, 1, 2, 1, "bfloat16", "")  # 8 bytes a token
SMOLLM = KvLayout(30, 3, 64, 1, "bfloat16", "")  # 23,040 bytes a token
MILLION = 1 << 20


def test_blocks_of_one_request_by_hand() -> None:
    """Prompt 3, output 4: 3, 4, 5, 6 tokens in 1, 1, 2, 2 blocks of 4."""
    held = holding([RequestLength(3, 4)], block_size=4)
    assert (held.mean_blocks, held.deviation_blocks, held.mean_tokens) == (1.5, 0.5, 4.5)
    assert held.tail_waste == pytest.approx(1 - 4.5 / 6)


def test_blocks_are_those_counted_one_by_one() -> None:
    lengths = [RequestLength(7, 40), RequestLength(16, 1), RequestLength(1, 3)]
    tokens = [one.num_prompt_tokens + step for one in lengths for step in range(one.num_output_tokens)]
    blocks = [-(-number // 8) for number in tokens]
    held = holding(lengths, block_size=8)
    assert held.mean_blocks == pytest.approx(sum(blocks) / len(blocks))
    assert held.mean_tokens == pytest.approx(sum(tokens) / len(tokens))


def test_safe_number_leaves_room_for_what_blocks_vary() -> None:
    steady = holding([RequestLength(8, 1)], block_size=8)  # always one block
    assert steady.max_sequences(100) == 100
    varying = holding([RequestLength(3, 4)], block_size=4)
    number = varying.max_sequences(100)
    assert number * 1.5 + 2.33 * 0.5 * number**0.5 <= 100 < (number + 1) * 1.5 + 2.33 * 0.5 * (number + 1) ** 0.5


def test_largest_block_size_within_the_waste_is_chosen() -> None:
    found = [Choice(size, 10, 1.0, 0.0, waste, 1, 1) for size, waste in ((8, 0.01), (16, 0.03), (32, 0.06))]
    assert choose(found).block_size == 16
    assert choose(found[2:]).block_size == 32


def test_plan_of_equal_requests() -> None:
    """Every request holds 100 to 103 tokens: 13 blocks of 8. Memory of 1,040 tokens holds ten of them."""
    given = PlanInput(LAYOUT, [RequestLength(100, 4)] * 5, memory_bytes=8 * 1040)
    plan = make_plan(given)
    assert [row["block_size"] for row in plan["block_sizes"]] == [8, 16, 32, 64, 128, 256]
    eight = plan["block_sizes"][0]
    assert (eight["num_blocks"], eight["mean_blocks"], eight["mean_sequences"]) == (130, 13.0, 10)
    assert eight["tail_waste"] == pytest.approx(1 - 101.5 / 104)
    assert plan["settings"] == {"block_size": 8, "kv_memory_bytes": 8320, "watermark": 0.01, "max_running": 10}
    assert plan["concurrency"] == 10
    assert plan["simulated"]["watermarks"][0]["per_100_requests"] == 0.0
    assert plan["requests"] == {
        "count": 5,
        "mean_prompt_tokens": 100.0,
        "mean_output_tokens": 4.0,
        "longest_tokens": 104,
    }
    assert "largest whose tail waste" in plan["reasons"][0]


def test_growing_requests_need_a_watermark() -> None:
    """Short prompts that grow long: without room they preempt one another, and the plan says how often."""
    given = PlanInput(LAYOUT, [RequestLength(4, 200 + 7 * index) for index in range(20)], memory_bytes=8 * 4000)
    plan = make_plan(given)
    counted = plan["simulated"]["watermarks"]
    assert counted[0]["per_100_requests"] > counted[-1]["per_100_requests"]
    assert plan["settings"]["watermark"] == counted[-1]["watermark"]


def test_batch_beyond_the_budget_raises_the_budget() -> None:
    given = PlanInput(LAYOUT, [RequestLength(8, 8)] * 3, memory_bytes=8 * 16 * 300, max_batched_tokens=64)
    settings = make_plan(given)["settings"]
    assert settings["max_batched_tokens"] == settings["max_running"] > 64


class Meter:
    """Counts what the runners of all simulations are asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_steps = self.num_slices = 0
        run = PlanRunner.run

        def counted(runner: PlanRunner, slices: list[SequenceSlice], *rest: object) -> object:
            self.num_steps += 1
            self.num_slices += len(slices)
            return run(runner, slices, *rest)  # type: ignore[arg-type]

        patch.setattr(PlanRunner, "run", counted)


@pytest.mark.parametrize(
    ("lengths", "memory_bytes", "max_batched_tokens"),
    [
        pytest.param([(1000, 8000), (500, 4000), (2000, 6000)], 40 << 30, 512, marks=pytest.mark.sweep),
        pytest.param([(20, 200_000)], 100 << 30, 512, marks=pytest.mark.sweep),
        ([(1, 1)], 1 << 50, 512),
        ([(MILLION, MILLION)], 1 << 50, 512),
        ([(MILLION, 20)], 1 << 50, 1),
        pytest.param([(1, 8000)], 4 << 30, 512, marks=pytest.mark.sweep),
        ([(1, 1)] * 99 + [(20, 200_000)], 100 << 30, 512),
    ],
)
def test_work_is_bounded_whatever_the_lengths(
    lengths: list[tuple[int, int]], memory_bytes: int, max_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(monkeypatch)
    requests = [RequestLength(*pair) for pair in lengths]
    plan = make_plan(PlanInput(SMOLLM, requests, memory_bytes, max_batched_tokens))
    counted = plan["simulated"]["watermarks"]
    assert 0 < meter.num_steps <= meter.num_slices <= MAX_WORK * len(counted)
    assert all(row["num_requests"] > 0 and row["mean_running"] > 0 and row["is_whole"] for row in counted)


def test_reduced_simulation_says_its_share() -> None:
    given = PlanInput(SMOLLM, [RequestLength(20, 200_000)], memory_bytes=100 << 30)
    plan = make_plan(given)
    simulated = plan["simulated"]
    assert (simulated["scale"], simulated["memory_share"], simulated["max_running"]) == (2, 0.5, 23)
    assert simulated["tokens_per_simulated_token"] > 1
    assert "simulated with 23 sequences at most, 1/2 of max_running, in 0.5 of the memory" in plan["reasons"][2]
    assert f"simulated {simulated['tokens_per_simulated_token']} tokens at a time" in plan["reasons"][2]


def test_simulation_that_takes_too_long_ends_early_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_WORK", 500)
    plan = make_plan(PlanInput(LAYOUT, [RequestLength(100, 4)] * 5, memory_bytes=8 * 1040))
    (row,) = plan["simulated"]["watermarks"]
    assert not row["is_whole"] and 0 < row["num_requests"] < 30
    assert f"ended early, after {row['num_requests']} requests" in plan["reasons"][2]


def test_merged_tokens_hold_the_same_blocks() -> None:
    """Two tokens at a time, 7 + 40 tokens in blocks of 16 are 4 + 20 in blocks of 8: 1, then 2, then 3 blocks."""
    choice = Choice(16, 100, 2.0, 0.5, 0.01, 50, 40)
    given = PlanInput(LAYOUT, [RequestLength(7, 960)], memory_bytes=8 * 1600)
    scale = scale_of(given, choice)
    assert (scale.divisor, scale.num_blocks, scale.max_running) == (1, 100, 50)
    assert scale.num_merged > 1 and scale.block_size * scale.num_merged == 16
    (length,) = scale.lengths
    for num_tokens in range(0, 960, scale.num_merged):
        merged = length.num_prompt_tokens + num_tokens // scale.num_merged
        assert -(-merged // scale.block_size) == -(-(7 + num_tokens) // 16)


def test_requests_drawn_from_a_sorted_list_are_of_all_sizes() -> None:
    lengths = [RequestLength(1 + index, 1) for index in range(1000)]
    found = sorted(one.num_prompt_tokens for one in drawn(lengths, 100))
    assert len(set(found)) == 100
    assert max(after - before for before, after in zip([0, *found], [*found, 1001], strict=True)) <= 50
    assert drawn(lengths, 1000) == lengths
    assert len(drawn(lengths[:3], 2)) == 2


def test_sequences_that_finish_in_a_step_ran_in_it() -> None:
    """One token each: every sequence ends in the step that it starts in; eight of them fit."""
    plan = make_plan(PlanInput(LAYOUT, [RequestLength(1, 1)], memory_bytes=8 * 64))
    (row,) = plan["simulated"]["watermarks"]
    assert plan["settings"]["max_running"] == 8
    assert 7.0 <= row["mean_running"] <= 8.0
    assert f"{row['mean_running']:g} sequences run on average" in plan["reasons"][2]


def test_progress_rises_to_one_and_is_told_by_the_percent() -> None:
    told: list[float] = []
    make_plan(PlanInput(LAYOUT, [RequestLength(4, 200 + 7 * index) for index in range(20)], 8 * 4000), told.append)
    assert told[-1] == 1.0 and len(told) > 100
    assert told == sorted(told)
    file = io.StringIO()
    report = PercentLines(file)
    for done in (0.0, 0.011, 0.012, 0.5, 1.0):
        report(done)
    assert file.getvalue() == "progress 1\nprogress 50\nprogress 100\n"
    assert len(WATERMARKS) > 1


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"max_position_embeddings": 8192}, None, 8192),
        ({"max_position_embeddings": 8192}, 4096, 4096),
        ({"max_position_embeddings": 8192}, 10_000, 8192),
        ({"n_positions": 1024}, None, 1024),
        ({"text_config": {"max_position_embeddings": 77}}, None, 77),
        ({}, None, None),
        ({}, 99, 99),
    ],
)
def test_context_comes_from_the_configuration(
    config: dict[str, object], given: int | None, expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_max_context(tmp_path, given) == expected


def test_requests_beyond_the_context_are_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvferry_scripted.json").write_text('{"max_context": 50}')
    (tmp_path / "lengths.csv").write_text("10,40\n10,41\n")
    arguments = ["--folder", str(tmp_path), "--lengths", str(tmp_path / "lengths.csv"), "--memory-bytes", "80000"]
    assert main(arguments) == 1
    assert "line 2: prompt_len + output_len are 51 tokens; the model's context is 50" in capsys.readouterr().err
    assert main([*arguments, "--max-context", "49"]) == 1
    assert "line 1: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "7", "{"])
def test_unreadable_configuration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FailedPrecondition, match="is not a readable configuration"):
        read_max_context(tmp_path)


def test_memory_that_holds_no_request_is_refused() -> None:
    given = PlanInput(LAYOUT, [RequestLength(100, 1)], memory_bytes=8 * 99)
    with pytest.raises(ResourceExhausted, match=r"792 bytes hold 99 tokens.*the longest request has 101"):
        choices(given)


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        ({"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, 23_040),
        ({"n_layer": 2, "n_head": 4, "n_embd": 32}, 256),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "head_dim": 16}}, 128),
    ],
)
def test_size_of_a_token_comes_from_the_configuration(
    config: dict[str, object], bytes_per_token: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_layout(tmp_path, "bfloat16").bytes_per_token == bytes_per_token
    assert read_layout(tmp_path, "float32").bytes_per_token == 2 * bytes_per_token


def test_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(FailedPrecondition, match="has no num_attention_heads"):
        read_layout(tmp_path, "bfloat16")
