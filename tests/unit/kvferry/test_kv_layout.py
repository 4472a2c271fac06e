"""Sizes of blocks, and how many are needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.kv_layout import KV_WIRE_VERSION, KvLayout, num_beam_blocks

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16", model_fingerprint="m")


def test_bytes_follow_from_the_shape() -> None:
    assert LAYOUT.bytes_per_token == 3 * 2 * 2 * 8 * 2
    assert LAYOUT.block_bytes == 4 * LAYOUT.bytes_per_token
    assert [LAYOUT.num_blocks_for(num_tokens) for num_tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_differences_name_both_values() -> None:
    other = replace(LAYOUT, block_size=8, dtype="float32")
    assert LAYOUT.differences(other) == ("block_size: 4 here, 8 there", "dtype: bfloat16 here, float32 there")
    assert LAYOUT.differences(LAYOUT) == ()


@pytest.mark.parametrize(("distance", "differs"), [(-2, True), (-1, False), (0, False), (1, False), (2, True)])
def test_wire_versions_may_be_one_apart(distance: int, differs: bool) -> None:
    other = replace(LAYOUT, wire_version=KV_WIRE_VERSION + distance)
    both = f"wire_version: {KV_WIRE_VERSION} here, {KV_WIRE_VERSION + distance} there"
    assert LAYOUT.differences(other) == ((both,) if differs else ())


def test_ropes_differ_only_where_both_are_told() -> None:
    told, other, none = (replace(LAYOUT, rope_digest=digest) for digest in ("a", "b", "none"))
    assert told.differences(other) == ("rope_digest: a here, b there",)
    assert none.differences(told) == ("rope_digest: none here, a there",)
    assert told.differences(LAYOUT) == LAYOUT.differences(told) == told.differences(told) == ()


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_kv_tokens", "width", "expected"),
    [
        (8, 8, 3, 2),  # one token of output: its KV is never stored
        (8, 9, 3, 2 + 3),
        (7, 8, 3, 1 + 3),  # the partial block of the prompt is each beam's own
        (3, 9, 2, 2 * 3),
        (8, 17, 1, 5),
    ],
)
def test_beams_share_the_full_blocks_of_the_prompt(
    num_prompt_tokens: int, num_kv_tokens: int, width: int, expected: int
) -> None:
    assert num_beam_blocks(num_prompt_tokens, num_kv_tokens, width, block_size=4) == expected
