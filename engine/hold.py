"""Whether the blocks of a held prompt stay: its shipment secures them, or the scheduler parks it, whoever comes first.

LOOSE ── secure ─► SECURED: the shipment may read the blocks until the sequence is removed
LOOSE ── park ─► PARKED: they are freed ── restore, when it was recalled and computed again ─► SECURED
"""

from __future__ import annotations

import enum
import threading


class HoldState(enum.Enum):
    """See the module docstring."""

    LOOSE = "loose"
    SECURED = "secured"
    PARKED = "parked"


class Hold:
    """The hold of one sequence; two threads touch it.

    The event loop's thread secures, at any moment, also while a step runs, which it does not wait for. The engine's
    thread parks, and frees the blocks only after that. Each looks at the state and sets it in one critical section, so
    the second of the two finds what the first one did: secured blocks are not freed, and who comes too late to secure
    them knows that they must not be read before they are restored. Nothing leads back to LOOSE, so a sequence is parked
    at most once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few instructions only
        self._state = HoldState.LOOSE

    @property
    def is_parked(self) -> bool:
        """Also while it is computed again. For the engine's thread, which alone begins and ends this state."""
        return self._state is HoldState.PARKED

    def secure(self) -> bool:
        """The blocks stay from now on; False: they were parked and may not be read."""
        with self._lock:
            if self._state is HoldState.PARKED:
                return False
            self._state = HoldState.SECURED
            return True

    def park(self) -> bool:
        """The blocks may be freed; False: they may not, or were."""
        with self._lock:
            if self._state is not HoldState.LOOSE:
                return False
            self._state = HoldState.PARKED
            return True

    def restore(self) -> None:
        """The blocks of a parked sequence are there again, and stay."""
        with self._lock:
            self._state = HoldState.SECURED
