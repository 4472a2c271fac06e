"""Messages to protobuf and back, and what is refused before a state machine sees it."""

from __future__ import annotations

import math

import pytest

from kvferry.errors import InvalidArgument
from kvtransfer.codec import (
    receiver_message_from_pb,
    receiver_message_to_pb,
    sender_message_from_pb,
    sender_message_to_pb,
)
from kvtransfer.messages import Alive, Commit, CommitAck, Nack, ReceiverMessage, SenderMessage, Want
from proto.kvferry.v1 import ship_pb2
from tests.unit.kvtransfer.support import ATTEMPT, frames_of, make_offer


@pytest.mark.parametrize(
    "message", [make_offer(), frames_of(0)[0], *frames_of(1, max_frame_bytes=100), Commit(ATTEMPT, (0, 9)), Alive()]
)
def test_sender_messages_survive_the_wire(message: SenderMessage) -> None:
    wire = sender_message_to_pb(message).SerializeToString()
    assert sender_message_from_pb(ship_pb2.ShipRequest.FromString(wire)) == message


@pytest.mark.parametrize("message", [Want((0, 3)), Want(()), Nack(2), CommitAck(True), CommitAck(False), Alive()])
def test_receiver_messages_survive_the_wire(message: ReceiverMessage) -> None:
    wire = receiver_message_to_pb(message).SerializeToString()
    assert receiver_message_from_pb(ship_pb2.ShipResponse.FromString(wire)) == message


def offer_pb() -> ship_pb2.ShipRequest:
    return sender_message_to_pb(make_offer())


def with_request_id(request_id: str) -> ship_pb2.ShipRequest:
    message = offer_pb()
    message.offer.id.request_id = request_id
    return message


def with_offer(field: str, value: object) -> ship_pb2.ShipRequest:
    message = offer_pb()
    setattr(message.offer, field, value)
    return message


def without_layout() -> ship_pb2.ShipRequest:
    message = offer_pb()
    message.offer.ClearField("layout")
    return message


def with_hashes(*hashes: bytes) -> ship_pb2.ShipRequest:
    message = offer_pb()
    message.offer.block_hashes[:] = hashes
    return message


def with_frame(payload: bytes, digest: bytes) -> ship_pb2.ShipRequest:
    message = sender_message_to_pb(frames_of(0)[0])
    message.block.payload, message.block.digest = payload, digest
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ship_pb2.ShipRequest(), "event"),
        (with_request_id(""), "id.request_id"),
        (with_request_id("x" * 257), "id.request_id"),
        (with_offer("num_tokens", 0), "offer.num_tokens"),
        (with_offer("num_tokens", 2**32 - 1), "offer.num_tokens"),
        (with_offer("num_tokens", 12), "offer.block_hashes"),
        (with_offer("progress_timeout_s", 0.0), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", -1.0), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", math.nan), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", math.inf), "offer.progress_timeout_s"),
        (without_layout(), "layout.dtype"),
        (with_hashes(bytes(32), bytes(31)), "offer.block_hashes"),
        (with_hashes(bytes(32)), "offer.block_hashes"),
        (with_frame(b"", bytes(16)), "block.payload"),
        (with_frame(b"x", bytes(15)), "block.digest"),
        (ship_pb2.ShipRequest(commit=ship_pb2.Commit(id=offer_pb().offer.id)), "commit.first_token_ids"),
        (ship_pb2.ShipRequest(commit=ship_pb2.Commit(first_token_ids=[1])), "id.request_id"),
    ],
)
def test_malformed_messages_name_the_field(message: ship_pb2.ShipRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sender_message_from_pb(message)
    assert caught.value.field == field


def test_empty_answer_is_malformed() -> None:
    with pytest.raises(InvalidArgument):
        receiver_message_from_pb(ship_pb2.ShipResponse())


def test_huge_want_is_malformed() -> None:
    with pytest.raises(InvalidArgument):
        receiver_message_from_pb(ship_pb2.ShipResponse(want=ship_pb2.Want(block_indices=range((1 << 16) + 1))))
