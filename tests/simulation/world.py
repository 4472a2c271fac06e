"""Virtual time: a heap of events, one random generator, and the trace of what happened last. No threads, no asyncio.

Everything random comes from the seed and everything happens in the order of (time, order of scheduling), so a seed is
the whole story of a run.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable

MS = 1_000_000
"""Nanoseconds of a millisecond."""

TRACE_LENGTH = 200


class InvariantViolation(AssertionError):
    """Something happened that must never happen."""


class World:
    """Clock, randomness, trace and counters of one run.

    Attributes:
        rng: the only source of randomness.
        now_ns: virtual time.
        counts: how often what happened; shows whether a sweep reached the interesting corners.
        num_events: events run so far.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now_ns = 0
        self.counts: Counter[str] = Counter()
        self.num_events = 0
        self._heap: list[tuple[int, int, Callable[..., object], tuple[object, ...]]] = []
        self._num_scheduled = 0
        self._trace: deque[tuple[int, str, str, tuple[object, ...]]] = deque(maxlen=TRACE_LENGTH)

    def at(self, time_ns: int, call: Callable[..., object], *args: object) -> None:
        """Calls `call(*args)` at `time_ns`; equal times keep the order of scheduling."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (time_ns, self._num_scheduled, call, args))

    def after(self, delay_ns: int, call: Callable[..., object], *args: object) -> None:
        self.at(self.now_ns + delay_ns, call, *args)

    def between(self, low: float, high: float) -> int:
        """A random whole number of nanoseconds."""
        return int(low + (high - low) * self.random())

    def below(self, limit: int) -> int:
        """A random whole number from 0 to `limit` - 1."""
        return int(self.random() * limit)

    def happens(self, probability: float) -> bool:
        return self.random() < probability

    def run(self, max_events: int) -> None:
        """Runs events until none is left; raises InvariantViolation when they do not come to an end."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now_ns, _, call, args = pop(heap)
            self.num_events += 1
            call(*args)
            if self.num_events > max_events:
                raise InvariantViolation(f"no end after {max_events} events: something goes round in circles")

    def note(self, who: str, what: str, *details: object) -> None:
        """Remembers what happened; formatted only when somebody looks."""
        self._trace.append((self.now_ns, who, what, details))

    def trace(self) -> list[str]:
        """The last events as text, oldest first."""
        return [
            f"{time_ns / MS:10.3f} ms  {who:<16} {what} {' '.join(map(str, details))}"
            for time_ns, who, what, details in self._trace
        ]
