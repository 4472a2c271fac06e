"""Planning, on lengths whose blocks can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.plan import Choice, PlanInput, choices, choose, holding, make_plan, read_layout
from kvferry.errors import FailedPrecondition, ResourceExhausted
from kvferry.kv_layout import KvLayout
from kvferry.lengths import RequestLength

LAYOUT = KvLayout(1, 1, 2, 1, "bfloat16", "")  # 8 bytes a token


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
