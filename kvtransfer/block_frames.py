"""Block frames on the wire with as few copies as possible: the bytes of ShipRequest{block} or ShipRequest{blocks}.

    headers, payloads ─► join ─► tag len ( header fields ─ 0x22 len payload ) … ─► split ─► headers, views of payloads

The bytes are those of the protobuf encoding with each payload's field last, which any parser reads; frames that another
encoder wrote in another order are left to the library's parser.
Source of the encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from proto.kvferry.v1 import ship_pb2

_LENGTH_DELIMITED, _VARINT = 2, 0  # wire types
_BLOCK_TAG = ship_pb2.ShipRequest.BLOCK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_BLOCKS_TAG = ship_pb2.ShipRequest.BLOCKS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PAYLOAD_TAG = ship_pb2.BlockFrame.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_MAX_VARINT_BITS = 63
_MAX_LENGTH_BITS = 31  # the library refuses lengths that are written longer
_MAX_HEADER_FIELDS = 16
MAX_FRAMES = 256
"""Of one message; more are not looked at one by one."""


@dataclass(frozen=True, slots=True)
class FrameParts:
    """A frame: everything but the payload, and the payload, of a parsed one a view of it in the received bytes."""

    header: ship_pb2.BlockFrame
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SplitFrames:
    """The frames of a message; `is_single`: it has the one frame of `block`, not those of `blocks`."""

    frames: tuple[FrameParts, ...]
    is_single: bool


def join_block_frames(frames: Sequence[FrameParts]) -> bytes:
    """The serialized ShipRequest, one frame as `block`, several as `blocks`; payloads are copied once."""
    tag = bytes((_BLOCK_TAG if len(frames) == 1 else _BLOCKS_TAG,))
    pieces: list[bytes | memoryview] = []
    for frame in frames:
        fields = frame.header.SerializeToString()  # without a payload
        prefix = bytes((_PAYLOAD_TAG,)) + _varint(len(frame.payload))
        length = _varint(len(fields) + len(prefix) + len(frame.payload))
        pieces += (tag, length, fields, prefix, frame.payload)
    return b"".join(pieces)


def split_block_frames(data: bytes) -> SplitFrames | None:
    """The frames of a ShipRequest that has nothing else, payloads last; None for all others, malformed or not."""
    try:
        frames = tuple(_frames(data))
    except (IndexError, ValueError, DecodeError):
        return None
    is_single = data[0] == _BLOCK_TAG
    return None if is_single and len(frames) > 1 else SplitFrames(frames, is_single)


def _frames(data: bytes) -> Iterator[FrameParts]:
    """Raises IndexError, ValueError or DecodeError where a payload is not the last thing in its frame."""
    if data[0] not in (_BLOCK_TAG, _BLOCKS_TAG):
        raise ValueError("another message")
    end = 0
    for _ in range(MAX_FRAMES):
        length, begin = _read_varint(data, end + 1, _MAX_LENGTH_BITS)
        end = begin + length
        yield _frame(data, begin, end)
        if end == len(data):
            return
        if data[end] != data[0]:
            raise ValueError("something else between frames")
    raise ValueError("too many frames")


def _frame(data: bytes, begin: int, end: int) -> FrameParts:
    position = begin
    for _ in range(_MAX_HEADER_FIELDS):
        if data[position] == _PAYLOAD_TAG:
            break
        position = _skip_field(data, position)
    else:
        raise ValueError("too many fields to look at one by one")
    num_bytes, payload = _read_varint(data, position + 1, _MAX_LENGTH_BITS)
    if payload + num_bytes != end or end > len(data):
        raise ValueError("the payload is not last")
    return FrameParts(ship_pb2.BlockFrame.FromString(data[begin:position]), memoryview(data)[payload:end])


def _skip_field(data: bytes, position: int) -> int:
    if data[position] >= 0x80:
        raise ValueError("a field of a newer version")
    wire_type = data[position] & 7
    value, position = _read_varint(data, position + 1)
    if wire_type == _LENGTH_DELIMITED:
        return position + value
    if wire_type == _VARINT:
        return position
    raise ValueError("a field of another kind")


def _read_varint(data: bytes, position: int, max_bits: int = _MAX_VARINT_BITS) -> tuple[int, int]:
    """Its value, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > max_bits:
            raise ValueError("a varint that is too long")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
