"""What all engines are asked: batches of prompts, the same token ids for everybody, none of them twice."""

from __future__ import annotations

import random
from dataclasses import dataclass

LOWEST_ID, HIGHEST_ID = 100, 40_000


@dataclass(frozen=True, slots=True)
class Case:
    """A batch that is filled, and one that then decodes.

    Attributes:
        num_sequences: at a time.
        num_prompt_tokens: of each.
        refills: whether each round has a new batch, for prefill; otherwise there is one.
        num_steps: decode steps of a round. The last batch goes on from round to round.
        context: tokens about which it decodes.
    """

    num_sequences: int
    num_prompt_tokens: int
    refills: bool
    num_steps: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_prompt_tokens

    def prompts(self, number: int) -> list[list[int]]:
        """Of the batch `number`."""
        rng = random.Random(f"{self.num_sequences}/{self.num_prompt_tokens}/{number}")
        return [
            [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(self.num_prompt_tokens)]
            for _ in range(self.num_sequences)
        ]


SHORT, LONG = 128, 2_000
SHORT_STEPS, LONG_STEPS = 20, 10
"""With five rounds after one that warms up contexts are 149 … 248 and 2,011 … 2,060, in the median round 198, 2,035."""
SPARE_STEPS = 64
"""The first of a batch decode while its last are prefilled."""


def cases(*, quick: bool) -> tuple[Case, ...]:
    """All of a run, cheapest first."""
    short_steps, long_steps = (4, 3) if quick else (SHORT_STEPS, LONG_STEPS)
    short = [Case(n, SHORT, True, short_steps, 192) for n in (1, 8, 32)]
    long = [Case(n, LONG, n == 1, long_steps, LONG) for n in (1, 8, 32)]
    return (*short[:2], *long[:1]) if quick else (*short, *long)
