"""Sampling and logit rules against a plain truth: each option alone, and all of them mixed in one batch.

The suite looks at a sample; `make sweep` at many thousands of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.forward_batch import SampleRequest
from engine.logit_rules import apply_rules, changes_logits
from engine.sampler import gumbel_noise, sample_rows
from kvferry.sampling import LogitRules, SamplingParams
from tests.support.sampling_truth import check_sampled, gumbel, ruled

Values = st.SearchStrategy[Any]
Options = Mapping[str, Values]
PENALTIES = st.floats(-2.0, 2.0, width=32)
TEMPERATURES = st.sampled_from([0.0, 1e-8, 9e-6, 1e-5, 1e-4, 0.1, 0.7, 1.0, 2.5, 1e4, 1e38]) | st.floats(0.05, 3.0)
NUM_CONTEXT = 24
"""Most tokens before the sampled one."""


def ids(vocab_size: int, most: int) -> Values:
    return st.lists(st.integers(0, vocab_size - 1), max_size=most, unique=True).map(tuple)


def options(vocab_size: int) -> Options:
    """What a request may ask for, by name; those of the rules among them."""
    token = st.integers(0, vocab_size - 1)
    return {
        "temperature": TEMPERATURES,
        "top_k": st.sampled_from([1, 2, 3, vocab_size, vocab_size + 9, 1 << 31]) | st.integers(1, vocab_size),
        "top_p": st.sampled_from([1e-6, 0.5, 0.999999]) | st.floats(0.015625, 1.0, width=32),
        "min_p": st.sampled_from([1e-6, 0.5, 1.0]) | st.floats(0.0, 1.0, width=32),
        "seed": st.integers(0, 2**64 - 1),
        "min_tokens": st.integers(-1, 3),  # more than the output has
        "logprobs": st.just(True),
        "num_top_logprobs": st.integers(1, 20),
        "logprob_token_ids": ids(vocab_size, 12),
        "presence_penalty": PENALTIES,
        "frequency_penalty": PENALTIES,
        "repetition_penalty": st.sampled_from([1e-45, 1e38]) | st.floats(0.125, 3.0, width=32),
        "bias": st.dictionaries(token, st.floats(-100, 100, width=32), max_size=8).map(lambda b: tuple(b.items())),
        "allowed_token_ids": ids(vocab_size, 10),
        "bad_words": st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    }


RULES = tuple(field.name for field in dataclasses.fields(LogitRules))
NAMES = tuple(options(8))


@st.composite
def requests(draw: st.DrawFn, vocab_size: int, names: tuple[str, ...] | None = None) -> SampleRequest:
    """A request with these options, or with some."""
    offered = options(vocab_size)
    if names is None:
        names = tuple(draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=8)))
    chosen = {name: draw(offered[name]) for name in names}
    if "num_top_logprobs" in chosen or "logprob_token_ids" in chosen:
        chosen["logprobs"] = True
    if "num_top_logprobs" in chosen:
        chosen.pop("logprob_token_ids", None)
    token_ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=NUM_CONTEXT))
    num_output = draw(st.integers(0, len(token_ids) - 1))
    if "min_tokens" in chosen:
        chosen["min_tokens"] = max(0, num_output + chosen["min_tokens"])
    rules = LogitRules(**{name: chosen.pop(name) for name in RULES if name in chosen})
    if rules.bad_words and num_output:  # one that is about to be complete
        last = token_ids[-1]
        rules = dataclasses.replace(rules, bad_words=(*rules.bad_words, (last, draw(st.integers(0, vocab_size - 1)))))
    sampling = SamplingParams(
        max_tokens=100,
        rules=rules,
        eos_token_ids=draw(ids(vocab_size, 2)),
        stop_token_ids=draw(ids(vocab_size, 2)),
        ignore_eos=draw(st.booleans()),
        **chosen,
    )
    num_choices = draw(st.sampled_from([1, 1, 1, 2, 4]))
    return SampleRequest(
        sampling, len(token_ids), num_output, draw(st.integers(0, 63)), num_choices, token_ids=token_ids
    )


@st.composite
def rows(draw: st.DrawFn, vocab_size: int) -> np.ndarray[Any, Any]:
    """Logits of one row: plain ones, flat or steep, with many ties, all equal, at the ends, or not finite."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = draw(st.sampled_from(["plain", "plain", "steep", "flat", "ties", "equal", "extreme", "bad"]))
    row = rng.normal(size=vocab_size) * {"steep": 40.0, "flat": 1e-3}.get(kind, 3.0)
    match kind:
        case "ties":
            row = rng.integers(-1, 2, vocab_size).astype(np.float64)
        case "equal":
            row = np.full(vocab_size, row[0])
        case "extreme":
            row[rng.integers(0, vocab_size, 3)] = 1e4
            row[rng.integers(0, vocab_size, 3)] = -1e4
        case "bad":
            row[rng.integers(0, vocab_size)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return row


@st.composite
def batches(draw: st.DrawFn, names: tuple[str, ...] | None = None) -> tuple[Tensor, list[SampleRequest]]:
    vocab_size = draw(st.integers(8, 300))
    batch = draw(st.lists(requests(vocab_size, names), min_size=1, max_size=16 if names is None else 3))
    logits = np.stack([draw(rows(vocab_size)) for _ in batch])
    return torch.from_numpy(logits.astype(np.float32)), batch


Batch = tuple[Tensor, list[SampleRequest]]
Property = Callable[[Batch], None]
PHASES = Phase.explicit, Phase.reuse, Phase.generate
"""A case that fails is told as it is: batches are so large that making them smaller outlasts the test."""


def check(case: Batch) -> None:
    """Every row is right and as it is alone (R077, R078), and logits are as they were."""
    logits, batch = case
    before = logits.numpy().tobytes()
    together = sample_rows(logits, batch)
    for number, (request, sampled) in enumerate(zip(batch, together, strict=True)):
        assert sample_rows(logits[number : number + 1], [request]) == [sampled]
        check_sampled(logits[number].tolist(), request, sampled)
    assert sample_rows(logits.flip(0), batch[::-1]) == together[::-1]
    assert logits.numpy().tobytes() == before


def check_rules(case: Batch) -> None:
    """The very values, not only which is largest; nothing where nothing was asked for."""
    for row, request in zip(*case, strict=True):
        values = row.double().numpy()
        if not np.isfinite(values).all():
            continue
        apply_rules(values, request)
        np.testing.assert_allclose(values, ruled(row.tolist(), request), rtol=1e-12, atol=1e-12)
        if not changes_logits(request):
            np.testing.assert_array_equal(values, row.double().numpy())


def holds(property_: Property, max_examples: int, names: tuple[str, ...] | None = None) -> None:
    settings(max_examples=max_examples, phases=PHASES)(given(batches(names))(property_))()


def test_mixed_batches() -> None:
    holds(check, 60)


@pytest.mark.parametrize("name", NAMES)
def test_each_option_alone(name: str) -> None:
    """Extreme temperatures, top_p and top_k among them (R079)."""
    holds(check, 12, (name,))


def test_rules_give_the_very_values() -> None:
    holds(check_rules, 40)


@pytest.mark.sweep
@pytest.mark.timeout(1_800)
def test_many_mixed_batches() -> None:
    holds(check, 2_000)
    holds(check_rules, 2_000)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_each_option_alone_many_times(name: str) -> None:
    holds(check, 500, (name,))


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.sweep), pytest.param(2, marks=pytest.mark.sweep)]
)
def test_a_whole_vocabulary(seed: int) -> None:
    """All options at once on 49,152 ids, with ties where filters have their borders."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.round(rng.normal(size=(4, 49_152)) * 3, 1).astype(np.float32))
    context = rng.integers(0, 49_152, 500).tolist()
    rules = LogitRules(0.5, 0.3, 1.2, tuple((token_id, 2.0) for token_id in context[:50]), bad_words=((context[0],),))
    fields: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "logprobs": True, "num_top_logprobs": 20},
        {"temperature": 1.3, "top_k": 50, "min_p": 0.02, "rules": rules},
        {"temperature": 1.0, "top_k": 4_000, "top_p": 0.7, "rules": rules},
        {"temperature": 2.0, "rules": rules},
    ]
    batch = [
        SampleRequest(
            SamplingParams(max_tokens=999, seed=int(rng.integers(1 << 62)), **one), 500, 200, token_ids=context
        )
        for one in fields
    ]
    check((logits, batch))


def test_the_noise_is_as_it_is_defined() -> None:
    for seed, choice, position in ((0, 0, 0), (2**64 - 1, 63, 2**31), (42, 1, 7)):
        np.testing.assert_allclose(gumbel_noise(seed, choice, position, 301), gumbel(seed, choice, position, 301))
