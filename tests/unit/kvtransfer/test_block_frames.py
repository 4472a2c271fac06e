"""The short way of a block frame to and from bytes says what the protobuf library says, or leaves it to the library."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.errors import InvalidArgument
from kvtransfer.block_frames import MAX_FRAMES, FrameParts, join_block_frames, split_block_frames
from kvtransfer.codec import sender_message_from_bytes, sender_message_from_pb, sender_message_to_bytes
from kvtransfer.messages import BlockFrame, BlockFrames, SenderMessage
from proto.kvferry.v1 import ship_pb2, worker_pb2
from tests.unit.kvtransfer.support import frames_of

FRAME_BYTES = sender_message_to_bytes(frames_of(0)[0])


@st.composite
def headers(draw: st.DrawFn) -> ship_pb2.BlockFrame:
    """Any frame but its payload; fields at their defaults are not written."""
    header = ship_pb2.BlockFrame(
        block_index=draw(st.integers(0, 2**32 - 1) | st.integers(0, 3)),
        offset=draw(st.integers(0, 2**64 - 1) | st.integers(0, 3)),
        digest=draw(st.binary(max_size=20)),
        num_tokens=draw(st.integers(0, 2**32 - 1) | st.integers(0, 3)),
    )
    if draw(st.booleans()):
        name, attempt = draw(st.text(max_size=300)), draw(st.integers(0, 2**32 - 1))
        header.id.CopyFrom(worker_pb2.AttemptId(request_id=name, attempt=attempt))
    return header


payloads = st.binary(max_size=400) | st.sampled_from([127, 128, 16_383, 16_384, 70_000]).map(bytes)


def whole(header: ship_pb2.BlockFrame, payload: bytes) -> ship_pb2.ShipRequest:
    message = ship_pb2.ShipRequest(block=header)
    message.block.payload = payload
    return message


@given(headers(), payloads)
def test_joining_is_what_any_parser_reads(header: ship_pb2.BlockFrame, payload: bytes) -> None:
    for form in (payload, memoryview(payload), memoryview(b"<" + payload + b">")[1:-1]):
        data = join_block_frames([FrameParts(header, form)])
        assert ship_pb2.ShipRequest.FromString(data) == whole(header, payload)


@given(headers(), payloads)
def test_splitting_undoes_joining_and_copies_nothing(header: ship_pb2.BlockFrame, payload: bytes) -> None:
    data = join_block_frames([FrameParts(header, payload)])
    split = split_block_frames(data)
    assert split is not None and split.is_single
    (parts,) = split.frames
    assert parts.header == header and parts.payload == payload
    assert isinstance(parts.payload, memoryview) and parts.payload.obj is data


@given(st.lists(st.tuples(headers(), payloads), min_size=2, max_size=5))
def test_several_frames_in_one_message(frames: list[tuple[ship_pb2.BlockFrame, bytes]]) -> None:
    data = join_block_frames([FrameParts(*frame) for frame in frames])
    message = ship_pb2.ShipRequest()
    for header, payload in frames:
        message.blocks.add(payload=payload).MergeFrom(header)
    assert ship_pb2.ShipRequest.FromString(data) == message
    split = split_block_frames(data)
    assert split is not None and not split.is_single
    assert [(parts.header, bytes(parts.payload)) for parts in split.frames] == frames


def test_several_frames_are_read_as_the_library_reads_them() -> None:
    message = BlockFrames((*frames_of(0), *frames_of(1), *frames_of(2)))
    data = sender_message_to_bytes(message)
    assert verdict(sender_message_from_bytes, data) == verdict(by_the_library, data) == verdict(lambda _: message, data)
    single = b"\x32" + FRAME_BYTES[1:]  # one alone, in the field of several
    heartbeat = ship_pb2.ShipRequest(heartbeat={}).SerializeToString()
    for odd in (single, data + heartbeat, heartbeat + data, data + FRAME_BYTES, FRAME_BYTES + data, data + b"\x32"):
        assert verdict(sender_message_from_bytes, odd) == verdict(by_the_library, odd)
    for end in range(len(data)):
        check_verdicts(data[:end])


def test_too_many_frames_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="blocks: 257 entries"):
        sender_message_from_bytes(b"\x32" + FRAME_BYTES[1:] + (b"\x32" + FRAME_BYTES[1:]) * MAX_FRAMES)


def verdict(parse: Callable[[bytes], SenderMessage], data: bytes) -> object:
    """The message, as bytes where it holds a view; or which refusal. Anything else than a refusal passes through."""
    try:
        message = parse(data)
    except DecodeError:
        return "not a message"
    except InvalidArgument as error:
        return error.message
    if isinstance(message, BlockFrame):
        return plain(message)
    if isinstance(message, BlockFrames):
        return [plain(frame) for frame in message.frames]
    return message


def plain(frame: BlockFrame) -> object:
    assert isinstance(frame.payload, (bytes, memoryview))
    return (frame.id, frame.block_index, frame.offset, bytes(frame.payload), frame.digest, frame.num_tokens)


def by_the_library(data: bytes) -> SenderMessage:
    return sender_message_from_pb(ship_pb2.ShipRequest.FromString(data))


def check_verdicts(data: bytes) -> None:
    """The same, or refused by the short way alone."""
    short, library = verdict(sender_message_from_bytes, data), verdict(by_the_library, data)
    assert short == library or isinstance(short, str), f"{short} is not {library}"


def field(number: int, value: bytes | int) -> bytes:
    """One field as any encoder writes it."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


ID = field(1, b"request") + field(2, 1)
PIECES = [field(1, ID), field(2, 5), field(3, 0), field(4, b"payload"), field(5, bytes(16)), field(6, 4)]
"""The fields of a frame."""
UNKNOWN = [
    field(7, 9),
    field(15, b"\x22\x01x"),  # looks like a payload inside
    field(16, 1),  # its tag takes two bytes
    field(4000, b"later"),
    varint(9 << 3 | 5) + bytes(4),  # fixed32
    varint(9 << 3 | 1) + bytes(8),  # fixed64
    varint(9 << 3 | 3) + varint(9 << 3 | 4),  # a group
]


@given(
    st.permutations(PIECES), st.lists(st.sampled_from(PIECES + UNKNOWN), max_size=4), st.randoms(use_true_random=False)
)
def test_other_orders_unknown_and_repeated_fields(pieces: list[bytes], more: list[bytes], dice: random.Random) -> None:
    for piece in more:
        pieces.insert(dice.randrange(len(pieces) + 1), piece)
    data = field(2, b"".join(pieces))
    library = verdict(by_the_library, data)
    assert not isinstance(library, str)
    assert verdict(sender_message_from_bytes, data) == library


@pytest.mark.parametrize("last", [PIECES[3], PIECES[3] + PIECES[3], field(4, b"a") + field(4, b"payload")])
def test_of_several_payloads_the_last_one_counts(last: bytes) -> None:
    data = field(2, b"".join(PIECES[:3]) + field(4, b"first") + PIECES[4] + PIECES[5] + last)
    assert verdict(sender_message_from_bytes, data) == verdict(by_the_library, data)
    message = sender_message_from_bytes(data)
    assert isinstance(message, BlockFrame) and message.payload == b"payload"


def test_of_several_events_the_last_one_counts() -> None:
    frame, heartbeat = FRAME_BYTES, ship_pb2.ShipRequest(heartbeat={}).SerializeToString()
    for data in (frame + heartbeat, heartbeat + frame, frame + frame):
        assert verdict(sender_message_from_bytes, data) == verdict(by_the_library, data)


def test_a_frame_cut_anywhere() -> None:
    for end in range(len(FRAME_BYTES)):
        check_verdicts(FRAME_BYTES[:end])
        check_verdicts(FRAME_BYTES[end:])
        check_verdicts(FRAME_BYTES[:end] + FRAME_BYTES[end + 1 :])


@pytest.mark.parametrize("num_extra", range(1, 10))
def test_lengths_written_longer_than_need_be(num_extra: int) -> None:
    """Encoders may do so; a parser must not read something else then."""
    inner = b"".join(PIECES[:3]) + PIECES[5] + field(5, bytes(16))
    long_payload = b"\x22" + padded(7, num_extra) + b"payload"
    check_verdicts(b"\x12" + varint(len(inner) + len(long_payload)) + inner + long_payload)
    check_verdicts(b"\x12" + padded(len(inner) + 9, num_extra) + inner + PIECES[3])
    long_index = b"\x10" + padded(5, num_extra)
    inner = PIECES[0] + long_index + PIECES[5] + PIECES[4] + PIECES[3]
    check_verdicts(field(2, inner))


def padded(value: int, num_extra: int) -> bytes:
    """A varint with bytes that add nothing."""
    return bytes((value | 0x80, *[0x80] * (num_extra - 1), 0x00))


@given(st.binary(max_size=60))
@example(b"\x12\x00")
@example(b"\x12\x02\x22\x00")
@example(b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00")
def test_any_bytes(data: bytes) -> None:
    check_verdicts(data)
    check_verdicts(b"\x12" + varint(len(data)) + data)


@given(st.randoms(use_true_random=False))
def test_mutated_frames(dice: random.Random) -> None:
    for _ in range(20):
        data = bytearray(FRAME_BYTES)
        for _ in range(dice.randrange(1, 5)):
            place = dice.randrange(min(len(data), 60)) if dice.random() < 0.8 else dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    data[place] ^= 1 << dice.randrange(8)
                case 1:
                    data[place] = dice.choice([0x00, 0x7F, 0x80, 0xFF, 0x12, 0x22])
                case 2:
                    del data[place]
                case 3:
                    data.insert(place, dice.randrange(256))
        check_verdicts(bytes(data))


def test_a_frame_of_millions_of_fields_is_left_to_the_library() -> None:
    """Looked at one by one they would hold the event loop for seconds."""
    data = field(2, field(2, 1) * 1000 + b"".join(PIECES))
    assert split_block_frames(data) is None
    assert verdict(sender_message_from_bytes, data) == verdict(by_the_library, data)
