"""What the scheduler asks a runner to compute in one step, and what comes back: plain values, no tensors.

The step loop makes one `SequenceSlice` for each scheduled sequence, a runner (`engine/runner.py`) turns the list into
tensors, runs the model over the paged KV cache and answers one `Sampled` for each slice that asked for something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.constraint import Constraint
from kvferry.sampling import SamplingParams, TokenLogprob

OnKvWritten = Callable[[], None]
"""Called once in a step, on its thread, when the KV of all its tokens is in the pool, before anything is sampled."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What to sample after a slice: one token, one a choice, or the most likely ones.

    Attributes:
        sampling: effective parameters of the sequence.
        position: absolute position of the token to be sampled; it keys the noise.
        num_output_tokens: output tokens produced before this one.
        choice: number of the (first) choice within its request; it keys the noise too.
        num_choices: choices that get a token each from these logits, `choice` being the first.
        num_candidates: nothing is sampled; this many most likely tokens are wanted, for beam search.
        token_ids: prompt and output before it, for rules that count them; the sequence's own list, not a copy.
        constraint: the grammar that the output follows; None where it is free.
    """

    sampling: SamplingParams
    position: int
    num_output_tokens: int
    choice: int = 0
    num_choices: int = 1
    num_candidates: int = 0
    token_ids: Sequence[int] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Log-probabilities of known tokens, each given those before it.

    Attributes:
        first_row: token of the slice behind which the first of them stands.
        token_ids: the tokens, one behind each token of the slice from `first_row` on; the last may be beyond the slice.
        num_top_logprobs: those of so many most likely tokens in its place, too.
    """

    first_row: int
    token_ids: Sequence[int]
    num_top_logprobs: int


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of one step: a prefill chunk or a single decode token.

    Attributes:
        seq_id: label for messages.
        token_ids: the tokens to compute, at least one; the draft last.
        start: absolute position of `token_ids[0]`, which is the number of tokens already in the sequence's blocks.
        block_table: block ids that cover `start + len(token_ids)` tokens.
        sample: None for a chunk that does not reach the end of the known tokens.
        score: prompt tokens whose log-probabilities are wanted.
        num_draft_tokens: how many of the tokens are a draft (`engine/speculation.py`), which is verified.
    """

    seq_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleRequest | None
    score: ScoreRequest | None = None
    num_draft_tokens: int = 0

    @property
    def context_length(self) -> int:
        """Tokens in the sequence's blocks once this slice has been computed."""
        return self.start + len(self.token_ids)

    @property
    def draft(self) -> Sequence[int]:
        """Tokens that are not known to be the sequence's yet."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and the natural logarithm of its probability under the model, before temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one choice, with its log-probability where it was asked for."""

    token_id: int
    logprob: TokenLogprob | None = None

    @classmethod
    def told(cls, token_id: int, logprob: float | None) -> SampledToken:
        """A token that another worker sampled."""
        return cls(token_id, None if logprob is None else TokenLogprob(token_id, logprob))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a slice asked for, or why this one sequence could not get it (non-finite logits, no token allowed).

    Attributes:
        token_id: the sampled token; of the first choice where there are several. None on an error, for candidates, and
            where only log-probabilities were asked for.
        error: for people.
        is_final: the error would come again on any worker.
        logprob: of `token_id`, where `sampling.logprobs` asks for it.
        others: tokens of the further choices, in order.
        further: tokens after `token_id`, one for each token of the draft that was what was sampled there.
        candidates: most likely tokens, best first, lower ids first among equals.
        prompt_logprobs: one for each token of `SequenceSlice.score`.
    """

    token_id: int | None
    error: str | None = None
    logprob: TokenLogprob | None = None
    others: tuple[SampledToken, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    is_final: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    further: tuple[SampledToken, ...] = ()

    def joined(self, sampled: Sampled | None) -> Sampled:
        """These log-probabilities beside what was sampled from the same slice; an error of either is both's."""
        if sampled is None or self.error is not None or sampled.error is not None:
            return self if sampled is None or sampled.error is None else sampled
        return replace(sampled, prompt_logprobs=self.prompt_logprobs)
