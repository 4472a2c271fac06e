"""Messages to protobuf and back, and what is refused before a state machine sees it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from google.protobuf.message import DecodeError

from kvferry.errors import InvalidArgument
from kvtransfer.block_frames import MAX_FRAMES
from kvtransfer.codec import (
    receiver_message_from_pb,
    receiver_message_to_pb,
    sender_message_from_bytes,
    sender_message_from_pb,
    sender_message_to_bytes,
    sender_message_to_pb,
)
from kvtransfer.messages import (
    Alive,
    BlockFrame,
    Commit,
    CommitAck,
    Credit,
    Nack,
    ReceiverMessage,
    Region,
    SenderMessage,
    StagedFrames,
    Want,
)
from proto.kvferry.v1 import ship_pb2
from tests.unit.kvtransfer.support import ATTEMPT, LAYOUT, frames_of, make_offer


def staged_frame(block_index: int = 0, offset: int = 64, num_bytes: int = 128) -> BlockFrame:
    return dataclasses.replace(frames_of(block_index)[0], payload=Region(offset, num_bytes))


@pytest.mark.parametrize(
    "message",
    [
        make_offer(),
        dataclasses.replace(make_offer(), link_id=2**64 - 1),
        dataclasses.replace(make_offer(), layout=dataclasses.replace(LAYOUT, wire_version=1, rope_digest="theta 4")),
        frames_of(0)[0],
        *frames_of(1, max_frame_bytes=100),
        StagedFrames((staged_frame(),)),
        StagedFrames((staged_frame(3, 2**64 - 1, 2**32 - 1), dataclasses.replace(staged_frame(4), digest=b""))),
        Commit(ATTEMPT, (0, 9)),
        Commit(ATTEMPT, (0, 9), (-1.5, -0.25)),
        Alive(),
    ],
)
def test_sender_messages_survive_the_wire(message: SenderMessage) -> None:
    wire = sender_message_to_bytes(message)
    assert sender_message_from_bytes(wire) == message
    assert sender_message_from_pb(ship_pb2.ShipRequest.FromString(wire)) == message


@pytest.mark.parametrize(
    "message",
    [Want((0, 3)), Want(()), Nack(2), Credit(0), Credit(2**32 - 1), CommitAck(True), CommitAck(False), Alive()],
)
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
    frame = ship_pb2.ShipRequest.FromString(sender_message_to_bytes(frames_of(0)[0]))
    frame.block.payload, frame.block.digest = payload, digest
    return frame


def with_staged(num_frames: int, **changes: object) -> ship_pb2.ShipRequest:
    message = sender_message_to_pb(StagedFrames((staged_frame(),) * num_frames))
    for name, value in changes.items():
        setattr(message.staged.frames[-1], name, value)
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
        (with_offer("progress_timeout_s", 0.09), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", 1e-300), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", 3601.0), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", math.nan), "offer.progress_timeout_s"),
        (with_offer("progress_timeout_s", math.inf), "offer.progress_timeout_s"),
        (without_layout(), "layout.dtype"),
        (with_hashes(bytes(32), bytes(31)), "offer.block_hashes"),
        (with_hashes(bytes(32)), "offer.block_hashes"),
        (with_frame(b"", bytes(16)), "block.payload"),
        (with_frame(b"x", bytes(15)), "block.digest"),
        (ship_pb2.ShipRequest(block={}), "id.request_id"),
        (ship_pb2.ShipRequest(staged={}), "id.request_id"),
        (ship_pb2.ShipRequest(staged=ship_pb2.StagedFrames(id=offer_pb().offer.id)), "staged.frames"),
        (with_staged(MAX_FRAMES + 1), "staged.frames"),
        (with_staged(2, num_bytes=0), "staged.frames.payload"),
        (with_staged(2, digest=bytes(17)), "staged.frames.digest"),
        (ship_pb2.ShipRequest(commit=ship_pb2.Commit(id=offer_pb().offer.id)), "commit.first_token_ids"),
        (ship_pb2.ShipRequest(commit=ship_pb2.Commit(first_token_ids=[1])), "id.request_id"),
    ],
)
def test_malformed_messages_name_the_field(message: ship_pb2.ShipRequest, field: str) -> None:
    for parse in (sender_message_from_pb, lambda message: sender_message_from_bytes(message.SerializeToString())):
        with pytest.raises(InvalidArgument) as caught:
            parse(message)
        assert caught.value.field == field


def test_empty_answer_is_malformed() -> None:
    with pytest.raises(InvalidArgument):
        receiver_message_from_pb(ship_pb2.ShipResponse())


def test_huge_want_is_malformed() -> None:
    with pytest.raises(InvalidArgument):
        receiver_message_from_pb(ship_pb2.ShipResponse(want=ship_pb2.Want(block_indices=range((1 << 16) + 1))))


def test_bytes_that_are_no_message_are_said_to_be_none() -> None:
    for data in (b"\x0a\xff", b"\x12\x05\x22\x02", b"\xff" * 20, sender_message_to_bytes(make_offer())[:-1]):
        with pytest.raises(DecodeError):
            sender_message_from_bytes(data)


def test_a_message_of_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="unknown to this version"):
        sender_message_from_bytes(b"\x7a\x03new")
