"""A shipment's payloads on their way: room, slots, credit, and that everything comes back in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import FailedPrecondition, Unavailable
from kvtransfer.budget import ByteBudget, PeerBudget, ShipRank
from kvtransfer.lane import MAX_STAGED_BATCH, InlineLane, StagedLane
from kvtransfer.messages import BlockFrame, Region, StagedFrames
from kvtransfer.staging import HEADER_BYTES, StagingSegment, StagingView
from tests.unit.kvtransfer.support import contents_of, frames_of

NUM_SLOTS = 8
RANK = ShipRank()
FRAME = frames_of(0)[0]


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@dataclass
class Way:
    """What shipments to one receiver share."""

    segment: StagingSegment
    view: StagingView
    total: ByteBudget
    budget: PeerBudget

    def lane(self) -> StagedLane:
        return StagedLane(self.budget, RANK, self.view)

    def check_all_is_back(self) -> None:
        assert (self.total.num_bytes, self.budget.num_bytes, self.total.num_waiting) == (0, 0, 0)
        assert self.view.num_free_slots == self.view.num_slots


def make_way(num_slots: int = NUM_SLOTS, total_bytes: int = 1 << 20) -> Way:
    segment = StagingSegment(HEADER_BYTES + num_slots * 128)
    view, total = StagingView(segment.name, 128), ByteBudget(total_bytes)
    assert view.num_slots == num_slots
    return Way(segment, view, total, total.peer(num_slots * 128))


@pytest.fixture
def way() -> Iterator[Way]:
    made = make_way()
    yield made
    made.view.close()
    made.segment.close()


def entered(lane: StagedLane, block_index: int = 0) -> BlockFrame:
    frame = lane.try_enter(frames_of(block_index)[0])
    assert frame is not None
    return frame


# -- in messages ------------------------------------------------------------------------------------------------------


async def test_a_payload_in_a_message_is_on_its_way_until_it_is_written() -> None:
    budget = ByteBudget(200).peer(200)
    lane = InlineLane(budget, RANK)
    assert lane.try_enter(FRAME) is FRAME
    assert lane.try_enter(FRAME) is None  # 128 of 200 bytes are taken
    waiting = asyncio.ensure_future(lane.enter(FRAME))
    await turn()
    assert not waiting.done()
    assert lane.message([FRAME]) is FRAME
    lane.on_sent([FRAME])
    assert await waiting is FRAME
    lane.close()
    assert budget.num_bytes == 0


def test_credit_is_for_staged_payloads() -> None:
    lane = InlineLane(ByteBudget(200).peer(200), RANK)
    lane.try_enter(FRAME)
    for num_frames in (0, 1, 2**32 - 1):
        with pytest.raises(FailedPrecondition, match="none are staged"):
            lane.on_taken(num_frames)
    assert lane.untaken_since_s() is None


# -- staged -----------------------------------------------------------------------------------------------------------


def test_payloads_lie_in_the_segment_and_their_message_says_where(way: Way) -> None:
    lane = way.lane()
    frames = [entered(lane, index) for index in range(3)]
    message = lane.message(frames)
    assert isinstance(message, StagedFrames) and message.frames == tuple(frames)
    for index, frame in enumerate(frames):
        assert isinstance(frame.payload, Region)
        assert way.segment.payload(frame.payload) == contents_of(index)
        (original,) = frames_of(index)
        assert (frame.id, frame.block_index, frame.offset) == (original.id, original.block_index, original.offset)
        assert (frame.digest, frame.num_tokens) == (original.digest, original.num_tokens)
    lane.close()
    way.check_all_is_back()


def test_sent_is_not_taken(way: Way) -> None:
    lane = way.lane()
    frame = entered(lane)
    lane.on_sent([frame])
    assert way.view.num_free_slots == NUM_SLOTS - 1
    lane.on_taken(1)
    way.check_all_is_back()


async def test_one_shipment_leaves_room_for_others(way: Way) -> None:
    """A stream that is stuck holds half of the slots at most."""
    stuck, other = way.lane(), way.lane()
    for _ in range(NUM_SLOTS // 2):
        entered(stuck)
    assert stuck.try_enter(FRAME) is None
    waiting = asyncio.ensure_future(stuck.enter(FRAME))
    await turn()
    assert not waiting.done()
    for _ in range(20):
        entered(other)
        other.on_taken(1)
    assert not waiting.done()
    stuck.on_taken(1)
    assert isinstance((await waiting).payload, Region)
    stuck.close()
    other.close()
    way.check_all_is_back()


def test_a_batch_is_small_where_slots_are_few() -> None:
    for num_slots, expected in ((1, 1), (2, 1), (4, 1), (8, 2), (1000, MAX_STAGED_BATCH)):
        way = make_way(num_slots)
        lane = way.lane()
        assert lane.max_batch_frames == expected
        entered(lane)  # one always fits
        lane.close()
        way.view.close()
        way.segment.close()


@pytest.mark.parametrize("num_frames", [3, 2**32 - 1])
def test_credit_beyond_what_is_staged_is_refused_and_frees_nothing(way: Way, num_frames: int) -> None:
    lane, other = way.lane(), way.lane()
    for one in (lane, lane, other):
        entered(one)
    with pytest.raises(FailedPrecondition, match=f"credit for {num_frames} frames, 2 are staged"):
        lane.on_taken(num_frames)
    assert way.view.num_free_slots == NUM_SLOTS - 3
    lane.close()
    other.close()
    way.check_all_is_back()


def test_credit_frees_the_oldest(way: Way) -> None:
    lane = way.lane()
    first, second, third = (entered(lane, index).payload for index in range(3))
    lane.on_taken(0)
    lane.on_taken(2)
    assert {entered(lane, 3).payload, entered(lane, 4).payload} == {first, second}
    lane.close()
    assert isinstance(third, Region)
    way.check_all_is_back()


def test_closing_gives_everything_back_once(way: Way) -> None:
    lane = way.lane()
    for _ in range(3):
        entered(lane)
    for _ in range(3):
        lane.close()
        way.check_all_is_back()


async def test_a_lost_link_fails_who_enters_and_loses_no_bytes(way: Way) -> None:
    """The segment is gone, the budget of the whole process is not."""
    lane, waits = way.lane(), way.lane()
    for _ in range(NUM_SLOTS // 2):
        entered(lane)
        entered(waits)
    waiting = asyncio.ensure_future(way.lane().enter(FRAME))
    await turn()
    way.view.close()
    lane.on_taken(1)
    with pytest.raises(Unavailable, match="link to the receiver was lost"):
        await waiting
    with pytest.raises(Unavailable):
        lane.try_enter(FRAME)
    with pytest.raises(Unavailable):
        await lane.enter(FRAME)
    lane.close()
    waits.close()
    assert (way.total.num_bytes, way.budget.num_bytes, way.total.num_waiting) == (0, 0, 0)


def test_a_link_lost_between_entering_and_sending(way: Way) -> None:
    lane = way.lane()
    frames = [entered(lane, index) for index in range(2)]
    way.view.close()
    with pytest.raises(Unavailable, match="link to the receiver was lost"):
        lane.message(frames)
    lane.close()
    way.check_all_is_back()


async def test_giving_up_while_waiting_for_room_or_slots(way: Way) -> None:
    lanes = [way.lane() for _ in range(3)]
    for lane in lanes[:2]:
        for _ in range(NUM_SLOTS // 2):
            entered(lane)
    waiting = [asyncio.ensure_future(lane.enter(FRAME)) for lane in lanes]  # two for slots, one for room
    await turn()
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    for lane in lanes:
        lane.close()
    way.check_all_is_back()


def test_how_long_nothing_was_taken(way: Way) -> None:
    lane = way.lane()
    assert lane.untaken_since_s() is None
    before_s = time.monotonic()
    entered(lane)
    since_s = lane.untaken_since_s()
    assert since_s is not None and before_s <= since_s <= time.monotonic()
    entered(lane)
    assert lane.untaken_since_s() == since_s  # a second one makes the first no younger
    lane.on_taken(1)
    later_s = lane.untaken_since_s()
    assert later_s is not None and later_s >= since_s
    lane.on_taken(1)
    assert lane.untaken_since_s() is None


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "enter", "taken", "close"])), max_size=60))
def test_nothing_is_lost_in_any_order(steps: list[tuple[int, str]]) -> None:
    way = make_way()
    lanes, staged = [way.lane() for _ in range(3)], [0, 0, 0]
    for index, step in steps:
        if step == "enter":
            staged[index] += lanes[index].try_enter(FRAME) is not None
        elif step == "taken":
            num_frames = min(staged[index], 2)
            lanes[index].on_taken(num_frames)
            staged[index] -= num_frames
        else:
            lanes[index].close()
            staged[index] = 0
        assert way.view.num_free_slots == NUM_SLOTS - sum(staged)
        assert way.budget.num_bytes == way.total.num_bytes == 128 * sum(staged)
        assert max(staged) <= NUM_SLOTS // 2
    for lane in lanes:
        lane.close()
    way.check_all_is_back()
    way.view.close()
    way.segment.close()
