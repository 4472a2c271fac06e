"""What a step tells the service around the engine; every value names its sequence."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.sampling import Finish


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
class TokenSampled:
    """Output token number `token_index` (from 0, those before a resume counted); `finish` when it ends the choice."""

    seq_id: str
    token_index: int
    token_id: int
    finish: Finish | None
    at_ns: int


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """The sequence gave up its blocks and waits to be recomputed."""

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
    """All KV of a shipped sequence is here; it is in the batch. Comes before any token of it."""

    seq_id: str
    num_cached_tokens: int


Output = (
    SequenceStarted | ChunkComputed | TokenSampled | SequencePreempted | SequenceFailed | GrantMade | SequenceCommitted
)
