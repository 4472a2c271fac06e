"""Bytes on their way: who is let in when, bounds that always hold, and nothing lost by whoever gives up."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import Internal
from kvtransfer.budget import ByteBudget, PeerBudget, ShipRank

URGENT, NORMAL, BULK = ShipRank(0), ShipRank(1), ShipRank(2)


async def turn() -> None:
    """Everything that can go on without an event from outside has gone on."""
    for _ in range(3):
        await asyncio.sleep(0)


class Queue:
    """Those who wait, by name, in the order in which they were let in."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, peer: PeerBudget, num_bytes: int = 10, rank: ShipRank = NORMAL) -> None:
        self._tasks[name] = asyncio.ensure_future(self._wait(name, peer, num_bytes, rank))
        await turn()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await turn()

    async def _wait(self, name: str, peer: PeerBudget, num_bytes: int, rank: ShipRank) -> None:
        await peer.acquire(num_bytes, rank)
        self.served.append(name)


async def release(peer: PeerBudget, num_bytes: int = 10) -> None:
    peer.release(num_bytes)
    await turn()


def full_peer(total: ByteBudget, max_bytes: int = 10) -> PeerBudget:
    peer = total.peer(max_bytes)
    assert peer.try_acquire(max_bytes)
    return peer


# -- order ------------------------------------------------------------------------------------------------------------


def test_ranks_order_by_tier_and_then_deadline() -> None:
    ranks = [ShipRank(0, 5.0), ShipRank(0), ShipRank(1, 1.0), ShipRank(1, 2.0), ShipRank(2, 0.0)]
    shuffled = list(ranks)
    random.Random(0).shuffle(shuffled)
    assert sorted(shuffled) == ranks
    assert ShipRank() == ShipRank(0, math.inf)


async def test_those_who_wait_are_served_by_tier_then_deadline_then_turn() -> None:
    peer, queue = full_peer(ByteBudget(100)), Queue()
    await queue.add("bulk", peer, rank=BULK)
    await queue.add("first of its rank", peer)
    await queue.add("second of its rank", peer)
    await queue.add("has a deadline", peer, rank=ShipRank(1, 9.0))
    await queue.add("has an earlier one", peer, rank=ShipRank(1, 3.0))
    await queue.add("urgent", peer, rank=URGENT)
    for _ in range(6):
        await release(peer)
    assert queue.served == [
        "urgent",
        "has an earlier one",
        "has a deadline",
        "first of its rank",
        "second of its rank",
        "bulk",
    ]


async def test_shipments_of_one_rank_interleave_frame_by_frame() -> None:
    peer, order = full_peer(ByteBudget(100)), deque[str]()

    async def ship(name: str, num_frames: int) -> None:
        for _ in range(num_frames):
            if not peer.try_acquire(10):
                await peer.acquire(10, NORMAL)
            order.append(name)

    ships = [asyncio.ensure_future(ship("long", 50)), asyncio.ensure_future(ship("short", 3))]
    while not all(one.done() for one in ships):
        await turn()
        peer.release(10)
    assert list(order)[:6] == ["long", "short"] * 3, "a long shipment holds up a short one"


async def test_nobody_passes_those_who_wait() -> None:
    peer, queue = full_peer(ByteBudget(100), 20), Queue()
    await queue.add("waits", peer, 20)
    peer.release(10)
    assert not peer.try_acquire(10), "room there is, but somebody was here before"
    await queue.add("comes later", peer, 10)
    assert queue.served == []
    await release(peer)
    assert queue.served == ["waits"]


async def test_a_large_frame_is_not_starved_by_small_ones_to_its_peer() -> None:
    """They fit into every gap; still it is its turn."""
    peer, queue = full_peer(ByteBudget(1000), 100), Queue()
    await queue.add("large", peer, 60)
    for number in range(10):
        await queue.add(f"small {number}", peer, 10)
        await release(peer, 10)
        if "large" in queue.served:
            break
    assert queue.served[0] == "large"


# -- bounds -----------------------------------------------------------------------------------------------------------


async def test_a_frame_larger_than_a_bound_passes_alone() -> None:
    for total, peer_bytes in ((1000, 10), (10, 1000)):
        peer, queue = ByteBudget(total).peer(peer_bytes), Queue()
        assert peer.try_acquire(5)
        await queue.add("large", peer, 50)
        assert queue.served == []
        await release(peer, 5)
        assert queue.served == ["large"]
        assert not peer.try_acquire(1)
        await release(peer, 50)
        assert peer.try_acquire(1)


async def test_a_peer_that_takes_nothing_blocks_only_itself() -> None:
    total, queue = ByteBudget(100), Queue()
    stuck, other = full_peer(total, 40), total.peer(40)
    await queue.add("stuck", stuck, rank=URGENT)
    await queue.add("stuck too", stuck)
    for number in range(20):
        await queue.add(f"other {number}", other)
        await release(other)
    assert queue.served == [f"other {number}" for number in range(20)]


async def test_a_large_frame_to_a_peer_that_takes_nothing_blocks_only_itself() -> None:
    """Neither its peer nor the total has room for it; what has room must not wait for it."""
    total, queue = ByteBudget(50), Queue()
    stuck, other = full_peer(total, 40), total.peer(40)
    await queue.add("stuck", stuck, 20, rank=URGENT)
    await queue.add("other", other, 10)
    assert queue.served == ["other"]


async def test_whoever_the_total_stopped_goes_on_when_the_one_ahead_gives_up() -> None:
    """Nothing is given back meanwhile: what is on its way belongs to a peer that takes nothing."""
    total, queue = ByteBudget(100), Queue()
    full_peer(total, 80)
    large, small = total.peer(100), total.peer(100)
    await queue.add("large", large, 50)
    await queue.add("small", small, 10)
    assert queue.served == []
    await queue.cancel("large")
    assert queue.served == ["small"]


async def test_the_total_is_shared() -> None:
    total, queue = ByteBudget(30), Queue()
    left, right = full_peer(total, 20), full_peer(total, 10)
    await queue.add("waits", right)
    await release(left)
    assert queue.served == []  # the total has room, its peer has none
    await release(right)
    assert queue.served == ["waits"]
    assert (total.num_bytes, left.num_bytes, right.num_bytes) == (20, 10, 10)


def test_giving_back_more_than_was_taken_is_our_fault() -> None:
    peer = full_peer(ByteBudget(100))
    with pytest.raises(Internal, match="11 bytes given back, 10 were"):
        peer.release(11)


# -- giving up --------------------------------------------------------------------------------------------------------


async def test_giving_up_while_waiting_takes_nothing() -> None:
    total, queue = ByteBudget(100), Queue()
    peer = full_peer(total)
    await queue.add("gives up", peer)
    await queue.cancel("gives up")
    assert (peer.num_bytes, total.num_bytes, total.num_waiting) == (10, 10, 0)


async def test_giving_up_at_the_moment_of_being_let_in_loses_no_bytes() -> None:
    total = ByteBudget(100)
    peer = full_peer(total)
    waiting = asyncio.ensure_future(peer.acquire(10, NORMAL))
    await turn()
    peer.release(10)  # lets it in
    assert peer.num_bytes == 10
    waiting.cancel()  # before it knows
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert (peer.num_bytes, total.num_bytes, total.num_waiting) == (0, 0, 0)


async def test_those_behind_one_that_gives_up_as_it_is_let_in_are_served() -> None:
    total, queue = ByteBudget(100), Queue()
    peer = full_peer(total)
    waiting = asyncio.ensure_future(peer.acquire(10, URGENT))
    await turn()
    await queue.add("behind", peer)
    peer.release(10)
    waiting.cancel()
    await turn()
    assert queue.served == ["behind"]


# -- any order of everything ------------------------------------------------------------------------------------------

STEPS = st.tuples(st.sampled_from(["acquire", "acquire", "release", "cancel", "turn"]), st.integers(0, 1_000_000))


@dataclass
class _Waiting:
    key: tuple[ShipRank, int]
    task: asyncio.Task[None]
    peer: PeerBudget
    num_bytes: int


class Ledger:
    """A budget with three peers, used at random, and what it should say."""

    MAX_BYTES, PEER_BYTES = 100, (40, 60, 200)

    def __init__(self) -> None:
        self._turns = itertools.count()
        self.total = ByteBudget(self.MAX_BYTES)
        self.peers = [self.total.peer(max_bytes) for max_bytes in self.PEER_BYTES]
        self.waiting: list[_Waiting] = []
        self.held: list[tuple[PeerBudget, int]] = []

    def acquire(self, number: int) -> None:
        dice = random.Random(number)
        peer, num_bytes = dice.choice(self.peers), dice.choice([1, 7, 20, 50, 150])
        rank = ShipRank(dice.randrange(3), dice.choice([1.0, 2.0, math.inf]))
        task = asyncio.ensure_future(self._hold(peer, num_bytes, rank))
        self.waiting.append(_Waiting((rank, next(self._turns)), task, peer, num_bytes))

    async def _hold(self, peer: PeerBudget, num_bytes: int, rank: ShipRank) -> None:
        await peer.acquire(num_bytes, rank)
        self.held.append((peer, num_bytes))

    def release(self, number: int) -> None:
        if self.held:
            peer, num_bytes = self.held.pop(number % len(self.held))
            peer.release(num_bytes)

    def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)].task.cancel()

    def check(self) -> None:
        for peer in self.peers:
            num_held = sum(1 for holder, _ in self.held if holder is peer)
            assert peer.num_bytes <= peer.max_bytes or num_held <= 1
        assert self.total.num_bytes == sum(peer.num_bytes for peer in self.peers)
        assert self.total.num_bytes <= self.total.max_bytes or len(self.held) <= 1

    async def check_at_rest(self) -> None:
        """Nobody waits who could go on."""
        await turn()
        self.check()
        self.waiting = [one for one in self.waiting if not one.task.done()]
        assert self.total.num_waiting == len(self.waiting)
        assert self.total.num_bytes == sum(num_bytes for _, num_bytes in self.held)
        full: set[PeerBudget] = set()
        for one in sorted(self.waiting, key=lambda one: one.key):
            if one.peer in full or not one.peer.has_room(one.num_bytes):
                full.add(one.peer)
            else:
                assert not self.total.has_room(one.num_bytes), "it waits, though there is room"
                break


@given(st.lists(STEPS, max_size=60))
def test_bounds_hold_and_nothing_is_lost_in_any_order(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        ledger = Ledger()
        for name, number in steps:
            if name == "turn":
                await ledger.check_at_rest()
            else:
                getattr(ledger, name)(number)
            ledger.check()
        await ledger.check_at_rest()
        while ledger.held or ledger.waiting:  # everyone is served in the end
            assert ledger.held, "somebody waits, and nobody is there to give anything back"
            ledger.release(0)
            await ledger.check_at_rest()
        assert ledger.total.num_bytes == 0

    asyncio.run(run())
