"""From logits to tokens: one row a sequence, and no row can feel its neighbours.

Greedy rows take the largest logit, the lowest id where several are equal. Other rows add Gumbel noise to their logits
and take the largest sum. The noise comes from a counter-based generator keyed by (seed, choice, position), so a resumed
request draws the same noise anywhere. Order, as in vLLM: the request's rules (`logit_rules.py`), temperature, min_p,
top_k, top_p. Log-probabilities are the model's own, before all of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.constraint import OutputRefused
from engine.forward_batch import Candidate, Sampled, SampledToken, SampleRequest, ScoreRequest, SequenceSlice
from engine.logit_rules import BANNED, Floats, apply_rules, changes_logits
from engine.speculation import sample_run
from kvferry.sampling import SamplingParams, TokenLogprob

TokenIds = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
BELOW_ONE = 1.0 - 2.0**-53
"""The largest float64 below 1."""
ROUNDING = 1e-6
"""Far above the rounding of a sum of value and noise."""
LEAST_LOGPROB = float(np.finfo(np.float32).min)
"""In the place of minus infinity, which comes where logits lie further apart than float32 can say: the wire and JSON
have finite numbers alone."""


def sample_rows(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
    """Sample one token a row.

    Args:
        logits: `[len(requests), vocab_size]` float32; not changed.
        requests: how to sample each row.

    Returns:
        One entry a row; a row with a logit that is not finite has an error and no token.
    """
    assert logits.dtype == torch.float32
    assert len(logits) == len(requests)
    rows = logits.numpy()
    finite = np.isfinite(rows).all(axis=1).tolist()
    largest = rows.argmax(axis=1).tolist()  # the first of equal ones, so the lowest id
    sampled = []
    for row, request in enumerate(requests):
        if not finite[row]:
            sampled.append(Sampled(None, f"non-finite logits at position {request.position}"))
        elif request.num_candidates:
            sampled.append(
                Sampled(None, candidates=_most_likely(logits[row].log_softmax(dim=0), request.num_candidates))
            )
        elif request.sampling.is_greedy and request.num_choices == 1 and not changes_logits(request):
            sampled.append(_with_logprobs([largest[row]], logits[row], request))
        else:
            sampled.append(_sample_choices(logits[row], request))
    return sampled


def sample_slices(logits: Tensor, slices: Sequence[SequenceSlice]) -> list[Sampled]:
    """Sample what each slice asks for, behind its last known token and as far as its draft is right.

    Args:
        logits: float32 rows of `vocab_size`; a slice has one, and one more for each token of its draft.
        slices: each has a `sample`.
    """
    requests = [part.sample for part in slices if part.sample is not None]
    if len(logits) == len(requests):
        return sample_rows(logits, requests)
    sampled, first = [], 0
    for part, request in zip(slices, requests, strict=True):
        last = first + 1 + part.num_draft_tokens
        sampled.append(sample_run(partial(_sample_place, logits[first:last]), request, part.draft))
        first = last
    return sampled


def _sample_place(rows: Tensor, place: int, request: SampleRequest) -> Sampled:
    return sample_rows(rows[place : place + 1], [request])[0]


def _sample_choices(row: Tensor, request: SampleRequest) -> Sampled:
    """One token a choice. `row`: `[vocab_size]` float32."""
    values = row.numpy().astype(np.float64)
    if changes_logits(request):
        try:
            apply_rules(values, request)
        except OutputRefused as error:
            return Sampled(None, f"{error}, at position {request.position}", is_final=True)
        if not np.isfinite(values.max()):
            return Sampled(None, f"every token is banned at position {request.position}", is_final=True)
    return _with_logprobs(_sample_row(values, request), row, request)


def _with_logprobs(token_ids: list[int], row: Tensor, request: SampleRequest) -> Sampled:
    """`row`: `[vocab_size]` logits, from which log-probabilities are taken where they are asked for."""
    logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
    if request.sampling.logprobs:
        sampling = request.sampling
        told = _token_logprobs(
            token_ids, row.log_softmax(dim=0), sampling.num_top_logprobs, others=sampling.logprob_token_ids
        )
        logprobs = list(told)
    others = map(SampledToken, token_ids[1:], logprobs[1:])
    return Sampled(token_ids[0], logprob=logprobs[0], others=tuple(others))


def score_rows(logits: Tensor, request: ScoreRequest) -> Sampled:
    """Log-probabilities of known tokens, one a row. `logits`: `[len(request.token_ids), vocab_size]` float32."""
    assert len(logits) == len(request.token_ids)
    if not np.isfinite(logits.numpy()).all():
        return Sampled(None, "non-finite logits in the prompt")
    told = [
        one
        for row, token_id in zip(logits, request.token_ids, strict=True)  # row by row: no second copy of all of them
        for one in _token_logprobs([token_id], row.log_softmax(dim=0), request.num_top_logprobs)
    ]
    return Sampled(None, prompt_logprobs=tuple(told))


def _token_logprobs(
    token_ids: list[int], logprobs: Tensor, num_top: int, *, others: Sequence[int] = ()
) -> Iterator[TokenLogprob]:
    """`logprobs`: `[vocab_size]`. Alternatives (the most likely tokens, or `others`) are the same for all tokens."""
    values = logprobs.numpy()

    def of(token_id: int, alternatives: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        rank = int(np.count_nonzero(values >= values[token_id]))
        return TokenLogprob(token_id, max(LEAST_LOGPROB, float(values[token_id])), rank, alternatives)

    if num_top:
        others = [one.token_id for one in _most_likely(logprobs, num_top)]
    alternatives = tuple(of(token_id) for token_id in others)
    return (of(token_id, alternatives) for token_id in token_ids)


def _most_likely(logprobs: Tensor, num_candidates: int) -> tuple[Candidate, ...]:
    """The most likely tokens of `[vocab_size]`, best first; of equal ones the lowest ids first."""
    values, num_candidates = logprobs.numpy(), min(num_candidates, len(logprobs))
    smallest_kept = logprobs.topk(num_candidates).values[-1].item()
    kept = np.flatnonzero(values >= smallest_kept)  # in order of ids; more than asked for where some are equal
    order = kept[np.argsort(-values[kept], kind="stable")][:num_candidates]
    return tuple(map(Candidate, order.tolist(), np.maximum(values[order], LEAST_LOGPROB).tolist()))


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Floats:
    """The noise of one token: standard Gumbel values, all finite, `[vocab_size]`.

    Made from the generator's raw output, which NumPy keeps stable between versions.
    """
    return _gumbel(_random_words(seed, choice, position, vocab_size))


def _random_words(seed: int, choice: int, position: int, vocab_size: int) -> Words:
    generator = np.random.Philox(
        key=np.array([seed, choice], dtype=np.uint64),
        counter=np.array([0, 0, position, 0], dtype=np.uint64),  # the first word counts within the token
    )
    words: Words = generator.random_raw(vocab_size)
    return words


def _gumbel(words: Words) -> Floats:
    """Grows with the word, of which 53 bits count."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    uniform = np.minimum(uniform, BELOW_ONE)  # the largest sum above is rounded up, and its noise would be infinite
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _sample_row(row: Floats, request: SampleRequest) -> list[int]:
    """A token id for each choice. `row`: `[vocab_size]`, rules applied; not changed."""
    sampling, choices = request.sampling, range(request.choice, request.choice + request.num_choices)
    if sampling.is_greedy:
        return [int(row.argmax())] * len(choices)
    row = (row - row.max()) / sampling.temperature  # the largest is 0
    words = (_random_words(sampling.seed, choice, request.position, len(row)) for choice in choices)
    if sampling.min_p == 0.0 and sampling.top_k == 0 and sampling.top_p >= 1.0:
        return [_largest_with_noise(row, one) for one in words]
    kept = _filtered(row, sampling)
    values = row[kept]
    return [int(kept[_largest_with_noise(values, one[kept])]) for one in words]


def _largest_with_noise(values: Floats, words: Words) -> int:
    """Where the sum of value and noise is largest, the first one of several."""
    best = values.argmax()
    least_sum = values[best] + _gumbel(words[best : best + 1])[0]
    most_noise = _gumbel(words.max(keepdims=True))[0]
    rivals = np.flatnonzero(values >= least_sum - most_noise - ROUNDING)  # no other can win; few logarithms are quick
    return int(rivals[(values[rivals] + _gumbel(words[rivals])).argmax()])


def _filtered(row: Floats, sampling: SamplingParams) -> TokenIds:
    """Ids that min_p, top_k and top_p leave, in order. `row`: `[vocab_size]`, the largest is 0."""
    kept = np.flatnonzero(row >= math.log(sampling.min_p) if sampling.min_p > 0.0 else row > BANNED)
    if 0 < sampling.top_k < len(kept):
        kept = kept[_are_top_k(row[kept], sampling.top_k)]
    if sampling.top_p < 1.0:
        kept = kept[_are_top_p(row[kept], sampling.top_p)]
    return kept


def _are_top_k(values: Floats, top_k: int) -> npt.NDArray[np.bool_]:
    """Which are the `top_k` largest; of equal ones at the border the first ones."""
    smallest_kept = torch.from_numpy(values).topk(top_k, sorted=False).values.min().item()
    are_kept: npt.NDArray[np.bool_] = values > smallest_kept
    border = np.flatnonzero(values == smallest_kept)
    are_kept[border[: top_k - np.count_nonzero(are_kept)]] = True
    return are_kept


def _are_top_p(values: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """Which are the fewest most likely ones whose probability reaches `top_p`, one at least."""
    probabilities = np.exp(values)
    probabilities /= probabilities.sum()
    # Tokens this unlikely have less than 1 - top_p together, so they are out; sorting the few others is much quicker.
    likely = np.flatnonzero(probabilities >= max(0.0, 1.0 - top_p) / len(values))
    ordered = likely[np.argsort(-values[likely], kind="stable")]
    before = np.concatenate(([0.0], np.cumsum(probabilities[ordered])[:-1]))
    nucleus = ordered[before < top_p]
    are_kept = np.zeros(len(values), dtype=np.bool_)
    are_kept[nucleus if len(nucleus) else ordered[:1]] = True
    return are_kept
