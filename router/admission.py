"""How many requests the router takes, and how many attempts it repeats: both bounded, so overload says so early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import ResourceExhausted

RETRY_AFTER_S = 1.0
RETRY_BURST = 10.0
"""Retries allowed beyond the share of requests, so that a router that served little can still survive a dead worker."""


class Admission:
    """Requests in flight, at most `max_requests`: each holds a prompt and its output in memory."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_requests = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Holds one place for the length of the block. Raises ResourceExhausted when all are taken."""
        if self.num_requests >= self._max_requests:
            raise ResourceExhausted(
                f"{self.num_requests} requests are in flight, at most {self._max_requests} are allowed",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


class RetryBudget:
    """Retries without progress as a share of requests: a cluster that is failing must not get its load multiplied.

    What is not used is saved, up to `max_saved`: as many requests as may be in flight, since one worker that dies may
    take all of them with it before their first token.
    """

    def __init__(self, share: float, max_saved: int) -> None:
        self._share = share
        self._max_saved = max(RETRY_BURST, max_saved)
        self._tokens = RETRY_BURST
        self._owed = RETRY_BURST  # given at the start; the share of the first requests pays for it

    def add_request(self) -> None:
        """One request more."""
        paid = min(self._share, self._owed)
        self._owed -= paid
        self._tokens = min(self._tokens + self._share - paid, self._max_saved)

    def take(self) -> bool:
        """Whether one more retry is within the budget; takes it if so."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
