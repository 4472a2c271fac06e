"""Penalties, bias and bans against a plain truth, alone and mixed in one batch of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.forward_batch import SampleRequest
from engine.logit_rules import apply_rules, changes_logits
from engine.sampler import sample_rows
from kvferry.sampling import NO_RULES, LogitRules, SamplingParams

VOCAB = 24
TOKENS = st.integers(0, VOCAB - 1)
NUMBERS = st.floats(-2.0, 2.0, width=32)


@st.composite
def requests(draw: st.DrawFn) -> SampleRequest:
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=8))
    output = draw(st.lists(TOKENS, max_size=12))
    word = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)
    tails = [tuple(output[-n:]) for n in (1, 2) if len(output) >= n]
    likely = st.tuples(st.sampled_from(tails), TOKENS).map(lambda pair: (*pair[0], pair[1])) if tails else word
    rules = LogitRules(
        presence_penalty=draw(st.just(0.0) | NUMBERS),
        frequency_penalty=draw(st.just(0.0) | NUMBERS),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.125, 3.0, width=32)),
        bias=tuple(draw(st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4)).items()),
        allowed_token_ids=tuple(draw(st.just([]) | st.lists(TOKENS, min_size=1, max_size=10, unique=True))),
        bad_words=tuple(draw(st.lists(word | likely, max_size=4))),
    )
    sampling = SamplingParams(
        max_tokens=50,
        temperature=0.0,
        min_tokens=draw(st.integers(0, 10)),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=3))),
        rules=draw(st.just(NO_RULES) | st.just(rules)),
    )
    return SampleRequest(sampling, len(prompt) + len(output), len(output), token_ids=[*prompt, *output])


def plainly(row: list[float], request: SampleRequest) -> list[float]:
    """Token by token, as the documentation of each option says it."""
    sampling, rules = request.sampling, request.sampling.rules
    num_prompt = len(request.token_ids) - request.num_output_tokens
    output = list(request.token_ids[num_prompt:])
    result = []
    for token_id, logit in enumerate(row):
        value = float(logit)
        is_banned = bool(rules.allowed_token_ids) and token_id not in rules.allowed_token_ids
        for word in rules.bad_words:
            is_banned = is_banned or [*output, token_id][-len(word) :] == list(word)
        is_banned = is_banned or (len(output) < sampling.min_tokens and token_id in sampling.ending_token_ids)
        value += sum(bias for biased, bias in rules.bias if biased == token_id)
        if token_id in request.token_ids:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        value -= rules.frequency_penalty * output.count(token_id)
        value -= rules.presence_penalty * (token_id in output)
        result.append(-math.inf if is_banned else value)
    return result


@given(st.lists(requests(), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_rules_do_what_each_of_them_says(batch: list[SampleRequest], seed: int) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    before = logits.clone()
    for row, request in zip(logits, batch, strict=True):
        values = row.double().numpy()
        apply_rules(values, request)
        np.testing.assert_allclose(values, plainly(row.tolist(), request), rtol=1e-12, atol=1e-12)
        if not changes_logits(request):
            np.testing.assert_array_equal(values, row.double().numpy())
    for row, request, sampled in zip(logits, batch, sample_rows(logits, batch), strict=True):
        truth = np.array(plainly(row.tolist(), request))
        if np.isinf(truth.max()):
            assert sampled.token_id is None and sampled.error is not None
        else:
            assert sampled.token_id == int(truth.argmax())
    assert torch.equal(logits, before), "the rows of others, and of log-probabilities, are as they were"


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
