"""A cluster that refuses everything is not asked more often because of it: retries are a small share of the load."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvferry.config import RouterConfig
from kvferry.errors import Internal, KvferryError, ResourceExhausted, Unavailable
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.conftest import Router, StartRouter, ask

NUM_REQUESTS = 150
AT_ONCE = 16
SHARE = RouterConfig().retry_budget

REFUSALS = {
    "unavailable": Unavailable("it does not want to"),
    "internal": Internal("it cannot"),
    "full": ResourceExhausted("it has no room", retry_after_s=1.0),
}


async def num_attempts(router: Router, network: FakeNetwork, num_requests: int) -> int:
    """How many calls reach the workers of a role for so many requests, `AT_ONCE` of them at a time."""
    num_before, places, ends = len(network.calls), asyncio.Semaphore(AT_ONCE), list[type[KvferryError]]()

    async def one() -> None:
        async with places:
            try:
                await router.generate(ask())
            except KvferryError as error:
                ends.append(type(error))

    await asyncio.gather(*(one() for _ in range(num_requests)))
    assert len(ends) == num_requests, "a refused request was answered"
    return len(network.calls) - num_before


@pytest.mark.parametrize("how", REFUSALS)
async def test_retries_stay_a_tenth_of_the_load_when_every_worker_refuses(start_router: StartRouter, how: str) -> None:
    """The burst that the first requests may use is part of it; decode is called first, so decode refuses."""
    async with FakeNetwork([11, 12, 13], num_prefill=2, num_decode=2) as network, start_router(network) as router:
        network.fail(Point.DECODE_START, REFUSALS[how], times=10 * NUM_REQUESTS)
        num_first = await num_attempts(router, network, NUM_REQUESTS)
        assert NUM_REQUESTS <= num_first <= math.ceil((1 + SHARE) * NUM_REQUESTS)
        num_later = await num_attempts(router, network, NUM_REQUESTS)
        assert NUM_REQUESTS <= num_later <= math.ceil((1 + SHARE) * NUM_REQUESTS)
        await network.all_ended()
