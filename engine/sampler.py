"""From logits to tokens: one row a sequence, and no row can feel its neighbours.

Greedy rows take the largest logit, the lowest id where several are equal. Other rows add Gumbel noise to their logits
and take the largest sum. The noise comes from a counter-based generator keyed by (seed, choice, position), so a resumed
request draws the same noise anywhere. Order, as in vLLM: the request's rules (`logit_rules.py`), temperature, min_p,
top_k, top_p. Log-probabilities are the model's own, before all of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.constraint import OutputRefused
from engine.forward_batch import Candidate, Sampled, SampledToken, SampleRequest, ScoreRequest
from engine.logit_rules import BANNED, Floats, apply_rules, changes_logits
from kvferry.sampling import TokenLogprob


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
    finite = torch.isfinite(logits).all(dim=1).tolist()
    largest = logits.argmax(dim=1).tolist()  # the first of equal ones, so the lowest id
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


def _sample_choices(row: Tensor, request: SampleRequest) -> Sampled:
    """One token a choice. `row`: `[vocab_size]` float32."""
    values = row.double().numpy()
    if changes_logits(request):
        try:
            apply_rules(values, request)
        except OutputRefused as error:
            return Sampled(None, f"{error}, at position {request.position}", is_final=True)
        if not np.isfinite(values.max()):
            return Sampled(None, f"every token is banned at position {request.position}", is_final=True)
    choices = range(request.choice, request.choice + request.num_choices)
    return _with_logprobs([_sample_row(values.copy(), request, choice) for choice in choices], row, request)


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
    if not torch.isfinite(logits).all():
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

    def of(token_id: int, alternatives: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        rank = int((logprobs >= logprobs[token_id]).sum())
        return TokenLogprob(token_id, float(logprobs[token_id]), rank, alternatives)

    if num_top:
        others = [one.token_id for one in _most_likely(logprobs, num_top)]
    alternatives = tuple(of(token_id) for token_id in others)
    return (of(token_id, alternatives) for token_id in token_ids)


def _most_likely(logprobs: Tensor, num_candidates: int) -> tuple[Candidate, ...]:
    """The most likely tokens of `[vocab_size]`, best first; of equal ones the lowest ids first."""
    num_candidates = min(num_candidates, len(logprobs))
    smallest_kept = logprobs.topk(num_candidates).values[-1]
    kept = (logprobs >= smallest_kept).nonzero()[:, 0]  # in order of ids; more than asked for where some are equal
    order = logprobs[kept].argsort(descending=True, stable=True)[:num_candidates]
    return tuple(map(Candidate, kept[order].tolist(), logprobs[kept[order]].tolist()))


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Floats:
    """The noise of one token: standard Gumbel values, `[vocab_size]`.

    Made from the generator's raw output, which NumPy keeps stable between versions.
    """
    generator = np.random.Philox(
        key=np.array([seed, choice], dtype=np.uint64),
        counter=np.array([0, 0, position, 0], dtype=np.uint64),  # the first word counts within the token
    )
    uniform = ((generator.random_raw(vocab_size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _sample_row(row: Floats, request: SampleRequest, choice: int) -> int:
    """`row` is a copy of our own, `[vocab_size]`, rules applied."""
    sampling = request.sampling
    if sampling.is_greedy:
        return int(row.argmax())
    row = (row - row.max()) / sampling.temperature  # the largest is 0
    if sampling.min_p > 0.0:
        row[row < math.log(sampling.min_p)] = BANNED
    if 0 < sampling.top_k < len(row):
        _keep_top_k(row, sampling.top_k)
    if sampling.top_p < 1.0:
        _keep_top_p(row, sampling.top_p)
    return int((row + gumbel_noise(sampling.seed, choice, request.position, len(row))).argmax())


def _keep_top_k(row: Floats, top_k: int) -> None:
    """Keep `top_k` values; of equal ones at the border those with the lowest ids."""
    smallest_kept = np.partition(row, len(row) - top_k)[len(row) - top_k]
    border = np.flatnonzero(row == smallest_kept)
    num_above = int((row > smallest_kept).sum())
    row[row < smallest_kept] = BANNED
    row[border[top_k - num_above :]] = BANNED


def _keep_top_p(row: Floats, top_p: float) -> None:
    """Keep the smallest set of most likely tokens whose probability reaches `top_p`, one at least."""
    probabilities = np.exp(row)
    probabilities /= probabilities.sum()
    # Tokens this unlikely have less than 1 - top_p together, so they are out; sorting the few others is much quicker.
    candidates = np.flatnonzero(probabilities >= max(0.0, 1.0 - top_p) / len(row))
    ordered = candidates[np.argsort(-row[candidates], kind="stable")]
    before = np.concatenate(([0.0], np.cumsum(probabilities[ordered])[:-1]))
    kept = ordered[before < top_p]
    kept = kept if len(kept) else ordered[:1]
    values = row[kept]
    row[:] = BANNED
    row[kept] = values
