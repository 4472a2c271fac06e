"""Runs tokenising off the event loop: 2 MB of text take seconds, and the loop serves everybody.

The threads belong to the object. Jobs that wait are bounded: each holds a whole prompt text (megabytes), and a client
that waits behind many long ones is better told at once to come back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvferry.errors import ResourceExhausted

T = TypeVar("T")

RETRY_AFTER_S = 1.0


class EncodeQueue:
    """A few threads and a bounded number of jobs."""

    def __init__(self, *, num_threads: int, max_jobs: int) -> None:
        """`max_jobs`: running and waiting ones together."""
        assert 1 <= num_threads <= max_jobs
        self._max_jobs = max_jobs
        self._free = threading.Semaphore(max_jobs)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")

    async def run(self, job: Callable[[], T]) -> T:
        """Result of `job`, run in a thread; a caller that is cancelled takes its waiting job along.

        Raises ResourceExhausted when `max_jobs` are there already.
        """
        if not self._free.acquire(blocking=False):
            raise ResourceExhausted(
                f"{self._max_jobs} prompts are being tokenised or wait for it", retry_after_s=RETRY_AFTER_S
            )
        try:
            future = self._threads.submit(job)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops waiting jobs; a running one ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
