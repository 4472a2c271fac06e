"""Sampling by hand: edges of every parameter, and what is no token.

`test_sampling_truth.py` has the properties, `test_sampling_distribution.py` the frequencies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.forward_batch import Sampled, SampleRequest
from engine.sampler import LEAST_LOGPROB, gumbel_noise, sample_rows
from kvferry.sampling import SamplingParams

VOCAB = 50


def request(position: int = 10, num_output_tokens: int = 0, choice: int = 0, **sampling: Any) -> SampleRequest:
    return SampleRequest(SamplingParams(max_tokens=100, **sampling), position, num_output_tokens, choice)


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample_one(row: Tensor, one: SampleRequest) -> int:
    (sampled,) = sample_rows(row[None], [one])
    assert sampled.token_id is not None
    return sampled.token_id


def drawn(row: Tensor, count: int = 400, **sampling: Any) -> list[int]:
    return [sample_one(row, request(position=position, **sampling)) for position in range(count)]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    row = torch.zeros(VOCAB)
    row[[7, 3, 40]] = 5.0
    assert sample_one(row, request(temperature=0.0)) == 3
    assert sample_one(row, request(temperature=0.0, min_tokens=1, stop_token_ids=(3,))) == 7


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1e-8},
        {"temperature": 1e-4},
        {"temperature": 1e-8, "top_k": VOCAB + 1000},
        {"top_p": 1e-6},
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
    ],
)
def test_edges_that_are_greedy(sampling: dict[str, Any]) -> None:
    row = random_logits(1)[0]
    assert set(drawn(row, 50, seed=5, **sampling)) == {int(row.argmax())}


def test_top_k_above_the_vocabulary_is_off() -> None:
    row = random_logits(1)[0]
    assert drawn(row, 50, top_k=VOCAB + 1000) == drawn(row, 50)


def test_top_k_keeps_the_k_best_and_the_lowest_of_equal_ids() -> None:
    row = torch.zeros(VOCAB)
    row[9] = 1.0
    assert set(drawn(row, top_k=3)) == {9, 0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = torch.full((VOCAB,), -20.0)
    row[[4, 8, 15]] = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    assert set(drawn(row, top_p=0.49)) == {4}
    assert set(drawn(row, top_p=0.75)) == {4, 8}
    assert set(drawn(row, top_p=0.85)) == {4, 8, 15}


def test_top_p_that_is_reached_exactly_takes_no_more() -> None:
    row = torch.full((VOCAB,), -2000.0)
    row[[4, 8]] = 0.0  # a half each
    assert set(drawn(row, 100, top_p=0.5)) == {4}
    assert set(drawn(row, 100, top_p=0.51)) == {4, 8}


def test_min_p_is_relative_to_the_best() -> None:
    row = torch.full((VOCAB,), -20.0)
    row[[4, 8, 15]] = torch.log(torch.tensor([0.6, 0.32, 0.08]))
    assert set(drawn(row, min_p=0.5)) == {4, 8}
    assert set(drawn(row, min_p=0.6)) == {4}


def test_filters_together() -> None:
    row = random_logits(1)[0]
    best = set(row.topk(5).indices.tolist())
    assert set(drawn(row, top_k=5, top_p=0.999, min_p=0.001, temperature=5.0)) <= best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_ending_tokens_until_then(temperature: float) -> None:
    row = torch.zeros(VOCAB)
    row[[1, 2, 3]] = torch.tensor([30.0, 29.0, 28.0])
    common: dict[str, Any] = {"temperature": temperature, "eos_token_ids": (1, 2), "min_tokens": 4}
    assert sample_one(row, request(num_output_tokens=3, **common)) == 3
    late = sample_one(row, request(num_output_tokens=4, **common))
    assert late == 1 if temperature == 0.0 else late in (1, 2, 3)
    ignoring = request(num_output_tokens=0, **{**common, "temperature": 0.0}, ignore_eos=True)
    assert sample_one(row, ignoring) == 1


def test_a_stop_id_outside_the_vocabulary_hurts_nobody() -> None:
    logits = random_logits(2)
    requests = [request(temperature=0.0, min_tokens=5, stop_token_ids=(VOCAB + 7, -1)), request(temperature=0.0)]
    assert [one.token_id for one in sample_rows(logits, requests)] == logits.argmax(1).tolist()


def test_banning_everything_is_an_error_of_that_row() -> None:
    (sampled,) = sample_rows(random_logits(1), [request(min_tokens=5, stop_token_ids=tuple(range(VOCAB)))])
    assert sampled.token_id is None
    assert sampled.error is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    requests = [request(temperature=temperature, seed=row) for row in range(3)]
    right = sample_rows(logits, requests)
    logits[1, 17] = bad
    ours = sample_rows(logits, requests)
    assert ours[1] == Sampled(None, "non-finite logits at position 10")
    assert [ours[0], ours[2]] == [right[0], right[2]]


def test_noise_differs_by_seed_choice_and_position() -> None:
    noises = [
        gumbel_noise(seed, choice, position, 8)
        for seed in (0, 1, 2**64 - 1)
        for choice in (0, 1)
        for position in (0, 1, 2**40)
    ]
    assert len({noise.tobytes() for noise in noises}) == len(noises)
    assert all(np.isfinite(noise).all() for noise in noises)


def test_noise_never_changes() -> None:
    """Streams are resumed by other processes, perhaps with another NumPy: these values are part of the protocol."""
    expected = RECORDED_NOISE
    np.testing.assert_allclose(gumbel_noise(seed=42, choice=1, position=7, vocab_size=4), expected, rtol=1e-12)
    np.testing.assert_array_equal(gumbel_noise(42, 1, 7, 4), gumbel_noise(42, 1, 7, 1000)[:4])


def test_noise_of_the_largest_words_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """One word in 2**53 rounds to a probability of 1: infinite noise would win on a banned token, too."""

    class Words:
        def __init__(self, **_: object) -> None: ...

        def random_raw(self, count: int) -> Any:
            return np.array([2**64 - 1, 2**63, 0, 2**64 - 1][:count], dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Words)
    noise = gumbel_noise(1, 0, 0, 4)
    assert np.isfinite(noise).all() and noise[0] == noise.max() < 37.0 and noise[2] == noise.min() > -4.0
    row = torch.zeros(4)
    rules: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": (0, 3)}
    assert sample_one(row, request(**rules)) == 1
    assert sample_one(row, request(top_k=3, **rules)) == 1


RECORDED_NOISE = [-1.962120850473538, 3.588324905821086, 0.41364307204678574, 0.13635346416936855]


def test_choices_of_one_prompt_draw_as_if_each_were_alone() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=5, logprobs=True)
    (together,) = sample_rows(logits, [SampleRequest(sampling, 7, 0, choice=2, num_choices=3)])
    alone = [sample_rows(logits, [SampleRequest(sampling, 7, 0, choice=choice)])[0] for choice in (2, 3, 4)]
    assert [together.token_id, *(other.token_id for other in together.others)] == [one.token_id for one in alone]
    assert [together.logprob, *(other.logprob for other in together.others)] == [one.logprob for one in alone]
    for one in alone:
        assert one.token_id is not None
        assert one.logprob is not None and one.logprob.token_id == one.token_id
        assert one.logprob.logprob == pytest.approx(logits[0].log_softmax(0)[one.token_id].item())


def test_greedy_choices_are_equal_and_logprobs_come_only_when_asked_for() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    (sampled,) = sample_rows(logits, [SampleRequest(greedy, 0, 0, num_choices=3)])
    assert [sampled.token_id, *(other.token_id for other in sampled.others)] == [1, 1, 1]
    assert sampled.logprob is None and sampled.others[0].logprob is None


def test_candidates_are_the_most_likely_tokens_lower_ids_first_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -1.0, 3.0, 2.0]])
    request = SampleRequest(SamplingParams(max_tokens=1, temperature=0.0), 0, 0, num_candidates=4)
    (found,) = sample_rows(logits, [request])
    assert [one.token_id for one in found.candidates] == [1, 2, 4, 5]
    assert [one.logprob for one in found.candidates] == pytest.approx(logits[0].log_softmax(0)[[1, 2, 4, 5]].tolist())
    assert found.token_id is None and found.error is None


def test_candidates_of_logits_that_are_not_finite_are_an_error() -> None:
    request = SampleRequest(SamplingParams(max_tokens=1), 3, 0, num_candidates=2)
    (found,) = sample_rows(torch.tensor([[float("nan"), 1.0]]), [request])
    assert found.error is not None and not found.candidates


def test_log_probabilities_are_finite_however_far_apart_logits_are() -> None:
    """As JSON and the wire need them (R080)."""
    logits = torch.tensor([[3.4e38, 0.0, -3.4e38]])
    told = request(temperature=0.0, logprobs=True, num_top_logprobs=3)
    (sampled,) = sample_rows(logits, [told])
    assert sampled.logprob is not None
    assert [one.logprob for one in sampled.logprob.alternatives] == [0.0, pytest.approx(-3.4e38), LEAST_LOGPROB]
    (found,) = sample_rows(logits, [SampleRequest(told.sampling, 0, 0, num_candidates=3)])
    assert [one.logprob for one in found.candidates] == [0.0, pytest.approx(-3.4e38), LEAST_LOGPROB]
