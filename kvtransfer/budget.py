"""Bytes on their way from one process: bounded for each peer and in total, given out frame by frame by priority.

    shipment ─► acquire(bytes of one frame) ─► … sent or taken ─► release ─► the next one that waits

Whoever waits is served by tier, then deadline, then turn. A shipment asks for one frame at a time and goes to the end
of its rank with each, so shipments of one rank interleave frame by frame and a long one does not hold up a short one.
A peer that takes nothing blocks its own shipments only.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from dataclasses import dataclass

from kvferry.errors import Internal


@dataclass(frozen=True, slots=True, order=True)
class ShipRank:
    """Order among shipments; smaller goes first."""

    tier_rank: int = 0
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Someone who waits for `num_bytes` towards one peer."""

    key: tuple[ShipRank, int]  # the number is the turn
    num_bytes: int
    peer: PeerBudget
    granted: asyncio.Future[None]


class ByteBudget:
    """What all peers of a process share: at most `max_bytes` on their way in total."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_turns = 0
        self._waiting: list[_Waiter] = []  # in order of priority; at most one a shipment

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def peer(self, max_bytes: int) -> PeerBudget:
        """The share of one peer: at most `max_bytes` on their way to it."""
        return PeerBudget(self, max_bytes)

    def next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def add(self, waiter: _Waiter) -> None:
        bisect.insort(self._waiting, waiter, key=lambda other: other.key)
        self.serve()

    def remove(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.serve()  # it may have been the one that the total stopped

    def has_room(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.max_bytes

    def serve(self) -> None:
        """Lets in who has room now: in order, past those whose own peer has none, up to where the total is used up."""
        full: set[PeerBudget] = set()
        for waiter in list(self._waiting):
            if waiter.granted.done() or waiter.peer in full:
                continue
            if not waiter.peer.has_room(waiter.num_bytes):
                full.add(waiter.peer)  # smaller frames to the same peer do not pass it
                continue
            if not self.has_room(waiter.num_bytes):
                return
            self._waiting.remove(waiter)
            waiter.peer.take(waiter.num_bytes)
            waiter.granted.set_result(None)


class PeerBudget:
    """One peer's share of a `ByteBudget`. A frame larger than a bound passes alone."""

    def __init__(self, total: ByteBudget, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._total = total

    def has_room(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self.max_bytes

    def take(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._total.num_bytes += num_bytes

    def try_acquire(self, num_bytes: int) -> bool:
        """Takes `num_bytes` if they are there and nobody waits."""
        is_free = not self._total.num_waiting and self.has_room(num_bytes) and self._total.has_room(num_bytes)
        if is_free:
            self.take(num_bytes)
        return is_free

    async def acquire(self, num_bytes: int, rank: ShipRank) -> None:
        """Waits for `num_bytes` in the order of `rank`; whoever gets them calls `release` once."""
        if self.try_acquire(num_bytes):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter((rank, self._total.next_turn()), num_bytes, self, granted)
        self._total.add(waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # let in and cancelled at the same moment
                self.release(num_bytes)
            raise
        finally:
            self._total.remove(waiter)

    def release(self, num_bytes: int) -> None:
        """Gives back what was acquired."""
        if num_bytes > self.num_bytes:
            raise Internal(f"{num_bytes} bytes given back, {self.num_bytes} were on their way")
        self.num_bytes -= num_bytes
        self._total.num_bytes -= num_bytes
        self._total.serve()
