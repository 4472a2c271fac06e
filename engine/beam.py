"""Beam search as a state machine: most likely tokens of every live beam in, next live beams and best hypotheses out.

The step loop runs the live beams' slices, asks the runner for `num_candidates` tokens of each and hands them to
`advance`; what comes back says which beam every next beam extends, so that the caller forks and frees their blocks.
Hypotheses, their order and the moment of the end are those of transformers' beam search. That holds to the last bit:
sums and scores are float32 here too. Only equal sums are ordered by a rule of our own (the earlier beam, then the more
likely token), as torch.topk promises none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.forward_batch import Candidate
from kvferry.sampling import BeamParams, Finish, SamplingParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completed beam.

    Attributes:
        token_ids: output tokens, the ending one included.
        finish: why it ended.
        cumulative_logprob: sum of its tokens' log-probabilities.
        score: that sum divided by the number of output tokens to the power of the length penalty.
    """

    token_ids: tuple[int, ...]
    finish: Finish
    cumulative_logprob: float
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """One of the next live beams: the present beam number `parent`, extended with `token_id`."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: np.float32  # sum over token_ids


@dataclass(frozen=True, slots=True)
class _Extension:
    parent: int
    token_id: int
    logprob: np.float32  # sum over the parent's tokens and this one
    finish: Finish | None


class BeamSearch:
    """The beams of one prompt.

    With a vocabulary smaller than `width` (ending tokens not counted) there are fewer live beams than `width` at
    first, and possibly fewer hypotheses at the end.

    Args:
        beam: how to search.
        sampling: stop rules; the rest of it has no meaning here.
        vocab_size: tokens a row has.
    """

    def __init__(self, beam: BeamParams, sampling: SamplingParams, vocab_size: int) -> None:
        assert 1 <= beam.num_returned <= beam.width
        self._params = beam
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._live: tuple[_Beam, ...] = (_Beam((), np.float32(0.0)),)
        self._hypotheses: tuple[Hypothesis, ...] = ()  # the best so far, best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """How many most likely tokens `advance` needs of every live beam.

        So many that `width` are left to go on with when every ending token is among the best of every beam.
        """
        num_kinds = 1 + len(self._sampling.ending_token_ids)
        return min(max(2, num_kinds) * self._params.width, self._vocab_size)

    @property
    def num_returned(self) -> int:
        """Hypotheses asked for; `results` has fewer where the vocabulary leaves no more."""
        return self._params.num_returned

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of each live beam; they all have the same number."""
        return len(self._live[0].token_ids) if self._live else 0

    @property
    def live_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Output tokens of the live beams, in order; before the first `advance` one beam without any."""
        return tuple(beam.token_ids for beam in self._live)

    @property
    def live_logprobs(self) -> tuple[float, ...]:
        """Sums of the log-probabilities of their tokens, in order."""
        return tuple(float(beam.logprob) for beam in self._live)

    @property
    def is_finished(self) -> bool:
        return not self._live

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> tuple[BeamStep, ...]:
        """Extend every live beam by a token.

        Args:
            candidates: for each live beam its most likely tokens, best first. At the first call there is one beam.

        Returns:
            The next live beams, most likely first; empty when the search is over.
        """
        assert self._live and len(candidates) == len(self._live)
        extensions = sorted(self._extensions(candidates), key=lambda extension: -extension.logprob)
        self._collect(extensions[: self._params.width])
        going_on = [extension for extension in extensions if extension.finish is None][: self._params.width]
        self._live = tuple(_Beam(self._token_ids(extension), extension.logprob) for extension in going_on)
        if not self._may_improve():
            self._live = ()
            return ()
        return tuple(BeamStep(extension.parent, extension.token_id) for extension in going_on)

    def results(self) -> tuple[Hypothesis, ...]:
        """The best hypotheses, best first; `num_returned` of them. Only after the end."""
        assert self.is_finished
        return self._hypotheses[: self._params.num_returned]

    def _extensions(self, candidates: Sequence[Sequence[Candidate]]) -> Iterator[_Extension]:
        """By beam, then by likelihood; without tokens that are banned or impossible."""
        num_output_tokens = self.num_output_tokens + 1
        is_short = num_output_tokens <= self._sampling.min_tokens
        banned = self._sampling.ending_token_ids if is_short else frozenset[int]()
        for parent, (beam, row) in enumerate(zip(self._live, candidates, strict=True)):
            for candidate in row:
                logprob = beam.logprob + np.float32(candidate.logprob)
                if candidate.token_id not in banned and np.isfinite(logprob):
                    finish = self._sampling.finish_after(candidate.token_id, num_output_tokens)
                    yield _Extension(parent, candidate.token_id, logprob, finish)

    def _collect(self, best: Sequence[_Extension]) -> None:
        """Keep those of `best` that ended and are among the `width` best of all hypotheses; the earlier of equals."""
        new = [self._hypothesis(extension, extension.finish) for extension in best if extension.finish is not None]
        merged = sorted([*self._hypotheses, *new], key=lambda hypothesis: -hypothesis.score)
        self._hypotheses = tuple(merged[: self._params.width])

    def _hypothesis(self, extension: _Extension, finish: Finish) -> Hypothesis:
        token_ids = self._token_ids(extension)
        score = self._score(extension.logprob, len(token_ids))
        return Hypothesis(token_ids, finish, float(extension.logprob), float(score))

    def _may_improve(self) -> bool:
        """Whether the live beams may still yield a better hypothesis than the worst one kept.

        The most likely beam is taken at its present score, as though it ended here. Under a positive length penalty it
        might yet do better; transformers ignores that, and so it is here.
        """
        if not self._live or len(self._hypotheses) < self._params.width:
            return bool(self._live)
        if self._params.early_stopping:
            return False
        return bool(self._score(self._live[0].logprob, self.num_output_tokens) > self._hypotheses[-1].score)

    def _score(self, logprob: np.float32, num_output_tokens: int) -> np.float32:
        """Beyond the range of float32 it is 0 or minus infinity, for no caller's exponent may stop the step loop."""
        with np.errstate(all="ignore"):
            return np.float32(logprob / np.float32(_power(num_output_tokens, self._params.length_penalty)))

    def _token_ids(self, extension: _Extension) -> tuple[int, ...]:
        return (*self._live[extension.parent].token_ids, extension.token_id)


def _power(base: int, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
