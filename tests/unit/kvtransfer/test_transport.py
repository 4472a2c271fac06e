"""What every transport does: the same protocol, the same digests, every ending releases once and leaves nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import pytest

from kvferry.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    KvferryError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvferry.spec import AttemptId
from kvtransfer.budget import ShipRank
from kvtransfer.faults import Fault, FaultKind
from kvtransfer.messages import Offer
from kvtransfer.sender import ShipSummary
from kvtransfer.transport import (
    CancelShipment,
    CommitOutcome,
    FirstToken,
    ReceiveOptions,
    SendOptions,
    ShipEvent,
    TokensComputed,
)
from tests.unit.kvtransfer.pairs import EVERY_KIND, KINDS, SHORT_S, computed, events_of, joined
from tests.unit.kvtransfer.support import (
    ATTEMPT,
    EPOCH,
    LAYOUT,
    LargeHost,
    MemoryHost,
    MemorySource,
    OneContents,
    make_offer,
)

MANY_TOKENS = 4000
"""1,000 blocks of 128 bytes in frames of 50: a sender that writes for a while."""
LARGE_LAYOUT = dataclasses.replace(LAYOUT, head_dim=80_000)
"""2.56 MB a block: a few are more than HTTP/2 takes while nobody reads, and more than a segment of 4 MB holds."""


@pytest.fixture(params=EVERY_KIND)
def kind(request: pytest.FixtureRequest) -> str:
    """A transport."""
    return str(request.param)


@pytest.fixture(params=KINDS)
def remote_kind(request: pytest.FixtureRequest) -> str:
    """A transport with a wire."""
    return str(request.param)


async def within(awaitable: Awaitable[Any], timeout_s: float = 5.0) -> Any:
    async with asyncio.timeout(timeout_s):
        return await awaitable


# -- blocks that arrive -----------------------------------------------------------------------------------------------


async def test_blocks_arrive_in_small_frames(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        summary = await pair.ship()
    assert host.is_complete
    assert host.first_token_ids == (5,)
    assert host.num_releases == 0
    assert summary.ship_s > 0
    assert dataclasses.replace(summary, ship_s=0.0) == ShipSummary(3, 0, 3 * LAYOUT.block_bytes, 0, False)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 400])
@pytest.mark.parametrize("max_frame_bytes", [1, 127, 128, 4096])
async def test_any_number_of_blocks_in_frames_of_any_size(kind: str, num_tokens: int, max_frame_bytes: int) -> None:
    host = MemoryHost()
    num_tokens = min(num_tokens, 20) if max_frame_bytes == 1 else num_tokens
    async with joined(kind, lambda offer: host) as pair:
        await pair.ship(
            make_offer(num_tokens), computed(num_tokens), options=SendOptions(max_frame_bytes=max_frame_bytes)
        )
    assert host.is_complete and len(host.blocks) == -(-num_tokens // 4)


async def test_only_missing_blocks_cross(kind: str) -> None:
    host = MemoryHost(held=frozenset({0}))
    async with joined(kind, lambda offer: host) as pair:
        summary = await pair.ship()
    assert set(host.blocks) == {1, 2}
    assert (summary.num_blocks_shipped, summary.num_blocks_reused) == (2, 1)


async def test_first_block_arrives_before_the_prefill_ends(kind: str) -> None:
    host = MemoryHost()
    events = events_of(TokensComputed(4))
    async with joined(kind, lambda offer: host) as pair:
        shipping = asyncio.ensure_future(pair.ship(events=events))
        await within(host.writing.wait())
        assert not shipping.done()
        events.put_nowait(FirstToken((5,)))
        await within(shipping)
    assert host.is_complete


async def test_large_blocks_in_full_frames(kind: str) -> None:
    host = LargeHost(LARGE_LAYOUT.block_bytes)
    contents = random.Random(1).randbytes(LARGE_LAYOUT.block_bytes)
    async with joined(kind, lambda offer: host, layout=LARGE_LAYOUT, peer_bytes=4 << 20) as pair:
        offer = make_offer(33, layout=LARGE_LAYOUT)
        await pair.ship(offer, computed(33), source=OneContents(contents), options=SendOptions())
    assert [bytes(block) for block in host.blocks.values()] == [contents] * 9


async def test_many_shipments_at_once_through_little_memory(kind: str) -> None:
    """Each waits for its turn and for room again and again; none is lost, mixed up or starved."""
    hosts = {f"request-{index}": MemoryHost() for index in range(16)}
    async with joined(kind, lambda offer: hosts[offer.id.request_id], peer_bytes=1000) as pair:
        offers = [make_offer(60 + index, id=AttemptId(name, 1)) for index, name in enumerate(hosts)]
        ships = [
            pair.ship(offer, computed(offer.num_tokens), faults=[Fault(FaultKind.CORRUPT, 7, nth=1)])
            for offer in offers
        ]
        await within(asyncio.gather(*ships), 30.0)
    assert all(host.is_complete and host.num_wrong == 1 for host in hosts.values())


async def test_many_shipments_of_a_small_segment_get_credit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has little to its credit, all of them much: none may wait for more of its own."""
    monkeypatch.setattr("kvtransfer.receiving_end.CREDIT_DELAY_S", 3600.0)
    hosts = {f"r{number}": MemoryHost() for number in range(16)}
    peer_bytes = 64 * LAYOUT.block_bytes
    async with joined("shm", lambda offer: hosts[offer.id.request_id], peer_bytes=peer_bytes) as pair:
        offers = [make_offer(160, id=AttemptId(name, 1)) for name in hosts]
        await within(asyncio.gather(*(pair.ship(offer, computed(160)) for offer in offers)), 30.0)
    assert all(host.is_complete for host in hosts.values())


async def test_a_long_shipment_does_not_hold_up_a_short_one(remote_kind: str) -> None:
    long, short = MemoryHost(), MemoryHost()
    offer = make_offer(4 * MANY_TOKENS, id=AttemptId("long", 1))
    hosts = {"long": long, "short": short}
    async with joined(remote_kind, lambda offer: hosts[offer.id.request_id], peer_bytes=1000) as pair:
        shipping = asyncio.ensure_future(pair.ship(offer, computed(offer.num_tokens), rank=ShipRank(2)))
        await within(long.writing.wait())
        await within(pair.ship(make_offer(id=AttemptId("short", 1)), rank=ShipRank(0)))
        assert short.is_complete and not shipping.done()
        await within(shipping, 60.0)
    assert long.is_complete


# -- blocks that arrive wrong or not at all ---------------------------------------------------------------------------


async def test_block_damaged_once_is_repaired(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        summary = await pair.ship(faults=[Fault(FaultKind.CORRUPT, 1, nth=1), Fault(FaultKind.CORRUPT, 2, nth=1)])
    assert host.is_complete
    assert host.num_releases == 0
    assert (summary.num_nacks, summary.shipped_bytes) == (2, 5 * LAYOUT.block_bytes)


async def test_every_block_damaged_once_is_repaired(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        summary = await pair.ship(make_offer(401), computed(401), faults=[Fault(FaultKind.CORRUPT, nth=1)])
    assert host.is_complete
    assert (summary.num_nacks, host.num_wrong) == (101, 101)


async def test_block_damaged_always_is_data_loss(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(DataLoss) as caught:
            await pair.ship(faults=[Fault(FaultKind.CORRUPT, 1)])
        assert caught.value.field == "block[1]"
        await within(host.released.wait())
    assert host.num_releases == 1
    assert host.first_token_ids == ()


async def test_stored_digest_finds_a_block_that_changed_since(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(DataLoss):
            await pair.ship(source=MemorySource({0: bytes(16)}))
        await within(host.released.wait())


async def test_dropped_block_never_runs(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(FailedPrecondition, match="a Commit without block 1"):
            await pair.ship(faults=[Fault(FaultKind.DROP, 1)])
    assert host.num_releases == 1
    assert host.first_token_ids == ()


async def test_duplicate_block_never_runs(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(FailedPrecondition, match="block 1 again, which is verif"):
            await pair.ship(faults=[Fault(FaultKind.DUPLICATE, 1)])
    assert host.num_releases == 1
    assert host.first_token_ids == ()


async def test_delayed_block_outlives_the_progress_timeout(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        offer = make_offer(progress_timeout_s=SHORT_S)
        await pair.ship(offer, faults=[Fault(FaultKind.DELAY, 0, delay_s=2 * SHORT_S)])
    assert host.is_complete


async def test_status_reaches_a_sender_that_is_writing(kind: str) -> None:
    source = OneContents(bytes(LARGE_LAYOUT.block_bytes))
    for _ in range(10):
        host = LargeHost(LARGE_LAYOUT.block_bytes)
        async with joined(kind, lambda offer, host=host: host, layout=LARGE_LAYOUT, peer_bytes=4 << 20) as pair:  # type: ignore[misc]
            offer = make_offer(80, layout=LARGE_LAYOUT)
            with pytest.raises(FailedPrecondition, match="block 1 again, which is verif"):
                await pair.ship(
                    offer,
                    computed(80),
                    source=source,
                    options=SendOptions(),
                    faults=[Fault(FaultKind.DUPLICATE, 1)],
                )
        assert host.num_releases == 1


async def test_one_bad_shipment_harms_no_other(kind: str) -> None:
    hosts = {f"request-{index}": MemoryHost() for index in range(8)}
    async with joined(kind, lambda offer: hosts[offer.id.request_id]) as pair:
        ships = [
            pair.ship(make_offer(id=AttemptId(name, 1)), faults=[Fault(FaultKind.CORRUPT, 0)] if index % 2 else [])
            for index, name in enumerate(hosts)
        ]
        results = await asyncio.gather(*ships, return_exceptions=True)
        bad = [host for index, host in enumerate(hosts.values()) if index % 2]
        await within(asyncio.gather(*(host.released.wait() for host in bad)))
    assert [isinstance(result, DataLoss) for result in results] == [bool(index % 2) for index in range(8)]
    assert [host.is_complete for host in hosts.values()] == [not index % 2 for index in range(8)]
    assert [host.num_releases for host in hosts.values()] == [index % 2 for index in range(8)]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant_says", [True, False])
async def test_already_committed(kind: str, grant_says: bool) -> None:
    outcome = CommitOutcome.COMMITTED if grant_says else CommitOutcome.ALREADY_COMMITTED
    host = MemoryHost(already_committed=grant_says, commit_outcome=outcome)
    async with joined(kind, lambda offer: host) as pair:
        summary = await pair.ship()
        if grant_says:
            await within(host.released.wait())
    assert summary.already_committed
    assert summary.num_blocks_shipped == (0 if grant_says else 3)
    assert host.num_releases == (1 if grant_says else 0)


def refuse_unknown(offer: Offer) -> MemoryHost:
    if offer.id != ATTEMPT:
        raise NotFound(f"attempt {offer.id.seq_id} is not registered")
    return MemoryHost()


@pytest.mark.parametrize(
    ("offer", "error", "says"),
    [
        (make_offer(epoch=EPOCH - 1), FailedPrecondition, "7 here, 6 there"),
        (
            make_offer(layout=dataclasses.replace(LAYOUT, model_fingerprint="other")),
            FailedPrecondition,
            "model_fingerprint: model here, other there",
        ),
        (make_offer(id=AttemptId("request", 2)), NotFound, "request/2 is not registered"),
    ],
)
async def test_wrong_offers_are_refused(kind: str, offer: Offer, error: type[KvferryError], says: str) -> None:
    async with joined(kind, refuse_unknown) as pair:
        with pytest.raises(error, match=says):
            await pair.ship(offer)


async def test_refused_grant_tells_why_and_when_to_retry(kind: str) -> None:
    host = MemoryHost(refusal=ResourceExhausted("no room", retry_after_s=2.5))
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(ResourceExhausted, match="no room") as caught:
            await pair.ship()
    assert caught.value.retry_after_s == 2.5
    assert host.num_releases == 1


# -- endings ----------------------------------------------------------------------------------------------------------


async def test_cancel_event_ends_the_shipment(kind: str) -> None:
    host = MemoryHost()
    events = events_of(TokensComputed(4))
    async with joined(kind, lambda offer: host) as pair:
        shipping = asyncio.ensure_future(pair.ship(events=events))
        await within(host.writing.wait())
        events.put_nowait(CancelShipment())
        with pytest.raises(Cancelled):
            await within(shipping)
        await within(host.released.wait())
    assert host.num_releases == 1


@pytest.mark.parametrize("phase", ["granting", "writing", "committing"])
async def test_cancelled_task_releases_once_in_every_phase(kind: str, phase: str) -> None:
    gate = asyncio.Event()
    host = MemoryHost(
        grant_gate=gate if phase == "granting" else None, commit_gate=gate if phase == "committing" else None
    )
    events = computed() if phase != "writing" else events_of(TokensComputed(4))
    async with joined(kind, lambda offer: host) as pair:
        shipping = asyncio.ensure_future(pair.ship(events=events))
        await within({"granting": host.granting, "writing": host.writing, "committing": host.committing}[phase].wait())
        shipping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shipping
        await within(host.released.wait())
    assert host.num_releases == 1


async def test_silent_sender_is_given_up(kind: str) -> None:
    host = MemoryHost()
    options = SendOptions(is_alive=lambda: False)  # an engine that hangs: the stream is open, nothing comes
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(Unavailable, match="the sender of the shipment was silent"):
            offer = make_offer(progress_timeout_s=SHORT_S)
            await within(pair.ship(offer, events_of(), options=options), 10 * SHORT_S)
    assert host.num_releases == 1


async def test_stalled_sender_is_given_up(kind: str) -> None:
    host = MemoryHost()
    async with joined(kind, lambda offer: host) as pair:
        with pytest.raises(Unavailable, match="the sender of the shipment was silent"):
            offer = make_offer(progress_timeout_s=SHORT_S)
            await within(pair.ship(offer, faults=[Fault(FaultKind.STALL, 1)]), 10 * SHORT_S)
    assert host.num_releases == 1
    assert host.first_token_ids == ()


async def test_hanging_receiving_engine_is_given_up(kind: str) -> None:
    host = MemoryHost(grant_gate=asyncio.Event())
    async with joined(kind, lambda offer: host, options=ReceiveOptions(is_alive=lambda: False)) as pair:
        with pytest.raises(Unavailable, match="the receiver of the shipment was silent"):
            await within(pair.ship(make_offer(progress_timeout_s=SHORT_S)), 10 * SHORT_S)
        await within(host.released.wait())
    assert host.num_releases == 1


async def test_heartbeats_carry_a_long_grant(kind: str) -> None:
    gate = asyncio.Event()
    host = MemoryHost(grant_gate=gate)
    async with joined(kind, lambda offer: host) as pair:
        shipping = asyncio.ensure_future(pair.ship(make_offer(progress_timeout_s=SHORT_S)))
        done, _ = await asyncio.wait([shipping], timeout=3 * SHORT_S)
        assert not done
        gate.set()
        await within(shipping)
    assert host.is_complete


async def test_server_that_stops_releases(remote_kind: str) -> None:
    host = MemoryHost(grant_gate=asyncio.Event())
    async with joined(remote_kind, lambda offer: host) as pair:
        assert pair.receiver is not None
        shipping = asyncio.ensure_future(pair.ship())
        await within(host.granting.wait())
        await pair.receiver.server.drain(0.0)
        with pytest.raises(Unavailable, match="shutting down"):
            await within(shipping)
        assert pair.receiver.links == 0
    assert host.num_releases == 1


async def test_cancelled_shipments_leave_nothing(kind: str) -> None:
    hosts: list[MemoryHost] = []

    def open_host(offer: Offer) -> MemoryHost:
        hosts.append(MemoryHost())
        return hosts[-1]

    def many() -> tuple[Offer, asyncio.Queue[ShipEvent]]:
        return make_offer(MANY_TOKENS), computed(MANY_TOKENS)

    dice = random.Random(3)
    async with joined(kind, open_host) as pair:
        await pair.ship()  # whatever starts once is there
        num_before = len(asyncio.all_tasks())
        for _ in range(40):
            shipping = asyncio.ensure_future(pair.ship(*many()))
            await asyncio.wait([shipping], timeout=dice.uniform(0.0, 0.02))
            shipping.cancel()
            with suppress(asyncio.CancelledError):
                await shipping
        ended = [host for host in hosts if not host.first_token_ids]
        await within(asyncio.gather(*(host.released.wait() for host in ended)))
        async with asyncio.timeout(5):  # handlers that were told to end and are about to
            while len(tasks := asyncio.all_tasks()) > num_before:
                others = tasks - {asyncio.current_task()}
                await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        assert pair.link is None or pair.num_inflight_bytes == 0
    assert len(ended) > 10
    assert all(host.num_releases == (not host.first_token_ids) for host in hosts)
