"""The receiving end: what it lets through to the pool, and everything it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvferry.errors import DataLoss, FailedPrecondition, Internal, InvalidArgument, KvferryError, Unavailable
from kvferry.spec import AttemptId
from kvtransfer.messages import Alive, BlockFrame, Commit, Offer, SenderMessage
from kvtransfer.receiver import (
    CommitSequence,
    ReceiveFailed,
    ReceiveFinished,
    ReceiverAction,
    ReceiverState,
    RequestGrant,
    SendCommitAck,
    SendNack,
    SendWant,
    ShipReceiver,
    VerifyBlock,
    WriteFrame,
)
from tests.unit.kvtransfer.support import ATTEMPT, EPOCH, LAYOUT, contents_of, frames_of, make_offer

COMMIT = Commit(ATTEMPT, (5,))
OTHER = AttemptId("request", 2)


def new() -> ShipReceiver:
    return ShipReceiver(layout=LAYOUT, epoch=EPOCH, max_frame_bytes=128)


def granting() -> ShipReceiver:
    receiver = new()
    receiver.on_message(make_offer())
    return receiver


def receiving(wanted: tuple[int, ...] = (0, 1, 2)) -> ShipReceiver:
    receiver = granting()
    receiver.on_granted(wanted)
    return receiver


def deliver(receiver: ShipReceiver, *messages: SenderMessage) -> list[ReceiverAction]:
    """Actions of the last message; complete blocks are found right."""
    actions: list[ReceiverAction] = []
    for message in messages:
        actions = receiver.on_message(message)
        for action in list(actions):
            if isinstance(action, VerifyBlock):
                actions = actions + receiver.on_block_written(action.block_index, digest_ok=True)
    return actions


def complete() -> ShipReceiver:
    """All blocks verified, no Commit yet."""
    receiver = receiving()
    deliver(receiver, *frames_of(0), *frames_of(1), *frames_of(2, 2))
    return receiver


def failure(actions: list[ReceiverAction]) -> KvferryError:
    assert len(actions) == 1
    assert isinstance(actions[0], ReceiveFailed)
    return actions[0].error


def test_whole_shipment() -> None:
    receiver = new()
    offer = make_offer()
    assert receiver.on_message(offer) == [RequestGrant(offer)]
    assert receiver.on_message(Alive()) == []
    assert receiver.on_granted((1, 2)) == [SendWant((1, 2))]
    first, last = frames_of(1, max_frame_bytes=100)
    assert receiver.on_message(first) == [WriteFrame(1, 0, contents_of(1)[:100])]
    assert receiver.on_message(last) == [WriteFrame(1, 100, contents_of(1)[100:]), VerifyBlock(1, last.digest, 4)]
    assert receiver.on_block_written(1, digest_ok=True) == []
    deliver(receiver, *frames_of(2, 2))
    assert receiver.on_message(COMMIT) == [CommitSequence((5,))]
    assert receiver.on_committed(already_committed=False) == [SendCommitAck(False), ReceiveFinished()]
    assert receiver.state is ReceiverState.DONE


def test_commit_waits_for_verification() -> None:
    receiver = receiving()
    deliver(receiver, *frames_of(0), *frames_of(1))
    receiver.on_message(frames_of(2, 2)[0])
    assert receiver.on_message(COMMIT) == []
    assert receiver.on_block_written(2, digest_ok=True) == [CommitSequence((5,))]


def test_commit_waits_for_repair() -> None:
    receiver = receiving()
    deliver(receiver, *frames_of(0), *frames_of(1))
    receiver.on_message(frames_of(2, 2)[0])
    assert receiver.on_block_written(2, digest_ok=False) == [SendNack(2)]
    assert receiver.on_message(COMMIT) == []
    first, last = frames_of(2, 2, max_frame_bytes=100)
    assert receiver.on_message(first) == [WriteFrame(2, 0, contents_of(2)[:100])]
    receiver.on_message(last)
    assert receiver.on_block_written(2, digest_ok=True) == [CommitSequence((5,))]


def test_second_nack_closes_the_block() -> None:
    receiver = receiving()
    for _ in range(2):
        receiver.on_message(frames_of(0)[0])
        assert receiver.on_block_written(0, digest_ok=False) == [SendNack(0)]
    assert isinstance(failure(receiver.on_message(frames_of(0)[0])), DataLoss)


def test_commit_with_everything_held() -> None:
    receiver = new()
    receiver.on_message(make_offer(8))
    receiver.on_granted(())
    assert receiver.on_message(COMMIT) == [CommitSequence((5,))]


def test_already_committed_answers_the_offer() -> None:
    assert granting().on_committed(already_committed=True) == [SendCommitAck(True), ReceiveFinished()]


def test_refusals_of_the_host_are_passed_on() -> None:
    error = Unavailable("no")
    assert granting().on_refused(error) == [ReceiveFailed(error)]


@pytest.mark.parametrize("wanted", [(0, 1), (0, 1, 2, 3), (1, 0, 2), (0, 0, 2), (-1, 2)])
def test_senseless_grants_are_our_fault(wanted: tuple[int, ...]) -> None:
    assert isinstance(failure(granting().on_granted(wanted)), Internal)


FRAME = frames_of(0)[0]
FIRST, LAST = frames_of(0, max_frame_bytes=100)


def changed(frame: BlockFrame, **changes: object) -> BlockFrame:
    return dataclasses.replace(frame, **changes)  # type: ignore[arg-type]  # field names are checked at run time


@pytest.mark.parametrize(
    ("make", "message", "says"),
    [
        (new, FRAME, "before the Offer"),
        (new, COMMIT, "before the Offer"),
        (new, Alive(), "before the Offer"),
        (new, make_offer(epoch=6), "7 here, 6 there"),
        (new, make_offer(layout=dataclasses.replace(LAYOUT, block_size=8)), "block_size: 4 here, 8 there"),
        (granting, make_offer(), "second Offer"),
        (granting, FRAME, "granting"),
        (granting, COMMIT, "granting"),
        (receiving, make_offer(), "second Offer"),
        (receiving, changed(FRAME, id=OTHER), "another attempt"),
        (receiving, Commit(OTHER, (5,)), "another attempt"),
        (receiving, changed(FRAME, block_index=3), "not wanted"),
        (lambda: receiving((1, 2)), FRAME, "not wanted"),
        (receiving, changed(FRAME, num_tokens=3), "3 tokens, 4 due"),
        (receiving, changed(FRAME, block_index=2), "4 tokens, 2 due"),
        (receiving, LAST, "offset 100, 0 due"),
        (receiving, changed(FRAME, digest=b""), "digest of 0 bytes, 16 due"),
        (receiving, changed(FRAME, digest=b"short"), "digest of 5 bytes"),
        (receiving, changed(FIRST, digest=LAST.digest), "digest of 16 bytes, 0 due"),
        (complete, FRAME, "verified"),
        (receiving, COMMIT, "Commit without block 0"),
    ],
)
def test_contradictions_are_refused(make: Callable[[], ShipReceiver], message: SenderMessage, says: str) -> None:
    receiver = make()
    error = failure(receiver.on_message(message))
    assert isinstance(error, FailedPrecondition)
    assert says in error.message
    assert receiver.state is ReceiverState.FAILED


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (FIRST, "offset 0, 100 due"),
        (changed(LAST, offset=99), "offset 99, 100 due"),
        (changed(LAST, payload=bytes(29)), "129 bytes, a block has 128"),
        (frames_of(1)[0], "block 1 while block 0 is incomplete"),
        (COMMIT, "without block 0"),
    ],
)
def test_pieces_must_fit_together(second: SenderMessage, says: str) -> None:
    receiver = receiving()
    receiver.on_message(FIRST)
    error = failure(receiver.on_message(second))
    assert isinstance(error, FailedPrecondition)
    assert says in error.message


@pytest.mark.parametrize(
    "message", [changed(FRAME, payload=b""), changed(FRAME, payload=bytes(129)), Commit(ATTEMPT, ())]
)
def test_what_could_never_be_right(message: SenderMessage) -> None:
    assert isinstance(failure(receiving().on_message(message)), InvalidArgument)


def test_block_being_verified_is_not_taken_again() -> None:
    receiver = receiving()
    receiver.on_message(FRAME)
    assert "verifying" in failure(receiver.on_message(FRAME)).message


@pytest.mark.parametrize("message", [COMMIT, frames_of(1)[0]])
def test_after_the_commit(message: SenderMessage) -> None:
    receiver = receiving()
    deliver(receiver, *frames_of(0), *frames_of(1))
    receiver.on_message(frames_of(2, 2)[0])  # still being verified
    receiver.on_message(COMMIT)
    assert isinstance(failure(receiver.on_message(message)), FailedPrecondition)


def test_second_commit_while_committing() -> None:
    receiver = complete()
    receiver.on_message(COMMIT)
    assert "committing" in failure(receiver.on_message(COMMIT)).message


@pytest.mark.parametrize("make", [new, granting, receiving, complete])
def test_end_before_the_commit(make: Callable[[], ShipReceiver]) -> None:
    assert isinstance(failure(make().on_end()), Unavailable)


def test_end_after_the_commit_is_fine() -> None:
    receiver = complete()
    receiver.on_message(COMMIT)
    assert receiver.on_end() == []
    assert receiver.on_committed(already_committed=False) == [SendCommitAck(False), ReceiveFinished()]


def test_everything_after_the_end_is_ignored() -> None:
    receiver = receiving()
    receiver.on_refused(Unavailable("gone"))
    offer: Offer = make_offer()
    for message in (offer, FRAME, COMMIT, Alive()):
        assert receiver.on_message(message) == []
    assert receiver.on_end() == []
    assert receiver.on_granted((0, 1, 2)) == []
    assert receiver.on_block_written(0, digest_ok=True) == []
    assert receiver.on_committed(already_committed=False) == []
