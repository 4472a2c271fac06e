"""Beam search twice over a transformers model, to compare with: theirs, and ours driven by plain forwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from engine.beam import BeamSearch
from engine.forward_batch import Candidate
from kvferry.sampling import BeamParams, SamplingParams

NEAR_TIE = 1e-4
"""Decisions closer than this may fall either way, as rounding has it; they are reported, not judged."""


@dataclass(frozen=True, slots=True)
class BeamCase:
    """One search."""

    prompt: tuple[int, ...]
    beam: BeamParams
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Scored:
    """Output tokens, and their score under the length penalty."""

    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class BeamReference:
    """What transformers answers.

    Attributes:
        hypotheses: best first, `num_returned` of them.
        step_logprobs: `[beams, vocab_size]` for each step, in the order of its live beams.
    """

    hypotheses: tuple[Scored, ...]
    step_logprobs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PlainSearch:
    """What `BeamSearch` answers; `margin` is its closest decision, as a difference of log-probabilities or scores."""

    hypotheses: tuple[Scored, ...]
    margin: float


def transformers_beams(model: PreTrainedModel, case: BeamCase) -> BeamReference:
    """`generate` with `num_beams`; greedy where that is 1, as transformers has it.

    The defaults of `model` are emptied, else its end-of-sequence ids would hold where we ask for none.
    """
    beam, sampling = case.beam, case.sampling
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    ending = sorted(sampling.ending_token_ids)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=beam.width,
        num_return_sequences=beam.num_returned,
        length_penalty=beam.length_penalty if beam.width > 1 else None,
        early_stopping=beam.early_stopping if beam.width > 1 else None,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        eos_token_id=ending or None,
        pad_token_id=ending[0] if ending else 0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    ids = torch.tensor([case.prompt])
    answer = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    outputs = [_until_end(row[len(case.prompt) :], sampling) for row in answer.sequences.tolist()]
    logprobs = tuple(answer.scores)
    if beam.width == 1:  # a greedy answer has neither log-probabilities nor scores
        logprobs = tuple(torch.log_softmax(logits, dim=-1) for logits in answer.logits)
        total = sum(float(row[0, token_id]) for row, token_id in zip(logprobs, outputs[0], strict=True))
        scores = [total / len(outputs[0]) ** beam.length_penalty]
    else:
        scores = answer.sequences_scores.tolist()
    return BeamReference(tuple(Scored(*pair) for pair in zip(outputs, scores, strict=True)), logprobs)


def plain_search(model: PreTrainedModel, case: BeamCase) -> PlainSearch:
    """Our search over `model`, each step a forward of whole sequences without a KV cache."""
    search = BeamSearch(case.beam, case.sampling, model.config.vocab_size)
    margins = []
    while not search.is_finished:
        rows = torch.tensor([[*case.prompt, *token_ids] for token_ids in search.live_token_ids])
        with torch.inference_mode():
            logits = model(rows, use_cache=False).logits[:, -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        sums = torch.tensor(search.live_logprobs)[:, None] + logprobs
        margins += _margins(sums, case.beam.width, case.sampling)
        search.advance(most_likely(logprobs, search.num_candidates))
    hypotheses = tuple(Scored(hypothesis.token_ids, hypothesis.score) for hypothesis in search.results())
    margins += [better.score - worse.score for better, worse in itertools.pairwise(hypotheses)]
    return PlainSearch(hypotheses, min(margins))


def most_likely(logprobs: Tensor, num_candidates: int) -> list[list[Candidate]]:
    """The first candidates of each row of `[rows, vocab_size]`, lower ids first among equals."""
    values, token_ids = torch.sort(logprobs, dim=1, descending=True, stable=True)
    pairs = zip(token_ids[:, :num_candidates].tolist(), values[:, :num_candidates].tolist(), strict=True)
    return [[Candidate(*pair) for pair in zip(*row, strict=True)] for row in pairs]


def differences(found: Sequence[Scored], wanted: Sequence[Scored], tolerance: float = 1e-4) -> list[str]:
    """How two answers differ, for people; scores may differ by `tolerance`."""
    if len(found) != len(wanted):
        return [f"{len(found)} hypotheses, wanted {len(wanted)}"]
    return [
        f"hypothesis {rank}: {mine}, wanted {theirs}"
        for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True))
        if mine.token_ids != theirs.token_ids or abs(mine.score - theirs.score) > tolerance * max(1, abs(theirs.score))
    ]


def _until_end(token_ids: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """Without the padding behind the ending token."""
    for index, token_id in enumerate(token_ids):
        if token_id in sampling.ending_token_ids:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)


def _margins(sums: Tensor, width: int, sampling: SamplingParams) -> list[float]:
    """How close it was between the last extension kept and the first one dropped: of all, and of those that go on."""
    going_on = sums.clone()
    going_on[:, sorted(sampling.ending_token_ids)] = -torch.inf
    margins = []
    for values in (sums, going_on):
        best = values.flatten().topk(min(width + 1, values.numel())).values.tolist()
        margins += [best[width - 1] - best[width]] if len(best) > width else []
    return margins
