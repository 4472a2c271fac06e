"""What the scheduler asks a runner to compute in one step, and what comes back: plain values, no tensors.

The step loop makes one `SequenceSlice` for each scheduled sequence, a runner (`engine/runner.py`) turns the list into
tensors, runs the model over the paged KV cache and answers one `Sampled` for each slice that asked for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One token to sample after a slice.

    Attributes:
        sampling: effective parameters of the sequence.
        position: absolute position of the token to be sampled; it keys the noise.
        num_output_tokens: output tokens produced before this one.
        choice: number of the choice within its request; it keys the noise too.
    """

    sampling: SamplingParams
    position: int
    num_output_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of one step: a prefill chunk or a single decode token.

    Attributes:
        seq_id: label for messages.
        token_ids: the tokens to compute, at least one.
        start: absolute position of `token_ids[0]`, which is the number of tokens already in the sequence's blocks.
        block_table: block ids that cover `start + len(token_ids)` tokens.
        sample: None for a chunk that does not reach the end of the known tokens.
    """

    seq_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleRequest | None

    @property
    def context_length(self) -> int:
        """Tokens in the sequence's blocks once this slice has been computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token id, or why this one sequence could not get one (non-finite logits)."""

    token_id: int | None
    error: str | None = None
