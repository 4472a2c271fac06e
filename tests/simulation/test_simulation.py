"""A sample of seeds; `python -m tests.simulation --seeds 10000` runs many more."""

from __future__ import annotations

from tests.simulation.cluster import run_seed
from tests.simulation.sweep import SweepResult, run_seeds

NUM_SEEDS = 200


def test_no_seed_of_the_sample_breaks_an_invariant() -> None:
    result = run_seeds(0, NUM_SEEDS)
    assert not result.failures, _describe(result)
    assert result.num_seeds == NUM_SEEDS


def test_the_sample_reaches_the_corners_it_is_for() -> None:
    counts = run_seeds(0, NUM_SEEDS // 2).counts
    corners = (
        "commits",
        "withdrawals",
        "nacks",
        "crashes",
        "freezes",
        "streams broken",
        "preemptions",
        "swaps",
        "splits",
        "beam searches completed",
        "blocks copied on write",
        "cached tokens",
        "parked prompts",
        "recalls",
        "ended while parked",
        "waits for workers",
        "drains",
        "kept to be moved",
        "moves with blocks",
        "told early",
        "router crashes",
        "routers lost",
        "ended: length",
        "ended: end_of_sequence",
        "ended: stop_token",
        "ended: stop_string",
        "ended: cancelled",
        "ended: deadline",
        "ended: Cancelled",
    )
    assert not [name for name in corners if not counts[name]]
    assert counts["attempts"] > counts["requests"]


def test_a_seed_is_the_whole_story_of_a_run() -> None:
    for seed in range(10):
        assert run_seed(seed) == run_seed(seed)


def _describe(result: SweepResult) -> str:
    run = result.failures[0]
    replay = f"python -m tests.simulation --start {run.seed} --seeds 1"
    return "\n".join([*run.trace, f"seed {run.seed}: {run.violation}", f"replay: {replay}"])
