"""The sending end: what leaves when, and which answers of the receiver it refuses."""

from __future__ import annotations

import pytest

from kvferry.errors import Cancelled, DataLoss, FailedPrecondition, Internal, KvferryError
from kvtransfer.messages import Alive, CommitAck, Nack, ReceiverMessage, Want
from kvtransfer.sender import (
    SendBlock,
    SendCommit,
    SenderAction,
    SenderState,
    SendOffer,
    ShipFailed,
    ShipFinished,
    ShipSender,
    ShipSummary,
)
from tests.unit.kvtransfer.support import LAYOUT, make_offer

ALL = Want((0, 1, 2))


def started(num_tokens: int = 10) -> ShipSender:
    sender = ShipSender(make_offer(num_tokens))
    sender.start()
    return sender


def committing() -> ShipSender:
    sender = started()
    sender.on_message(ALL)
    sender.on_first_token((5,))
    return sender


def failure(actions: list[SenderAction]) -> KvferryError:
    assert len(actions) == 1
    assert isinstance(actions[0], ShipFailed)
    return actions[0].error


def test_opens_with_the_offer() -> None:
    offer = make_offer()
    assert ShipSender(offer).start() == [SendOffer(offer)]


def test_full_blocks_leave_while_later_chunks_compute() -> None:
    sender = started()
    assert sender.on_tokens_computed(5) == []
    assert sender.on_message(ALL) == [SendBlock(0, 4)]
    assert sender.on_tokens_computed(7) == []
    assert sender.on_tokens_computed(9) == [SendBlock(1, 4)]
    assert sender.on_tokens_computed(10) == []  # the partial block waits for the first token
    assert sender.on_first_token((5, 6)) == [SendBlock(2, 2), SendCommit((5, 6))]
    assert sender.on_message(CommitAck(False)) == [ShipFinished(ShipSummary(3, 0, 3 * LAYOUT.block_bytes, 0, False))]
    assert sender.state is SenderState.DONE


def test_only_wanted_blocks_leave() -> None:
    sender = started()
    sender.on_first_token((5,))
    assert sender.on_message(Want((1, 2))) == [SendBlock(1, 4), SendBlock(2, 2), SendCommit((5,))]
    assert sender.on_message(CommitAck(False)) == [ShipFinished(ShipSummary(2, 1, 2 * LAYOUT.block_bytes, 0, False))]


def test_nothing_wanted_still_waits_for_the_first_token() -> None:
    sender = started(8)
    assert sender.on_message(Want(())) == []
    assert sender.on_first_token((5,)) == [SendCommit((5,))]


def test_greatest_progress_counts() -> None:
    sender = started()
    sender.on_tokens_computed(8)
    sender.on_tokens_computed(4)
    assert sender.on_message(ALL) == [SendBlock(0, 4), SendBlock(1, 4)]


def test_nack_repeats_the_block_once() -> None:
    sender = started()
    sender.on_message(ALL)
    sender.on_tokens_computed(8)
    assert sender.on_message(Nack(0)) == [SendBlock(0, 4)]
    assert sender.summary == ShipSummary(2, 0, 3 * LAYOUT.block_bytes, 1, False)


def test_nack_after_commit_repeats_the_block_and_not_the_commit() -> None:
    sender = committing()
    assert sender.on_message(Nack(2)) == [SendBlock(2, 2)]
    assert isinstance(sender.on_message(CommitAck(False))[0], ShipFinished)


def test_second_nack_is_data_loss_that_names_the_block() -> None:
    sender = committing()
    sender.on_message(Nack(1))
    error = failure(sender.on_message(Nack(1)))
    assert isinstance(error, DataLoss)
    assert error.field == "block[1]"


def test_already_committed_answers_the_offer() -> None:
    sender = started()
    assert sender.on_message(CommitAck(True)) == [ShipFinished(ShipSummary(already_committed=True))]


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (started(), Want((0, 0, 2))),
        (started(), Want((1, 0, 2))),
        (started(), Want((0, 1, 2, 3))),
        (started(), Want((0, 1))),  # without the partial block
        (started(), Nack(0)),
        (started(), CommitAck(False)),
        (committing(), ALL),
        (committing(), Nack(3)),
    ],
    ids=str,
)
def test_wrong_answers_fail(sender: ShipSender, message: ReceiverMessage) -> None:
    assert isinstance(failure(sender.on_message(message)), FailedPrecondition)
    assert sender.state is SenderState.FAILED


@pytest.mark.parametrize("ack", [CommitAck(False), CommitAck(True)])
def test_acknowledgement_before_the_commit_fails(ack: CommitAck) -> None:
    sender = started()
    sender.on_message(ALL)
    assert isinstance(failure(sender.on_message(ack)), FailedPrecondition)


def test_nack_of_a_block_not_sent_yet_fails() -> None:
    sender = started()
    sender.on_message(ALL)
    sender.on_tokens_computed(4)
    assert isinstance(failure(sender.on_message(Nack(1))), FailedPrecondition)


def test_wrong_local_inputs_are_our_fault() -> None:
    assert isinstance(failure(started().on_tokens_computed(11)), Internal)
    assert isinstance(failure(started().on_first_token(())), Internal)
    assert isinstance(failure(committing().on_first_token((1,))), Internal)


def test_cancel_and_everything_after_it() -> None:
    sender = started()
    assert isinstance(failure(sender.cancel()), Cancelled)
    assert sender.cancel() == []
    assert sender.on_message(ALL) == []
    assert sender.on_tokens_computed(10) == []
    assert sender.on_first_token((1,)) == []
    assert sender.summary.num_blocks_reused == 0


def test_alive_changes_nothing() -> None:
    sender = committing()
    assert sender.on_message(Alive()) == []
    assert sender.state is SenderState.COMMITTING
