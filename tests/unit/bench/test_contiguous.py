"""Buddy allocation and the contiguous systems, on cases computed by hand."""

from __future__ import annotations

import random

import pytest

from bench.paging.contiguous import BuddyPool, ContiguousSystem, Region, Reservation, run_static_batches
from bench.paging.step_model import StepModel
from bench.paging.workload import Arrival, all_at_once
from kvferry.lengths import RequestLength

SECOND_A_STEP = StepModel("one second", 1.0, 0.0, 0.0, "by hand")


def test_buddies_split_and_merge() -> None:
    pool = BuddyPool(16)
    first, second, third = pool.allocate(3), pool.allocate(4), pool.allocate(8)
    assert (first, second, third) == (Region(0, 4), Region(4, 4), Region(8, 8))
    assert pool.allocate(1) is None
    assert first is not None and second is not None
    pool.free(second)
    assert pool.allocate(5) is None  # eight in a row are not free
    pool.free(first)
    assert pool.allocate(5) == Region(0, 8)


def test_any_number_of_slots_is_cut_into_powers_of_two() -> None:
    pool = BuddyPool(12)  # 8 from 0 on, 4 from 8 on
    assert pool.allocate(16) is None
    assert pool.allocate(3) == Region(8, 4)  # the smallest region that is large enough
    assert pool.allocate(8) == Region(0, 8)
    assert pool.allocate(1) is None


def test_random_regions_never_overlap_and_all_comes_back() -> None:
    generator = random.Random(1)
    pool, held = BuddyPool(1000), list[Region]()
    for _ in range(2000):
        region = pool.allocate(generator.randint(1, 200)) if generator.random() < 0.6 else None
        if region is not None:
            held.append(region)
            slots = [slot for one in held for slot in range(one.offset, one.offset + one.size)]
            assert len(slots) == len(set(slots)) and max(slots) < 1000
        elif held:
            pool.free(held.pop(generator.randrange(len(held))))
    for region in held:
        pool.free(region)
    assert [pool.allocate(size) for size in (512, 256, 128, 64, 32, 8)] == [
        Region(0, 512),
        Region(512, 256),
        Region(768, 128),
        Region(896, 64),
        Region(960, 32),
        Region(992, 8),
    ]


@pytest.mark.parametrize(
    ("reservation", "expected"), [(Reservation.ORACLE, 35), (Reservation.POW2, 42), (Reservation.MAX, 2048)]
)
def test_reservations_are_the_papers(reservation: Reservation, expected: int) -> None:
    """Its example: where the output has 25 tokens, 32 positions are reserved."""
    assert reservation.num_slots(RequestLength(10, 25), 2048) == expected


def test_slots_of_one_sequence_by_hand() -> None:
    """Prompt 3, output 2, reserved for 8 of 16 slots: two steps hold 3 and 4 tokens. A second waits, none fits."""
    lengths = [RequestLength(3, 2)] * 3
    system = ContiguousSystem(Reservation.MAX, 16, 9, SECOND_A_STEP, max_batched_tokens=64, max_running=8)
    figures = system.run(all_at_once(lengths))
    # Nine slots round up to all sixteen: one sequence at a time, two steps each; the last one has nobody behind it.
    assert figures.num_held == 1.0
    assert figures.used_of_pool == pytest.approx((3 + 4) / 2 / 16)
    assert figures.reserved_of_pool == pytest.approx((2 + 1) / 2 / 16)
    assert figures.internal_of_pool == pytest.approx((9 - 5) / 16)
    assert figures.external_of_pool == pytest.approx(7 / 16)
    assert figures.used_of_allocated == pytest.approx(3.5 / 16)
    assert figures.request_rate_per_s == pytest.approx(0.5)
    # The ends are at 2, 4 and 6 s, two tokens each.
    assert figures.normalised_latency_s == pytest.approx((1 + 2 + 3) / 3)


def test_prompts_share_the_budget_with_decodes() -> None:
    """Budget 4: a prompt of 3 and one token of the next, then decode 1 + 2 more, then 1 + 1."""
    system = ContiguousSystem(Reservation.ORACLE, 64, 64, SECOND_A_STEP, max_batched_tokens=4, max_running=8)
    figures = system.run([Arrival(0, 0.0, RequestLength(3, 2)), Arrival(1, 0.0, RequestLength(4, 1))])
    # First: tokens at 1 and 2 s. Second: 1 + 3 prompt tokens at 1 and 2 s, so its only token comes at 2 s too.
    assert figures.normalised_latency_s == pytest.approx((2 / 2 + 2 / 1) / 2)


def test_static_batch_waits_for_its_longest() -> None:
    lengths = [RequestLength(2, 1), RequestLength(4, 5), RequestLength(1, 1)]
    figures = run_static_batches(all_at_once(lengths), 16, 8, SECOND_A_STEP, max_batched_tokens=64)
    # Two fit. One step for the prompts, four for the rest: both end at 5 s. The third ends at 6 s.
    assert figures.normalised_latency_s == pytest.approx((5 / 1 + 5 / 5 + 6 / 1) / 3)
