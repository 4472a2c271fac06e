"""Keeps requests away from a worker that fails one after the other though its Watch stream lives.

    CLOSED ── faults in a row ─► OPEN ── pause over ─► one request tries ──┬─ it went well ─► CLOSED
                                  ▲                                        │
                                  └──────────── twice the pause ◄── fault ─┘

Faults are what a worker is to blame for; a refusal (draining, no room, a bad request) is an answer, and says that the
worker is well. So is a prefill worker whose shipment failed: that counts against the decode worker it went to. A call
that the caller ended says nothing. A worker whose breaker is open serves where no other can.
"""

from __future__ import annotations

import enum

from kvferry.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Internal,
    KvferryError,
    TargetUnavailable,
    Unavailable,
    WorkerDraining,
)

FAULTS_TO_OPEN = 3
"""In a row; a link that breaks under several calls at once opens it too, for one pause."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Verdict(enum.Enum):
    """What the end of a call says of the worker it went to."""

    FAULT = enum.auto()
    ANSWER = enum.auto()
    NOTHING = enum.auto()


def verdict_on(error: KvferryError) -> Verdict:
    """What a call that failed with `error` says."""
    if isinstance(error, WorkerDraining | TargetUnavailable):
        return Verdict.ANSWER
    if isinstance(error, Unavailable | Internal | DataLoss):
        return Verdict.FAULT
    return Verdict.NOTHING if isinstance(error, Cancelled | DeadlineExceeded) else Verdict.ANSWER


class Breaker:
    """One worker's; times are those of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._num_faults = 0  # in a row
        self._pause_s = FIRST_PAUSE_S
        self._open_until_s: float | None = None
        self._is_tried = False  # by a request after the pause, of which nothing is known yet

    def is_open(self, now_s: float) -> bool:
        """Whether requests should go elsewhere."""
        return self._open_until_s is not None and now_s < self._open_until_s

    def on_chosen(self, now_s: float) -> None:
        """A request goes there; after a pause the first one tries alone, the others wait for what becomes of it."""
        if self._open_until_s is not None and not self.is_open(now_s):
            self._open_until_s = now_s + self._pause_s
            self._is_tried = True

    def on_answer(self) -> None:
        """The worker did what it was asked, or refused it."""
        self._num_faults = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until_s = None
        self._is_tried = False

    def on_fault(self, now_s: float) -> bool:
        """The worker failed; says whether that opened the breaker.

        Calls that were under way when it opened fail with those before them: they say nothing new.
        """
        self._num_faults += 1
        if self._is_tried:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        elif self.is_open(now_s) or self._num_faults < FAULTS_TO_OPEN:
            return False
        self._open_until_s, self._is_tried = now_s + self._pause_s, False
        return True
