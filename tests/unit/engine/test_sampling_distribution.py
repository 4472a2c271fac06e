"""How often each token is sampled, by chi-square tests: over positions, seeds and choices, and of pairs of draws.

Seeds are fixed, so a test that passes always passes; a right sampler would fail one such test in ten thousand.
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.forward_batch import SampleRequest
from engine.sampler import sample_rows
from kvferry.sampling import LogitRules, SamplingParams
from tests.support.sampling_truth import distribution, ruled

Counts = npt.NDArray[np.int64]
Tokens = list[int]
FALSE_ALARM = 1e-4
LEAST_EXPECTED = 5.0
"""Of a cell, as the test needs it: rarer tokens are counted together."""
NUM_DRAWS = 2_000
ROW = [0.0, 1.0, 2.0, -1.0, 1.5, 0.3, -0.4, 1.9, -2.0, 0.9]
CONTEXT = [1, 2, 2, 7]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
    {
        "temperature": 0.9,
        "rules": LogitRules(0.6, 0.4, 1.3, ((3, 2.0), (4, -1.0)), allowed_token_ids=(1, 2, 3, 4, 5, 7, 8)),
    },
]


def critical(num_freedom: int) -> float:
    """What chi-square exceeds once in `1 / FALSE_ALARM` times, as Wilson and Hilferty have it."""
    spread = 2.0 / (9.0 * num_freedom)
    return num_freedom * float(1.0 - spread + NormalDist().inv_cdf(1.0 - FALSE_ALARM) * math.sqrt(spread)) ** 3


def check_frequencies(tokens: Tokens, probabilities: list[float]) -> None:
    """The tokens are drawn from this distribution, and none has come that has no part in it."""
    counts, expected = np.bincount(tokens, minlength=len(probabilities)), np.array(probabilities) * len(tokens)
    assert not counts[expected == 0.0].any()
    rare = expected < LEAST_EXPECTED
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0.0], expected[expected > 0.0]
    assert ((counts - expected) ** 2 / expected).sum() < critical(len(counts) - 1)


def check_independent(first: Tokens, second: Tokens) -> None:
    """Tokens drawn side by side know nothing of each other: the contingency table of the common ones."""
    both = np.array([first, second])
    counts = [np.bincount(tokens, minlength=len(ROW)) for tokens in both]
    common = np.flatnonzero(np.minimum(*counts) >= math.sqrt(LEAST_EXPECTED * len(first)))
    assert len(common) >= 3
    both = np.searchsorted(common, both[:, np.isin(both, common).all(axis=0)])
    table = np.zeros((len(common), len(common)))
    np.add.at(table, tuple(both), 1)
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / table.sum()
    assert ((table - expected) ** 2 / expected).sum() < critical((len(common) - 1) ** 2)


def request(sampling: dict[str, Any], seed: int, place: int, num_choices: int = 1) -> SampleRequest:
    """At a later place the prompt has more of a token that it has anyway, so the rules do the same everywhere."""
    token_ids = [CONTEXT[0]] * place + CONTEXT
    params = SamplingParams(max_tokens=9, seed=seed, **sampling)
    return SampleRequest(params, len(token_ids), 3, num_choices=num_choices, token_ids=token_ids)


def drawn(requests: list[SampleRequest]) -> list[Tokens]:
    """The tokens of each choice, in the order of the requests."""
    rows = []
    for sampled in sample_rows(torch.tensor([ROW] * len(requests)), requests):
        assert sampled.token_id is not None
        rows.append([sampled.token_id, *(other.token_id for other in sampled.others)])
    return [list(tokens) for tokens in zip(*rows, strict=True)]


def probabilities(sampling: dict[str, Any]) -> list[float]:
    one = request(sampling, 0, 0)
    return distribution(ruled(ROW, one), one)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_over_positions_of_one_seed(sampling: dict[str, Any]) -> None:
    (tokens,) = drawn([request(sampling, 11, place) for place in range(NUM_DRAWS)])
    check_frequencies(tokens, probabilities(sampling))
    check_independent(tokens[:-1], tokens[1:])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_over_seeds_at_one_position(sampling: dict[str, Any]) -> None:
    (tokens,) = drawn([request(sampling, seed, 5) for seed in range(NUM_DRAWS)])
    check_frequencies(tokens, probabilities(sampling))
    check_independent(tokens[:-1], tokens[1:])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_over_choices_of_one_request(sampling: dict[str, Any]) -> None:
    """With n: each choice has the distribution of a request of its own, and no two know of each other."""
    choices = drawn([request(sampling, 3, place, 4) for place in range(NUM_DRAWS // 2)])
    for tokens in choices:
        check_frequencies(tokens, probabilities(sampling))
    for first, second in itertools.combinations(choices, 2):
        check_independent(first, second)


def test_the_checks_find_what_is_wrong() -> None:
    """Draws that hang together, and a distribution that is a little off."""
    (tokens,) = drawn([request({}, 11, place) for place in range(NUM_DRAWS)])
    with pytest.raises(AssertionError):
        check_independent(tokens, tokens)
    with pytest.raises(AssertionError):
        check_frequencies(tokens, probabilities({"temperature": 1.4}))
