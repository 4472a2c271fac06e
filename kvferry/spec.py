"""What a worker is told about a sequence, and the identity of an attempt."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt of one request; compared wherever something that belongs to it arrives."""

    request_id: str
    attempt: int

    @property
    def seq_id(self) -> str:
        """Name of the attempt's sequence inside a worker."""
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a worker is told about a sequence; `token_ids` holds the prompt and, on a resume, earlier output."""

    id: AttemptId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    tier_rank: int = 0
    deadline_unix_ms: int = 0
    cache_salt: str = ""
    adapter: str = ""
    bypass_prefix_cache: bool = False
