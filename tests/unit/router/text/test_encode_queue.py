"""Tokenising has a bounded queue, and a cancelled caller leaves it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.errors import ResourceExhausted
from router.text.encode_queue import EncodeQueue


async def test_results_and_errors_come_back() -> None:
    queue = EncodeQueue(num_threads=1, max_jobs=1)
    for _ in range(3):  # each gives its place back
        assert await queue.run(lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            await queue.run(lambda: 1 // 0)
    queue.close()


async def test_one_job_too_many_is_refused_at_once() -> None:
    queue = EncodeQueue(num_threads=1, max_jobs=2)
    go = threading.Event()
    jobs = [asyncio.create_task(queue.run(lambda: go.wait(30))) for _ in range(2)]
    await asyncio.sleep(0)  # both have been submitted
    with pytest.raises(ResourceExhausted) as refused:
        await queue.run(lambda: True)
    assert refused.value.retry_after_s is not None
    go.set()
    assert await asyncio.gather(*jobs) == [True, True]
    queue.close()


async def test_a_cancelled_caller_takes_its_waiting_job_along() -> None:
    queue = EncodeQueue(num_threads=1, max_jobs=2)
    go = threading.Event()
    ran: list[str] = []
    running = asyncio.create_task(queue.run(lambda: go.wait(30)))
    waiting = asyncio.create_task(queue.run(lambda: ran.append("cancelled job")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    after = asyncio.create_task(queue.run(lambda: ran.append("next job")))  # the place is free again
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(running, after)
    assert ran == ["next job"]
    queue.close()
