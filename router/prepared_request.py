"""A request as it runs: checked, tokenised, named."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvferry.sampling import SamplingParams
from router.validation import Request


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to run.

    Attributes:
        id: made by the router, unique for ever.
        deadline_s: when the client's call ends, in `time.monotonic()`; None for never.
    """

    id: str
    request: Request
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float | None

    @property
    def rest_of_deadline_s(self) -> float | None:
        """Time left now; None for no deadline."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())
