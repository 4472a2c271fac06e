"""Sequences that a draining decode worker let go of, and whose blocks their routers may have shipped from there.

    keep ─► kept ─► claim: a Prefill call of the same request and choice ships them
               └──► nobody has come in time: forgotten, the blocks are cached ones like others

Router and worker ask `is_worth_moving` of the same figures, so the worker keeps what the router will come for and waits
for nothing else. One process's memory: who comes to another life of the worker finds nothing.
"""

from __future__ import annotations

import asyncio

from kvferry.errors import FailedPrecondition
from kvferry.tasks import Changes


def is_worth_moving(num_output_tokens: int, max_tokens: int, min_moved_tokens: int) -> bool:
    """Whether shipping a sequence from the decode worker that made `num_output_tokens` pays.

    Computed again by a prefill worker, those are what costs; the blocks to ship are the same. With one token left to
    make there is nothing to ship. `min_moved_tokens`: from how many tokens on; 0: never.
    """
    return 0 < min_moved_tokens <= num_output_tokens < max_tokens - 1


class MovedSequences:
    """The sequences kept now, by request and choice; `changes` is told of every change."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._kept: dict[tuple[str, int], asyncio.TimerHandle] = {}  # at most those that ran; each has an end

    @property
    def num_kept(self) -> int:
        """Sequences that nobody has come for yet."""
        return len(self._kept)

    def keep(self, request_id: str, choice: int, timeout_s: float) -> None:
        """From now on, for `timeout_s`, the sequence may be claimed."""
        key = (request_id, choice)
        self._forget(key)
        self._kept[key] = asyncio.get_running_loop().call_later(timeout_s, self._forget, key)
        self._changes.notify()

    def claim(self, request_id: str, choice: int) -> None:
        """Somebody ships it: nobody else may. Raises FailedPrecondition where it is not kept (any more)."""
        if not self._forget((request_id, choice)):
            raise FailedPrecondition(f"this worker keeps nothing of choice {choice} of request {request_id}")

    def _forget(self, key: tuple[str, int]) -> bool:
        timer = self._kept.pop(key, None)
        if timer is None:
            return False
        timer.cancel()
        self._changes.notify()
        return True
