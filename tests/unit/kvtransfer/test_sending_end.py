"""What the sending end writes and when, against a stream that is played by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.errors import FailedPrecondition, Unavailable
from kvtransfer.budget import ByteBudget, PeerBudget, ShipRank
from kvtransfer.faults import Fault, FaultKind, Faults
from kvtransfer.lane import InlineLane, Lane, StagedLane
from kvtransfer.messages import (
    Alive,
    BlockFrame,
    Commit,
    CommitAck,
    Credit,
    Nack,
    Offer,
    ReceiverMessage,
    Region,
    SenderMessage,
    StagedFrames,
    Want,
)
from kvtransfer.sender import ShipSender
from kvtransfer.sending_end import run_sending_end
from kvtransfer.staging import HEADER_BYTES, StagingSegment, StagingView
from kvtransfer.transport import BlockSource, FirstToken, SendOptions, ShipEvent, TokensComputed
from tests.unit.kvtransfer.pairs import SHORT_S, computed, events_of
from tests.unit.kvtransfer.support import MemorySource, contents_of, make_offer

NUM_SLOTS = 8


class HandStream:
    """Keeps what is written; brings what the test says."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[SenderMessage] = asyncio.Queue()
        self.answers: asyncio.Queue[ReceiverMessage] = asyncio.Queue()

    async def write(self, message: SenderMessage) -> None:
        self.written.put_nowait(message)

    async def read(self) -> ReceiverMessage:
        return await self.answers.get()

    def say(self, *messages: ReceiverMessage) -> None:
        for message in messages:
            self.answers.put_nowait(message)

    async def heard(self) -> Any:
        """The next message but heartbeats; the test fails where none comes."""
        async with asyncio.timeout(5):
            while isinstance(message := await self.written.get(), Alive):
                pass
        return message

    async def hears_nothing(self) -> bool:
        """After everything that can go on has gone on."""
        for _ in range(10):
            await asyncio.sleep(0)
        return self.written.empty()


class Shipment:
    """A shipment that runs; ended by `end`, which says how it ended."""

    def __init__(
        self,
        lane: Lane,
        num_tokens: int = 40,
        events: asyncio.Queue[ShipEvent] | None = None,
        *,
        source: BlockSource | None = None,
        timeout_s: float = 5.0,
        **options: Any,
    ) -> None:
        self.stream = HandStream()
        self.sender = ShipSender(make_offer(num_tokens, progress_timeout_s=timeout_s))
        ending = run_sending_end(
            self.stream,
            self.sender,
            source or MemorySource(),
            events or computed(num_tokens),
            SendOptions(**options),
            lane,
        )
        self.task = asyncio.ensure_future(ending)

    async def is_wanted(self, *block_indices: int) -> None:
        """The Offer was heard and answered."""
        assert isinstance(await self.stream.heard(), Offer)
        self.stream.say(Want(block_indices))

    async def end(self) -> BaseException | None:
        async with asyncio.timeout(5):
            await asyncio.wait([self.task])
        return self.task.exception()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@pytest.fixture
def budget() -> PeerBudget:
    return ByteBudget(1 << 20).peer(1 << 20)


@pytest.fixture
def view() -> Iterator[StagingView]:
    segment = StagingSegment(HEADER_BYTES + NUM_SLOTS * 128)
    view = StagingView(segment.name, 128)
    yield view
    view.close()
    segment.close()


def inline(budget: PeerBudget) -> InlineLane:
    return InlineLane(budget, ShipRank())


def staged(budget: PeerBudget, view: StagingView) -> StagedLane:
    return StagedLane(budget, ShipRank(), view)


# -- order ------------------------------------------------------------------------------------------------------------


async def test_no_heartbeat_overtakes_the_offer(budget: PeerBudget) -> None:
    shipment = Shipment(inline(budget), events=events_of(), timeout_s=0.2)
    asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # two heartbeats are due before the Offer's turn
    first, second = [await shipment.stream.written.get() for _ in range(2)]
    await shipment.cancel()
    assert (type(first), type(second)) == (Offer, Alive)


async def test_a_block_leaves_when_it_is_computed_and_wanted(budget: PeerBudget) -> None:
    events = events_of()
    shipment = Shipment(inline(budget), 10, events)
    await shipment.is_wanted(1, 2)
    events.put_nowait(TokensComputed(7))
    assert await shipment.stream.hears_nothing()
    events.put_nowait(TokensComputed(8))
    frame = await shipment.stream.heard()
    assert (frame.block_index, frame.payload, frame.num_tokens) == (1, contents_of(1), 4)
    assert await shipment.stream.hears_nothing()
    events.put_nowait(FirstToken((5,)))
    frame, commit = await shipment.stream.heard(), await shipment.stream.heard()
    assert (frame.block_index, frame.num_tokens) == (2, 2)
    assert commit == Commit(shipment.sender.offer.id, (5,))
    shipment.stream.say(CommitAck(False))
    assert await shipment.end() is None
    assert shipment.task.result().num_blocks_shipped == 2


async def test_a_block_that_arrived_wrong_is_read_and_sent_again(budget: PeerBudget) -> None:
    source = MemorySource()
    shipment = Shipment(inline(budget), 8, source=source)
    await shipment.is_wanted(0, 1)
    for _ in range(3):
        await shipment.stream.heard()
    shipment.stream.say(Nack(1))
    assert (await shipment.stream.heard()).block_index == 1
    assert source.reads == [(0, 4), (1, 4), (1, 4)]
    await shipment.cancel()


class SlowSource(MemorySource):
    """Its blocks were given up; they come back when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.num_secured = 0

    async def secure(self) -> None:
        self.num_secured += 1
        await self.gate.wait()


async def test_nothing_is_read_before_the_blocks_are_secured_and_peers_are_heard_meanwhile(budget: PeerBudget) -> None:
    source = SlowSource()
    shipment = Shipment(inline(budget), 8, source=source, timeout_s=SHORT_S)
    await shipment.is_wanted(0, 1)
    for _ in range(8):  # twice the progress timeout
        await asyncio.sleep(SHORT_S / 4)
        shipment.stream.say(Alive())
    assert source.num_secured == 1 and source.reads == [] and not shipment.task.done()
    source.gate.set()
    assert (await shipment.stream.heard()).block_index == 0
    await shipment.cancel()


async def test_blocks_that_are_not_wanted_need_not_be_secured(budget: PeerBudget) -> None:
    source = SlowSource()
    shipment = Shipment(inline(budget), 8, source=source)
    await shipment.is_wanted()
    assert isinstance(await shipment.stream.heard(), Commit)
    assert source.num_secured == 0
    await shipment.cancel()


async def test_a_second_want_is_refused_also_while_the_first_one_waits(budget: PeerBudget) -> None:
    source = SlowSource()
    shipment = Shipment(inline(budget), 8, source=source)
    await shipment.is_wanted(0, 1)
    shipment.stream.say(Want((0, 1)))
    source.gate.set()
    error = await shipment.end()
    assert isinstance(error, FailedPrecondition) and "Want in state" in error.message


# -- room -------------------------------------------------------------------------------------------------------------


async def test_frames_that_find_room_at_once_travel_together(budget: PeerBudget, view: StagingView) -> None:
    lane = staged(budget, view)
    assert lane.max_batch_frames == 2
    shipment = Shipment(lane, 16)
    await shipment.is_wanted(0, 1, 2, 3)
    messages = [await shipment.stream.heard() for _ in range(3)]
    assert [len(message.frames) for message in messages[:2]] == [2, 2]
    assert isinstance(messages[2], Commit)
    await shipment.cancel()
    assert budget.num_bytes == 0 and view.num_free_slots == NUM_SLOTS


async def test_staged_frames_wait_for_credit(budget: PeerBudget, view: StagingView) -> None:
    shipment = Shipment(staged(budget, view), 40)
    await shipment.is_wanted(*range(10))
    frames: list[BlockFrame] = []
    while len(frames) < NUM_SLOTS // 2:
        frames += (await shipment.stream.heard()).frames
    assert await shipment.stream.hears_nothing()
    shipment.stream.say(Credit(1))
    frames += (await shipment.stream.heard()).frames
    assert await shipment.stream.hears_nothing()
    while len(frames) < 10:
        shipment.stream.say(Credit(1))
        frames += (await shipment.stream.heard()).frames
    assert [frame.block_index for frame in frames] == list(range(10))
    assert isinstance(await shipment.stream.heard(), Commit)
    shipment.stream.say(Credit(4), CommitAck(False))
    assert await shipment.end() is None
    assert budget.num_bytes == 0 and view.num_free_slots == NUM_SLOTS


async def test_what_is_staged_leaves_before_anything_is_waited_for(budget: PeerBudget, view: StagingView) -> None:
    """A batch is not kept back for frames that have no room."""
    others = staged(budget, view), staged(budget, view)
    for lane in others:
        for _ in range(3):
            assert lane.try_enter(frame_of_another()) is not None
    taken = ByteBudget(1 << 20).peer(7 * 128)
    assert taken.try_acquire(6 * 128)
    shipment = Shipment(staged(taken, view), 16)
    await shipment.is_wanted(0, 1, 2, 3)
    message = await shipment.stream.heard()
    assert isinstance(message, StagedFrames) and len(message.frames) == 1
    assert await shipment.stream.hears_nothing()
    await shipment.cancel()
    for lane in others:
        lane.close()


def frame_of_another() -> BlockFrame:
    return BlockFrame(make_offer().id, 0, 0, bytes(128), bytes(16), 4)


@pytest.mark.parametrize("kind", [FaultKind.DELAY, FaultKind.STALL])
async def test_what_is_staged_leaves_before_a_delay(kind: FaultKind, budget: PeerBudget, view: StagingView) -> None:
    faults = Faults((Fault(kind, 1, delay_s=60.0 if kind is FaultKind.DELAY else 0.0),))
    shipment = Shipment(staged(budget, view), 16, faults=faults)
    await shipment.is_wanted(0, 1, 2, 3)
    message = await shipment.stream.heard()
    assert [frame.block_index for frame in message.frames] == [0]
    assert await shipment.stream.hears_nothing()
    await shipment.cancel()


async def test_credit_that_was_not_due_fails_the_shipment(budget: PeerBudget, view: StagingView) -> None:
    shipment = Shipment(staged(budget, view), 16)
    await shipment.is_wanted(0, 1, 2, 3)
    shipment.stream.say(Credit(2**32 - 1))
    error = await shipment.end()
    assert isinstance(error, FailedPrecondition) and "credit for 4294967295 frames" in error.message
    assert budget.num_bytes == 0 and view.num_free_slots == NUM_SLOTS


async def test_credit_without_staging_fails_the_shipment(budget: PeerBudget) -> None:
    shipment = Shipment(inline(budget), 16)
    shipment.stream.say(Credit(1))
    error = await shipment.end()
    assert isinstance(error, FailedPrecondition) and "none are staged" in error.message


async def test_a_receiver_that_beats_but_takes_nothing_is_given_up(budget: PeerBudget, view: StagingView) -> None:
    """Also where every payload found a slot."""
    shipment = Shipment(staged(budget, view), 16, timeout_s=SHORT_S)
    await shipment.is_wanted(0, 1, 2, 3)
    while not shipment.task.done():
        await asyncio.wait([shipment.task], timeout=SHORT_S / 4)
        shipment.stream.say(Alive())
    error = await shipment.end()
    assert isinstance(error, Unavailable) and "took nothing" in error.message
    assert budget.num_bytes == 0 and view.num_free_slots == NUM_SLOTS


async def test_a_receiver_that_takes_slowly_is_not_given_up(budget: PeerBudget, view: StagingView) -> None:
    shipment = Shipment(staged(budget, view), 40, timeout_s=SHORT_S)
    await shipment.is_wanted(*range(10))
    for _ in range(9):  # twice the progress timeout
        await asyncio.sleep(SHORT_S / 4)
        shipment.stream.say(Credit(1))
    assert not shipment.task.done()
    await shipment.cancel()


async def test_cancelling_gives_everything_back(budget: PeerBudget, view: StagingView) -> None:
    for lane in (staged(budget, view), inline(budget)):
        shipment = Shipment(lane, 40)
        await shipment.is_wanted(*range(10))
        await shipment.stream.heard()
        await shipment.cancel()
        assert budget.num_bytes == 0 and view.num_free_slots == NUM_SLOTS


async def test_a_repeat_is_staged_anew(budget: PeerBudget, view: StagingView) -> None:
    shipment = Shipment(staged(budget, view), 4)
    await shipment.is_wanted(0)
    (first,) = (await shipment.stream.heard()).frames
    assert isinstance(await shipment.stream.heard(), Commit)
    shipment.stream.say(Nack(0))
    (second,) = (await shipment.stream.heard()).frames
    assert isinstance(second.payload, Region) and second.payload != first.payload
    assert dataclasses.replace(first, payload=second.payload) == second
    await shipment.cancel()
