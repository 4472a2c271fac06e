"""Recompute or swap: the choice by cost, and what is measured for it."""

from __future__ import annotations

import pytest

from engine.opening import measure_preemption
from engine.preemption import PreemptionPolicy
from engine.scripted import ScriptConfig, ScriptedRunner
from engine.sequence import Sequence
from kvferry.sampling import SamplingParams


def unit(num_blocks: int, num_computed_tokens: int) -> list[Sequence]:
    sequence = Sequence("a", [0] * (num_computed_tokens + 1), SamplingParams(max_tokens=5))
    sequence.block_table = list(range(num_blocks))
    sequence.num_computed_tokens = num_computed_tokens
    return [sequence]


def test_the_cheaper_kind_is_chosen() -> None:
    """Ten blocks out and in at 2 s each are 40 s; a hundred tokens at 0.5 s are 50 s, at 0.3 s 30 s."""
    assert PreemptionPolicy("auto", recompute_s_per_token=0.5, swap_s_per_block=2.0).prefers_swap(unit(10, 100), 16)
    assert not PreemptionPolicy("auto", recompute_s_per_token=0.3, swap_s_per_block=2.0).prefers_swap(unit(10, 100), 16)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_mode_forces_its_kind(mode: str) -> None:
    for recompute_s, swap_s in ((1.0, 0.0), (0.0, 1.0)):
        policy = PreemptionPolicy(mode, recompute_s, swap_s)  # type: ignore[arg-type]
        assert policy.prefers_swap(unit(1, 16), 16) == (mode == "swap")


def test_what_beams_share_counts_once() -> None:
    """Two beams of 100 tokens in the same ten blocks of 16: 40 s to copy, at most 160 tokens to compute."""
    first, second = unit(10, 100)[0], unit(10, 100)[0]
    assert not PreemptionPolicy("auto", 0.25, 2.0).prefers_swap([first], 16)  # 25 s to compute
    assert not PreemptionPolicy("auto", 0.25, 2.0).prefers_swap([first, second], 16)
    assert PreemptionPolicy("auto", 0.26, 2.0).prefers_swap([first, second], 16)


def test_costs_are_measured_only_where_they_decide() -> None:
    slow = ScriptConfig(token_delay_s=0.001)
    slept: list[float] = []
    runner = ScriptedRunner(slow, num_blocks=16, block_size=16, sleep=slept.append)
    assert measure_preemption(runner, "swap") == PreemptionPolicy("swap")
    assert not slept
    policy = measure_preemption(runner, "auto")
    assert sum(slept) >= 0.064 and policy.recompute_s_per_token > 0 and policy.swap_s_per_block > 0
