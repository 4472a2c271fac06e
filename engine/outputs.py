"""What a step tells the service around the engine; every value names the attempt (`seq_id`) it belongs to.

Choices that forked from one prompt share the attempt's name and are told apart by `choice`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.beam import Hypothesis
from engine.forward_batch import Candidate
from kvferry.errors import KvferryError
from kvferry.sampling import Finish, TokenLogprob


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """The sequence was admitted for the first time; `num_cached_tokens` of it were in the prefix cache."""

    seq_id: str
    num_cached_tokens: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """A prefill chunk of `num_tokens` tokens is in the blocks, which now hold `num_computed_tokens` of the sequence."""

    seq_id: str
    num_tokens: int
    num_computed_tokens: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from place `token_index` on; over a sequence's life each comes once."""

    seq_id: str
    token_index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """Output token number `token_index` (from 0, those before a resume counted); `finish` when it ends the choice."""

    seq_id: str
    token_index: int
    token_id: int
    finish: Finish | None
    at_ns: int
    choice: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class CandidatesFound:
    """The most likely first tokens of a beam search, best first, on the worker that computed its prompt."""

    seq_id: str
    candidates: tuple[Candidate, ...]
    at_ns: int


@dataclass(frozen=True, slots=True)
class BeamsFinished:
    """The result of a beam search, best first."""

    seq_id: str
    beams: tuple[Hypothesis, ...]
    at_ns: int


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """The sequence gave up its blocks and waits to be recomputed or swapped in."""

    seq_id: str
    at_ns: int
    choice: int = 0
    is_swapped: bool = False


@dataclass(frozen=True, slots=True)
class SequenceRestored:
    """A parked prompt, recalled, is computed again and held; its blocks stay. Its first tokens were told before."""

    seq_id: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The sequence cannot go on; its blocks are freed."""

    seq_id: str
    error: KvferryError


@dataclass(frozen=True, slots=True)
class GrantMade:
    """A decode worker reserved room for a shipment; `wanted` are the indices of the blocks it lacks."""

    seq_id: str
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceCommitted:
    """All KV of a shipped sequence is here; it is in the batch. Comes before any token of it.

    `choices` of it run: those that their first token did not end.
    """

    seq_id: str
    num_cached_tokens: int
    choices: tuple[int, ...] = (0,)


Output = (
    SequenceStarted
    | ChunkComputed
    | PromptScored
    | TokenSampled
    | CandidatesFound
    | BeamsFinished
    | SequencePreempted
    | SequenceRestored
    | SequenceFailed
    | GrantMade
    | SequenceCommitted
)
