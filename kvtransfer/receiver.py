"""The receiving end of a shipment as a state machine: inputs in, actions out; no sockets, threads or clock.

    Offer ─► GRANTING ── granted ─► RECEIVING ── Commit, all verified ─► COMMITTING ── committed ─► DONE
                                       │ every frame is compared with the offer before a byte of it is written
                                       │ wrong digest: Nack, and the block's frames are taken again from 0

Whatever does not fit fails this one shipment: FAILED_PRECONDITION for what contradicts the offer or the order,
INVALID_ARGUMENT for what could never be right. Every input after the end is ignored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.block_digest import DIGEST_BYTES
from kvferry.errors import DataLoss, FailedPrecondition, Internal, InvalidArgument, KvferryError, Unavailable
from kvferry.kv_layout import KvLayout
from kvferry.spec import AttemptId
from kvtransfer.frames import MAX_FRAME_BYTES
from kvtransfer.messages import BlockFrame, BlockFrames, Commit, Offer, Region, SenderMessage, StagedFrames

MAX_NACKS_PER_BLOCK = 2
"""One repeat; the second Nack tells the sender that its own copy is bad, and closes the block."""


@dataclass(frozen=True, slots=True)
class RequestGrant:
    """Ask the host to reserve room for this."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class SendWant:
    """Tell the sender what is lacking."""

    block_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """Write this piece into the reserved block."""

    block_index: int
    offset: int
    payload: bytes | memoryview | Region


@dataclass(frozen=True, slots=True)
class VerifyBlock:
    """The block is complete: compare the digest of what was written, answer with `on_block_written`."""

    block_index: int
    digest: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SendNack:
    """Ask for this block again."""

    block_index: int


@dataclass(frozen=True, slots=True)
class CommitSequence:
    """Everything is verified: let the sequence run, answer with `on_committed`."""

    first_token_ids: tuple[int, ...]
    first_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SendCommitAck:
    """Tell the sender that the sequence runs."""

    already_committed: bool


@dataclass(frozen=True, slots=True)
class ReceiveFinished:
    """The shipment is complete."""


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The shipment is over; what was reserved must be released."""

    error: KvferryError


ReceiverAction = (
    RequestGrant
    | SendWant
    | WriteFrame
    | VerifyBlock
    | SendNack
    | CommitSequence
    | SendCommitAck
    | ReceiveFinished
    | ReceiveFailed
)


class ReceiverState(enum.Enum):
    """Where a receiving end stands."""

    NEW = "new"
    GRANTING = "granting"
    RECEIVING = "receiving"
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"


class BlockState(enum.Enum):
    """Where a wanted block stands."""

    MISSING = "missing"
    VERIFYING = "verifying"
    VERIFIED = "verified"


@dataclass(slots=True)
class _WantedBlock:
    """Progress of one wanted block."""

    state: BlockState = BlockState.MISSING
    num_bytes: int = 0  # received since offset 0
    num_nacks: int = 0


class ShipReceiver:
    """Checks everything one shipment receives. Actions must be carried out in the order they are returned.

    Args:
        layout: layout of the receiver's pool; the offer's must equal it.
        epoch: life of this process; the offer's must equal it.
        max_frame_bytes: largest payload taken.
    """

    def __init__(self, *, layout: KvLayout, epoch: int, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._layout = layout
        self._block_bytes = layout.block_bytes
        self._epoch = epoch
        self._max_frame_bytes = max_frame_bytes
        self._state = ReceiverState.NEW
        self._offer: Offer | None = None
        self._blocks: dict[int, _WantedBlock] = {}  # at most the offered blocks
        self._open_index: int | None = None  # the block of which some pieces are here and some are not
        self._num_unverified = 0
        self._commit: Commit | None = None

    @property
    def state(self) -> ReceiverState:
        return self._state

    @property
    def offer(self) -> Offer | None:
        return self._offer

    def on_message(self, message: SenderMessage) -> list[ReceiverAction]:
        """Takes a message of the sender."""
        if self._is_over:
            return []
        try:
            if isinstance(message, Offer):
                return self._on_offer(message)
            if isinstance(message, BlockFrame):
                return self._on_frame(message)
            if isinstance(message, BlockFrames | StagedFrames):
                return [action for frame in message.frames for action in self._on_frame(frame)]
            if isinstance(message, Commit):
                return self._on_commit(message)
            if self._offer is None:
                raise self._refusal("a heartbeat before the Offer")
            return []
        except KvferryError as error:
            return self._fail(error)

    def on_end(self) -> list[ReceiverAction]:
        """The sender will send nothing more; fine once everything is here."""
        if self._is_over or self._state is ReceiverState.COMMITTING:
            return []
        return self._fail(Unavailable(f"shipment of {self._name}: the sender ended the stream before its Commit"))

    def on_granted(self, wanted: tuple[int, ...]) -> list[ReceiverAction]:
        """The host reserved room and lacks these blocks: strictly ascending, the partial last one among them."""
        if self._is_over:
            return []
        assert self._state is ReceiverState.GRANTING, "a grant answers an offer"
        assert self._offer is not None
        num_blocks = self._offer.num_blocks
        if list(wanted) != sorted({index for index in wanted if 0 <= index < num_blocks}):
            return self._fail(Internal(f"the grant of {self._name} wants blocks that were not offered: {wanted}"))
        if self._offer.has_partial_block and num_blocks - 1 not in wanted:
            return self._fail(Internal(f"the grant of {self._name} lacks the partial last block"))
        self._blocks = {index: _WantedBlock() for index in wanted}
        self._num_unverified = len(wanted)
        self._state = ReceiverState.RECEIVING
        return [SendWant(wanted)]

    def on_refused(self, error: KvferryError) -> list[ReceiverAction]:
        """The host will not grant, or could not commit."""
        return [] if self._is_over else self._fail(error)

    def on_block_written(self, block_index: int, *, digest_ok: bool) -> list[ReceiverAction]:
        """The answer to VerifyBlock."""
        if self._is_over:
            return []
        block = self._blocks[block_index]
        assert block.state is BlockState.VERIFYING, "only a complete block is verified"
        if digest_ok:
            block.state = BlockState.VERIFIED
            self._num_unverified -= 1
            return self._commit_if_complete()
        block.state = BlockState.MISSING
        block.num_bytes = 0
        block.num_nacks += 1
        return [SendNack(block_index)]

    def on_committed(self, *, already_committed: bool) -> list[ReceiverAction]:
        """The sequence runs; also the answer to RequestGrant when this attempt had been committed before."""
        if self._is_over:
            return []
        expected = (ReceiverState.GRANTING, ReceiverState.COMMITTING)
        assert self._state in expected, "only a complete shipment commits"
        self._state = ReceiverState.DONE
        return [SendCommitAck(already_committed), ReceiveFinished()]

    @property
    def _is_over(self) -> bool:
        return self._state in (ReceiverState.DONE, ReceiverState.FAILED)

    @property
    def _name(self) -> str:
        return "an unknown attempt" if self._offer is None else self._offer.id.seq_id

    def _on_offer(self, offer: Offer) -> list[ReceiverAction]:
        if self._offer is not None:
            raise self._refusal("a second Offer")
        self._offer = offer
        differences = self._layout.differences(offer.layout)
        if differences:
            raise self._refusal(f"another layout: {'; '.join(differences)}")
        if offer.layout.wire_version > self._layout.wire_version:
            newest = self._layout.wire_version
            raise self._refusal(f"wire version: {newest} at most here, {offer.layout.wire_version} there")
        if offer.receiver_epoch != self._epoch:
            raise self._refusal(f"another epoch: {self._epoch} here, {offer.receiver_epoch} there")
        self._state = ReceiverState.GRANTING
        return [RequestGrant(offer)]

    def _on_frame(self, frame: BlockFrame) -> list[ReceiverAction]:
        offer = self._check_order(frame.id, "a block frame")
        block = self._check_block(frame, offer)
        is_last = self._check_piece(frame, block)
        block.num_bytes += len(frame.payload)
        write = WriteFrame(frame.block_index, frame.offset, frame.payload)
        if not is_last:
            self._open_index = frame.block_index
            return [write]
        self._open_index = None
        block.state = BlockState.VERIFYING
        return [write, VerifyBlock(frame.block_index, frame.digest, frame.num_tokens)]

    def _check_order(self, id: AttemptId, what: str) -> Offer:
        if self._offer is None:
            raise self._refusal(f"{what} before the Offer")
        if id != self._offer.id:
            raise self._refusal(f"{what} of another attempt, {id.seq_id}")
        if self._state is not ReceiverState.RECEIVING:
            raise self._refusal(f"{what} in state {self._state.value}")
        return self._offer

    def _check_block(self, frame: BlockFrame, offer: Offer) -> _WantedBlock:
        """The frame names a block that is wanted and not yet here."""
        index = frame.block_index
        block = self._blocks.get(index)
        if block is None:
            raise FailedPrecondition(f"shipment of {self._name}: block {index} is not wanted")
        if block.state is not BlockState.MISSING:
            raise self._refusal(f"block {index} again, which is {block.state.value}")
        if self._open_index not in (None, index):
            raise self._refusal(f"block {index} while block {self._open_index} is incomplete")
        if self._commit is not None and block.num_nacks == 0:
            raise self._refusal(f"block {index} after the Commit")
        if block.num_nacks >= MAX_NACKS_PER_BLOCK:
            raise DataLoss(f"shipment of {self._name}: block {index} arrived wrong {block.num_nacks} times")
        due = offer.num_tokens_in(index)
        if frame.num_tokens != due:
            raise self._refusal(f"block {index} with {frame.num_tokens} tokens, {due} due")
        return block

    def _check_piece(self, frame: BlockFrame, block: _WantedBlock) -> bool:
        """The piece continues the block and does not pass its end; says whether it is the last one."""
        index, num_bytes = frame.block_index, len(frame.payload)
        if not 0 < num_bytes <= self._max_frame_bytes:
            limits = f"1 … {self._max_frame_bytes} bytes"
            raise InvalidArgument("block.payload", f"block {index} has a piece of {num_bytes} bytes, {limits} allowed")
        if frame.offset != block.num_bytes:
            raise self._refusal(f"block {index} at offset {frame.offset}, {block.num_bytes} due")
        end = frame.offset + num_bytes
        if end > self._block_bytes:
            raise self._refusal(f"block {index} with {end} bytes, a block has {self._block_bytes}")
        is_last = end == self._block_bytes
        due = DIGEST_BYTES if is_last else 0
        if len(frame.digest) != due:
            raise self._refusal(f"block {index} with a digest of {len(frame.digest)} bytes, {due} due")
        return is_last

    def _on_commit(self, commit: Commit) -> list[ReceiverAction]:
        self._check_order(commit.id, "a Commit")
        if self._commit is not None:
            raise self._refusal("a second Commit")
        if not commit.first_token_ids:
            raise InvalidArgument("commit.first_token_ids", "at least one token is needed")
        for index, block in self._blocks.items():
            if block.state is BlockState.MISSING and block.num_nacks == 0:
                raise self._refusal(f"a Commit without block {index}")
        self._commit = commit
        return self._commit_if_complete()

    def _commit_if_complete(self) -> list[ReceiverAction]:
        if self._commit is None or self._num_unverified > 0:
            return []
        self._state = ReceiverState.COMMITTING
        return [CommitSequence(self._commit.first_token_ids, self._commit.first_logprobs)]

    def _refusal(self, what: str) -> FailedPrecondition:
        return FailedPrecondition(f"shipment of {self._name}: sender sent {what}")

    def _fail(self, error: KvferryError) -> list[ReceiverAction]:
        self._state = ReceiverState.FAILED
        self._blocks.clear()
        return [ReceiveFailed(error)]
