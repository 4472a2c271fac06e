"""Retries without progress as a share of requests: what is failing must not get its load multiplied.

The router counts attempts by it, the client requests that it repeats at another router.
"""

from __future__ import annotations

RETRY_BURST = 10.0
"""Retries allowed beyond the share, so that one who asked or served little can still survive the death of a peer."""


class RetryBudget:
    """Grows with every request by `share` of a retry.

    What is not used is saved, up to `max_saved`: a router saves as many as may be in flight, since one worker that dies
    may take all of them with it before their first token.
    """

    def __init__(self, share: float, max_saved: float = RETRY_BURST) -> None:
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
