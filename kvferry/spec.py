"""What a worker is told about a sequence, and the identity of an attempt."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.sampling import BeamParams, SamplingParams


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
class PromptScoring:
    """Which log-probabilities of the prompt's own tokens are wanted.

    Attributes:
        first_index: place of the first token whose is wanted, at least 1: before the prompt's first there is nothing.
        num_top_logprobs: those of so many most likely tokens in its place, too.
    """

    first_index: int = 1
    num_top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a worker is told about a sequence; `token_ids` holds the prompt and, on a resume, earlier output.

    Attributes:
        choice: number of the (first) choice; it keys the noise.
        num_choices: choices sampled from the one prompt, `choice` being the first.
        beam: beam search instead of sampling.
        tenant: whose request it is; part of the block hashes, and what quotas count by.
        shared_salt: takes the tenant's place in the block hashes where it is not empty.
        prompt_scoring: log-probabilities of the prompt's tokens; only for the worker that computes the prompt.
    """

    id: AttemptId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    tier_rank: int = 0
    deadline_unix_ms: int = 0
    cache_salt: str = ""
    adapter: str = ""
    bypass_prefix_cache: bool = False
    choice: int = 0
    num_choices: int = 1
    beam: BeamParams | None = None
    tenant: str = ""
    shared_salt: str = ""
    prompt_scoring: PromptScoring | None = None


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Tokens and all else that the hashes of their blocks depend on."""

    token_ids: tuple[int, ...]
    tenant: str = ""
    adapter: str = ""
    cache_salt: str = ""
    shared_salt: str = ""
