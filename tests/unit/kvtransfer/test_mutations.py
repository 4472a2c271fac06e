"""What a sender says is changed at random: refusals come of it, never another error, a wrong block or anything kept."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvferry.errors import Internal, KvferryError
from kvferry.rpc import RpcChannel
from kvferry.tasks import run_until_first
from kvtransfer.budget import ByteBudget
from kvtransfer.handshake import Transport
from kvtransfer.messages import Offer
from kvtransfer.sender_link import Linked
from kvtransfer.staging import HEADER_BYTES, StagingSegment, StagingView
from tests.support.shipping import ship_call
from tests.support.staging import StagingTraces, num_open_files, staging_traces
from tests.support.workers import until
from tests.unit.kvtransfer.mutations import (
    Conversations,
    StrictHost,
    changed_answers,
    changed_link_request,
    hear_answers,
    open_receiver,
)
from tests.unit.kvtransfer.pairs import joined, make_terms
from tests.unit.kvtransfer.support import LAYOUT

SAMPLE_MESSAGES, SAMPLE_REMOTE, SAMPLE_ANSWERS = 20_000, 300, 2_000
SWEEP_MESSAGES, SWEEP_REMOTE = 1_000_000, 10_000
MAX_GROWTH_BYTES = 16 << 20
"""Of the process's memory over any number of messages."""
MAX_GROWTH_OBJECTS = 500
LINK_SHARE = 0.05
"""Of the messages that open a link instead of belonging to a shipment."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps every line that is logged, and each refused link is one."""
    monkeypatch.setattr(logging.getLogger("kvtransfer.receiver_links"), "disabled", True)


def num_objects() -> int:
    """That are reachable; of few messages they tell more than the memory of a process that ran other tests before."""
    gc.collect()
    return len(gc.get_objects())


def resident_bytes() -> int:
    """Memory of this process; what the allocator keeps for later is given back first."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def feed(num_messages: int, seed: int, kept: Callable[[], int], max_growth: int) -> Counter[str]:
    """Feeds so many changed messages to a receiver; what became of the conversations they were in.

    Between the first messages and the last, what is ``kept`` grows by less than ``max_growth``.
    """
    dice, ends = random.Random(seed), Counter[str]()
    terms, num_fed, kept_at_first = make_terms("shm"), 0, 0
    with open_receiver(dice) as (receiver, conversations):
        files = num_open_files()
        while num_fed < num_messages:
            if dice.random() < LINK_SHARE:
                ends["link opened"] += await receiver.take_link(changed_link_request(terms, dice)) > 0
                num_fed += 1
                continue
            messages, changed = conversations.changed()
            num_read, host = await receiver.take(messages)
            num_fed += sum(place < num_read for place in changed)
            ends["committed" if host.num_committed else "refused"] += 1
            ends["had begun"] += host.blocks_were_reserved
            if not kept_at_first and num_fed > num_messages // 20:
                kept_at_first = kept()
        assert kept() - kept_at_first < max_growth
        _, host = await receiver.take(conversations.honest())
        assert host.num_committed == 1, "the receiver takes honest shipments no more"
        assert num_open_files() <= files and len(asyncio.all_tasks()) == 1
    return ends


def check_reached(ends: Counter[str]) -> None:
    """The changes go deep enough to mean something: many shipments begin, some survive, most are refused."""
    total = ends["committed"] + ends["refused"]
    assert ends["refused"] > total // 3 and ends["committed"] > total // 50 and ends["had begun"] > total // 3, ends
    assert ends["link opened"] > 0, ends


async def test_changed_messages_are_refused_and_nothing_else_happens() -> None:
    check_reached(await feed(SAMPLE_MESSAGES, 0, num_objects, MAX_GROWTH_OBJECTS))
    assert staging_traces() == StagingTraces()


@pytest.mark.sweep
@pytest.mark.timeout(7_200)
async def test_a_million_changed_messages() -> None:
    began_s = time.monotonic()
    ends = await feed(SWEEP_MESSAGES, int(time.time()), resident_bytes, MAX_GROWTH_BYTES)
    check_reached(ends)
    assert staging_traces() == StagingTraces()
    logging.getLogger(__name__).info("%s in %.0f s", dict(ends), time.monotonic() - began_s)


# -- over a server ----------------------------------------------------------------------------------------------------


class StrictHosts:
    """A strict host for each offer."""

    def __init__(self) -> None:
        self.hosts: list[StrictHost] = []

    def open(self, offer: Offer) -> StrictHost:
        self.hosts.append(StrictHost())
        return self.hosts[-1].open(offer)


async def feed_server(num_messages: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The same through gRPC: no call ends with an error of ours, the log tells of none, and the server goes on."""
    dice, hosts, num_fed = random.Random(seed), StrictHosts(), 0
    async with joined("shm", hosts.open, peer_bytes=64 * 128) as pair:
        assert pair.channel is not None and pair.link is not None
        linked = await pair.link.agreed()
        assert linked.view is not None
        conversations = Conversations(linked.link_id, linked.view, dice)
        while num_fed < num_messages:
            messages, changed = conversations.changed()
            num_fed += len(changed)
            await _say(pair.channel, messages)
        (host,) = await _honest_shipment(pair.channel, conversations, hosts)
        assert host.num_committed == 1, "the server takes honest shipments no more"
        await until(lambda: all(host.blocks is None for host in hosts.hosts))
    for host in hosts.hosts:
        host.check_is_over()
    assert not [record for record in caplog.records if record.message == "rpc_failed"]


async def _say(channel: RpcChannel, messages: list[bytes]) -> None:
    try:
        async with asyncio.timeout(10), ship_call(channel) as call:
            answered: asyncio.Queue[None] = asyncio.Queue()
            # A status is delivered behind the answers before it, so they must be read while messages are written.
            await run_until_first(_hear(call, answered), _tell(call, messages, answered))
    except Internal as error:
        raise AssertionError("an error that nobody thought of") from error
    except KvferryError:
        pass


async def _hear(call: Any, answered: asyncio.Queue[None]) -> None:
    while await call.read() is not grpc.aio.EOF:
        answered.put_nowait(None)


async def _tell(call: Any, messages: list[bytes], answered: asyncio.Queue[None]) -> None:
    for number, message in enumerate(messages):
        if number == 1:
            await answered.get()  # the Want; after a refusal the call ends instead
        await call.write(message)
    await call.done_writing()
    await asyncio.get_running_loop().create_future()


async def _honest_shipment(channel: RpcChannel, conversations: Conversations, hosts: StrictHosts) -> list[StrictHost]:
    num_before = len(hosts.hosts)
    await _say(channel, conversations.honest())
    return hosts.hosts[num_before:]


async def test_changed_messages_over_a_server(caplog: pytest.LogCaptureFixture) -> None:
    await feed_server(SAMPLE_REMOTE, 0, caplog)


@pytest.mark.sweep
@pytest.mark.timeout(3_600)
async def test_ten_thousand_changed_messages_over_a_server(caplog: pytest.LogCaptureFixture) -> None:
    await feed_server(SWEEP_REMOTE, int(time.time()), caplog)


# -- at the sender ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpc", "shm"])
async def test_changed_answers_fail_the_shipment_and_nothing_else_happens(kind: str) -> None:
    dice, total, ends = random.Random(0), ByteBudget(1 << 20), Counter[bool]()
    segment = StagingSegment(HEADER_BYTES + 32 * LAYOUT.block_bytes)
    view = StagingView(segment.name, LAYOUT.block_bytes)
    is_staged = kind == "shm"
    transport = Transport.SHARED_MEMORY if is_staged else Transport.GRPC
    linked = Linked(2, 1, transport, 1 << 20, total.peer(1 << 20), view=view if is_staged else None)
    for _ in range(SAMPLE_ANSWERS):
        ends[await hear_answers(changed_answers(6, dice, is_staged=is_staged), linked)] += 1
        assert total.num_bytes == 0 and view.num_free_slots == view.num_slots
    assert ends[False] > SAMPLE_ANSWERS // 2 and ends[True] > SAMPLE_ANSWERS // 100, ends
    assert len(asyncio.all_tasks()) == 1
    view.close()
    segment.close()


# -- the harness itself -----------------------------------------------------------------------------------------------


async def test_honest_conversations_commit() -> None:
    with open_receiver(random.Random(0)) as (receiver, conversations):
        for _ in range(50):
            messages = conversations.honest()
            num_read, host = await receiver.take(messages)
            assert (num_read, host.num_committed) == (len(messages), 1)


async def test_a_block_that_is_wrong_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a receiver that verifies nothing the harness fails."""
    monkeypatch.setattr(StrictHost, "verify", lambda *_: True)
    with pytest.raises(AssertionError, match="are wrong and would run"):
        await feed(SAMPLE_MESSAGES, 0, num_objects, MAX_GROWTH_OBJECTS)
