"""From the engine's thread to the calls that own sequences: one mailbox a sequence, filled once a step.

A mailbox is not bounded by a number: a sequence has at most max_tokens outputs, and a call that reads slowly must not
stop the engine for the others.
"""

from __future__ import annotations

import asyncio

from engine.outputs import Output


class Mailboxes:
    """Queues by sequence id; `deliver` may be called on any thread, the rest belongs to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[Output]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, seq_id: str) -> asyncio.Queue[Output]:
        """The mailbox of a sequence; outputs of a sequence without one are dropped."""
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._queues[seq_id] = queue
        return queue

    def close(self, seq_id: str) -> None:
        """Forgets the mailbox; does nothing when there is none."""
        self._queues.pop(seq_id, None)

    def deliver(self, outputs: list[Output]) -> None:
        """Hands a step's outputs over; does not block."""
        self._loop.call_soon_threadsafe(self._put, outputs)

    def _put(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._queues.get(output.seq_id)
            if queue is not None:
                queue.put_nowait(output)
