"""One shipment's place among the payloads that are on their way to a peer: its turn, and where they lie meanwhile.

    frame ─► enter (waits for its turn and for room) ─► message ─► written ─► on_sent ─┐
                                                          taken (Credit) ─► on_taken ──┴► room for the next

A payload is on its way until gRPC took the message it is in, or the receiver copied it out of the staging segment.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvferry.errors import FailedPrecondition, Unavailable
from kvtransfer.budget import PeerBudget, ShipRank
from kvtransfer.messages import BlockFrame, BlockFrames, Region, SenderMessage, StagedFrames
from kvtransfer.staging import StagingView

MAX_STAGED_BATCH = 24
"""Frames of one message: a message costs as much as copying several blocks."""
MAX_STAGED_BATCH_BYTES = 8 << 20
"""Slots of one message: what is copied in must still be in a processor's cache when it is copied out."""
MAX_INLINE_BYTES = 3 << 19
"""Payload of a message of several frames: at this size it costs little more than its bytes."""
SLOTS_SHARE = 2
"""One shipment may fill one part in so many of the slots: a stream that is stuck leaves room for the others."""


class Lane(Protocol):
    """How a sending end brings its frames on their way. Frames are entered one by one and sent in that order."""

    max_batch_frames: int
    """Most frames of one message."""

    async def enter(self, frame: BlockFrame) -> BlockFrame:
        """Waits until the frame may be sent; returns it as it has to be written. What is entered must be sent first."""
        ...

    def try_enter(self, frame: BlockFrame) -> BlockFrame | None:
        """The same where nothing has to be waited for; None where something has."""
        ...

    def message(self, frames: Sequence[BlockFrame]) -> SenderMessage:
        """The message for entered frames."""
        ...

    def on_sent(self, frames: Sequence[BlockFrame]) -> None:
        """The message was written."""
        ...

    def on_taken(self, num_frames: int) -> None:
        """The receiver's Credit. Raises FailedPrecondition for more than was sent."""
        ...

    def untaken_since_s(self) -> float | None:
        """Since when, on the monotonic clock, the receiver has taken nothing of what lies there for it."""
        ...

    def close(self) -> None:
        """The shipment is over: gives everything back."""
        ...


class InlineLane:
    """Payloads travel in their messages."""

    def __init__(self, budget: PeerBudget, rank: ShipRank, *, max_batch_frames: int = 1) -> None:
        self.max_batch_frames = max_batch_frames
        self._budget = budget
        self._rank = rank
        self._num_bytes = 0

    async def enter(self, frame: BlockFrame) -> BlockFrame:
        await self._budget.acquire(len(frame.payload), self._rank)
        self._num_bytes += len(frame.payload)
        return frame

    def try_enter(self, frame: BlockFrame) -> BlockFrame | None:
        if not self._budget.try_acquire(len(frame.payload)):
            return None
        self._num_bytes += len(frame.payload)
        return frame

    def message(self, frames: Sequence[BlockFrame]) -> SenderMessage:
        return frames[0] if len(frames) == 1 else BlockFrames(tuple(frames))

    def on_sent(self, frames: Sequence[BlockFrame]) -> None:
        self._give_back(sum(len(frame.payload) for frame in frames))

    def on_taken(self, num_frames: int) -> None:
        raise FailedPrecondition(f"the receiver sent credit for {num_frames} staged frames; none are staged")

    def untaken_since_s(self) -> float | None:
        return None  # the write of a message waits instead

    def close(self) -> None:
        self._give_back(self._num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._budget.release(num_bytes)


class StagedLane:
    """Payloads lie in the receiver's staging segment.

    When a shipment ends, its slots are used again at once, though the receiver may still be copying out of them: what
    it copies for a shipment that is over is never committed, and every copy is compared with its digest.
    """

    def __init__(self, budget: PeerBudget, rank: ShipRank, view: StagingView) -> None:
        self._budget = budget
        self._rank = rank
        self._view = view
        self._max_frames = max(1, view.num_slots // SLOTS_SHARE)
        max_frames = min(MAX_STAGED_BATCH, MAX_STAGED_BATCH_BYTES // view.slot_bytes, self._max_frames // 2)
        self.max_batch_frames = max(1, max_frames)  # half: one message is copied out while another is filled
        self._staged: deque[Region] = deque()  # oldest first; at most `_max_frames`
        self._payloads: list[bytes | memoryview] = []  # of those staged last, still to be copied
        self._taken_at_s = 0.0
        self._was_taken = asyncio.Event()

    async def enter(self, frame: BlockFrame) -> BlockFrame:
        while len(self._staged) >= self._max_frames:
            self._was_taken.clear()
            await self._was_taken.wait()
        await self._budget.acquire(self._view.slot_bytes, self._rank)
        return self._stage(frame)

    def try_enter(self, frame: BlockFrame) -> BlockFrame | None:
        if len(self._staged) >= self._max_frames or not self._budget.try_acquire(self._view.slot_bytes):
            return None
        return self._stage(frame)

    def _stage(self, frame: BlockFrame) -> BlockFrame:
        assert not isinstance(frame.payload, Region), "a payload is staged once"
        try:
            region = self._view.reserve(len(frame.payload))
        except Unavailable:
            self._budget.release(self._view.slot_bytes)
            raise
        if not self._staged:
            self._taken_at_s = time.monotonic()
        self._staged.append(region)
        self._payloads.append(frame.payload)
        return BlockFrame(frame.id, frame.block_index, frame.offset, region, frame.digest, frame.num_tokens)

    def message(self, frames: Sequence[BlockFrame]) -> SenderMessage:
        # All at once: each copy empties the processor's cache of the code that would run between two of them.
        payloads, self._payloads = self._payloads, []
        for frame, payload in zip(frames, payloads, strict=True):
            assert isinstance(frame.payload, Region), "it was entered"
            self._view.write(frame.payload, payload)
        return StagedFrames(tuple(frames))

    def on_sent(self, frames: Sequence[BlockFrame]) -> None:
        """Their slots are free when the receiver says so."""

    def on_taken(self, num_frames: int) -> None:
        if num_frames == 0:
            return  # it says nothing, and is no sign of life
        if num_frames > len(self._staged):
            raise FailedPrecondition(
                f"the receiver sent credit for {num_frames} frames, {len(self._staged)} are staged"
            )
        self._give_back(num_frames)
        self._taken_at_s = time.monotonic()
        self._was_taken.set()

    def untaken_since_s(self) -> float | None:
        return self._taken_at_s if self._staged else None

    def close(self) -> None:
        self._give_back(len(self._staged))

    def _give_back(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._view.free(self._staged.popleft())
        self._budget.release(num_frames * self._view.slot_bytes)
