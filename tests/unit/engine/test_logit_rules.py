"""Penalties, bias and bans by hand; `test_sampling_truth.py` has the properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.forward_batch import SampleRequest
from engine.sampler import sample_rows
from kvferry.sampling import LogitRules, SamplingParams


def sample(row: list[float], token_ids: list[int], num_output: int, **fields: Any) -> tuple[int | None, str | None]:
    sampling = SamplingParams(max_tokens=50, temperature=0.0, rules=LogitRules(**fields))
    request = SampleRequest(sampling, len(token_ids), num_output, token_ids=token_ids)
    (sampled,) = sample_rows(torch.tensor([row]), [request])
    return sampled.token_id, sampled.error


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 3),
        ({"presence_penalty": 1.5}, 2),  # 3 is in the output: 4 - 1.5
        ({"frequency_penalty": 0.75}, 2),  # twice: 4 - 1.5
        ({"frequency_penalty": 0.4}, 3),
        ({"repetition_penalty": 1.5}, 2),
        ({"repetition_penalty": 0.5}, 3),
        ({"presence_penalty": -2.0}, 3),
        ({"bias": ((0, 5.0),)}, 0),
        ({"bias": ((3, -5.0),)}, 2),
        ({"allowed_token_ids": (0, 1)}, 1),
        ({"bad_words": ((3,),)}, 2),
        ({"bad_words": ((3, 3),)}, 2),  # the output ends with 3
        ({"bad_words": ((2, 3),)}, 3),  # it does not end with 2
        ({"bad_words": ((1, 3, 3, 3),)}, 3),  # 1 is of the prompt
    ],
)
def test_each_rule_by_hand(fields: dict[str, Any], expected: int) -> None:
    assert sample([1.0, 2.0, 3.0, 4.0], [1, 3, 3], 2, **fields) == (expected, None)


def test_a_row_without_any_token_left_fails_alone() -> None:
    token_id, error = sample([1.0, 2.0], [0], 0, allowed_token_ids=(0,), bad_words=((0,),))
    assert token_id is None and error == "every token is banned at position 1"
