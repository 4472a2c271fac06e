"""Messages of a shipment to and from protobuf. What a peer sent is checked here, before any state machine sees it.

A message that could never be right raises InvalidArgument naming the field; it ends the one stream it came on. Whether
a well-formed message is right at its place is the state machines' question.

Block frames take a shorter way to and from the same bytes: the library would copy a payload twice on each side, here it
is copied once when sent and not at all when received (`block_frames.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.block_digest import DIGEST_BYTES
from kvferry.block_hash import HASH_BYTES
from kvferry.errors import InvalidArgument
from kvferry.spec import AttemptId
from kvferry.wire import attempt_from_pb, attempt_to_pb, layout_from_pb, layout_to_pb
from kvferry.worker import check_progress_timeout
from kvtransfer.block_frames import MAX_FRAMES, FrameParts, join_block_frames, split_block_frames
from kvtransfer.messages import (
    Alive,
    BlockFrame,
    BlockFrames,
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
from proto.kvferry.v1 import ship_pb2, worker_pb2

MAX_REQUEST_ID_CHARS = 256
MAX_BLOCKS = 1 << 16
"""Most blocks of a shipment: a million tokens in blocks of 16; their hashes still fit a gRPC message."""
MAX_FIRST_TOKENS = 1024


def sender_message_to_bytes(message: SenderMessage) -> bytes:
    """Serialized ShipRequest."""
    if isinstance(message, BlockFrame):
        return join_block_frames([_frame_parts(message)])
    if isinstance(message, BlockFrames):
        return join_block_frames([_frame_parts(frame) for frame in message.frames])
    return sender_message_to_pb(message).SerializeToString()


def sender_message_from_bytes(data: bytes) -> SenderMessage:
    """Parses a ShipRequest. Raises InvalidArgument for a malformed message, DecodeError for bytes that are none."""
    split = split_block_frames(data)
    if split is not None:
        frames = tuple(_frame_from_pb(parts.header, parts.payload) for parts in split.frames)
        return frames[0] if split.is_single else BlockFrames(frames)
    return sender_message_from_pb(ship_pb2.ShipRequest.FromString(data))


def sender_message_to_pb(message: Offer | StagedFrames | Commit | Alive) -> ship_pb2.ShipRequest:
    """Message from sender to receiver."""
    match message:
        case Offer():
            return ship_pb2.ShipRequest(offer=_offer_to_pb(message))
        case StagedFrames():
            return ship_pb2.ShipRequest(staged=_staged_to_pb(message))
        case Commit():
            return ship_pb2.ShipRequest(commit=_commit_to_pb(message))
        case Alive():
            return ship_pb2.ShipRequest(heartbeat=worker_pb2.Heartbeat())


def sender_message_from_pb(message: ship_pb2.ShipRequest) -> SenderMessage:
    """Raises InvalidArgument for a malformed message."""
    if message.blocks:
        return _frames_from_pb(message)
    match message.WhichOneof("event"):
        case "offer":
            return _offer_from_pb(message.offer)
        case "block":
            return _frame_from_pb(message.block, message.block.payload)
        case "staged":
            return _staged_from_pb(message.staged)
        case "commit":
            return _commit_from_pb(message.commit)
        case "heartbeat":
            return Alive()
        case _:
            raise InvalidArgument("event", "not set, or unknown to this version")


def receiver_message_to_pb(message: ReceiverMessage) -> ship_pb2.ShipResponse:
    """Message from receiver to sender."""
    match message:
        case Want():
            return ship_pb2.ShipResponse(want=ship_pb2.Want(block_indices=message.block_indices))
        case Nack():
            return ship_pb2.ShipResponse(nack=ship_pb2.Nack(block_index=message.block_index))
        case Credit():
            return ship_pb2.ShipResponse(credit=ship_pb2.Credit(num_frames=message.num_frames))
        case CommitAck():
            return ship_pb2.ShipResponse(commit_ack=ship_pb2.CommitAck(already_committed=message.already_committed))
        case Alive():
            return ship_pb2.ShipResponse(heartbeat=worker_pb2.Heartbeat())


def receiver_message_from_pb(message: ship_pb2.ShipResponse) -> ReceiverMessage:
    """Raises InvalidArgument for a malformed message."""
    match message.WhichOneof("event"):
        case "want":
            indices: Sequence[int] = message.want.block_indices
            _check_range("want.block_indices", len(indices), 0, MAX_BLOCKS)
            return Want(tuple(indices))
        case "nack":
            return Nack(message.nack.block_index)
        case "credit":
            return Credit(message.credit.num_frames)
        case "commit_ack":
            return CommitAck(message.commit_ack.already_committed)
        case "heartbeat":
            return Alive()
        case _:
            raise InvalidArgument("event", "not set, or unknown to this version")


def _offer_to_pb(offer: Offer) -> ship_pb2.Offer:
    return ship_pb2.Offer(
        id=attempt_to_pb(offer.id),
        receiver_epoch=offer.receiver_epoch,
        layout=layout_to_pb(offer.layout),
        block_hashes=offer.block_hashes,
        num_tokens=offer.num_tokens,
        progress_timeout_s=offer.progress_timeout_s,
        link_id=offer.link_id,
    )


def _offer_from_pb(message: ship_pb2.Offer) -> Offer:
    offer = Offer(
        id=_id_from_pb(message.id),
        receiver_epoch=message.receiver_epoch,
        layout=layout_from_pb(message.layout),
        block_hashes=tuple(message.block_hashes),
        num_tokens=message.num_tokens,
        progress_timeout_s=message.progress_timeout_s,
        link_id=message.link_id,
    )
    _check_range("offer.num_tokens", offer.num_blocks, 1, MAX_BLOCKS, unit=" blocks of tokens")
    num_full_blocks = offer.num_tokens // offer.layout.block_size
    _check_range("offer.block_hashes", len(offer.block_hashes), num_full_blocks, num_full_blocks)
    if any(len(block_hash) != HASH_BYTES for block_hash in offer.block_hashes):
        raise InvalidArgument("offer.block_hashes", f"a hash has {HASH_BYTES} bytes")
    check_progress_timeout("offer.progress_timeout_s", offer.progress_timeout_s)
    return offer


def _frame_parts(frame: BlockFrame) -> FrameParts:
    assert not isinstance(frame.payload, Region), "staged payloads travel in StagedFrames"
    header = ship_pb2.BlockFrame(
        id=attempt_to_pb(frame.id),
        block_index=frame.block_index,
        offset=frame.offset,
        digest=frame.digest,
        num_tokens=frame.num_tokens,
    )
    return FrameParts(header, frame.payload)


def _frames_from_pb(message: ship_pb2.ShipRequest) -> BlockFrames:
    if message.WhichOneof("event") is not None:
        raise InvalidArgument("blocks", "set together with an event")
    _check_range("blocks", len(message.blocks), 1, MAX_FRAMES)
    return BlockFrames(tuple(_frame_from_pb(frame, frame.payload) for frame in message.blocks))


def _frame_from_pb(message: ship_pb2.BlockFrame, payload: bytes | memoryview) -> BlockFrame:
    frame = BlockFrame(
        id=_id_from_pb(message.id),
        block_index=message.block_index,
        offset=message.offset,
        payload=payload,
        digest=message.digest,
        num_tokens=message.num_tokens,
    )
    _check_frame("block", frame)
    return frame


def _staged_to_pb(message: StagedFrames) -> ship_pb2.StagedFrames:
    return ship_pb2.StagedFrames(
        id=attempt_to_pb(message.frames[0].id), frames=[_staged_frame_to_pb(frame) for frame in message.frames]
    )


def _staged_frame_to_pb(frame: BlockFrame) -> ship_pb2.StagedFrame:
    assert isinstance(frame.payload, Region), "payloads of StagedFrames are staged"
    return ship_pb2.StagedFrame(
        block_index=frame.block_index,
        offset=frame.offset,
        staging_offset=frame.payload.offset,
        num_bytes=frame.payload.num_bytes,
        digest=frame.digest,
        num_tokens=frame.num_tokens,
    )


def _staged_from_pb(message: ship_pb2.StagedFrames) -> StagedFrames:
    attempt_id = _id_from_pb(message.id)
    _check_range("staged.frames", len(message.frames), 1, MAX_FRAMES)
    frames = tuple(
        BlockFrame(
            id=attempt_id,
            block_index=frame.block_index,
            offset=frame.offset,
            payload=Region(frame.staging_offset, frame.num_bytes),
            digest=frame.digest,
            num_tokens=frame.num_tokens,
        )
        for frame in message.frames
    )
    for frame in frames:
        _check_frame("staged.frames", frame)
    return StagedFrames(frames)


def _check_frame(field: str, frame: BlockFrame) -> None:
    if not len(frame.payload):
        raise InvalidArgument(f"{field}.payload", "empty")
    if len(frame.digest) not in (0, DIGEST_BYTES):
        raise InvalidArgument(f"{field}.digest", f"{len(frame.digest)} bytes, {DIGEST_BYTES} or none allowed")


def _commit_to_pb(commit: Commit) -> ship_pb2.Commit:
    return ship_pb2.Commit(
        id=attempt_to_pb(commit.id), first_token_ids=commit.first_token_ids, first_logprobs=commit.first_logprobs
    )


def _commit_from_pb(message: ship_pb2.Commit) -> Commit:
    commit = Commit(_id_from_pb(message.id), tuple(message.first_token_ids), tuple(message.first_logprobs))
    num_tokens = len(commit.first_token_ids)
    _check_range("commit.first_token_ids", num_tokens, 1, MAX_FIRST_TOKENS)
    if commit.first_logprobs:
        _check_range("commit.first_logprobs", len(commit.first_logprobs), num_tokens, num_tokens)
    if any(not math.isfinite(logprob) for logprob in commit.first_logprobs):
        raise InvalidArgument("commit.first_logprobs", "not finite")
    return commit


def _id_from_pb(message: worker_pb2.AttemptId) -> AttemptId:
    _check_range("id.request_id", len(message.request_id), 1, MAX_REQUEST_ID_CHARS, unit=" characters")
    return attempt_from_pb(message)


def _check_range(field: str, count: int, low: int, high: int, *, unit: str = " entries") -> None:
    if not low <= count <= high:
        allowed = str(low) if low == high else f"{low} … {high}"
        raise InvalidArgument(field, f"{count}{unit}, {allowed} allowed")
