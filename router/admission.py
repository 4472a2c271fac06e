"""How many requests the router takes: bounded, so overload says so early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import ResourceExhausted

RETRY_AFTER_S = 1.0


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
