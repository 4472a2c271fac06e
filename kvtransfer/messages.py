"""Messages of one shipment as plain values; `codec.py` turns them into protobuf and back.

From the sender: Offer, then BlockFrame or StagedFrames … for the wanted blocks, then Commit. From the receiver: Want,
Nack for a block that arrived wrong, Credit for staged payloads that were taken, CommitAck. Alive from either side says
only that its process works.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kv_layout import KvLayout
from kvferry.spec import AttemptId


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is to ship.

    Attributes:
        receiver_epoch: life of the receiving process, from its `Registered`.
        block_hashes: hashes of the full blocks, in order; a partial last block has none.
        num_tokens: tokens whose KV is shipped, at least 1.
        progress_timeout_s: the longest silence either side bears; each side gives at least three signs of life in it.
        link_id: the link whose staging segment payloads may lie in; 0 for none.
    """

    id: AttemptId
    receiver_epoch: int
    layout: KvLayout
    block_hashes: tuple[bytes, ...]
    num_tokens: int
    progress_timeout_s: float
    link_id: int = 0

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks_for(self.num_tokens)

    @property
    def has_partial_block(self) -> bool:
        return self.num_tokens % self.layout.block_size != 0

    def num_tokens_in(self, block_index: int) -> int:
        """Filled slots of a block: the block size, or fewer in a partial last one."""
        return min(self.layout.block_size, self.num_tokens - block_index * self.layout.block_size)


@dataclass(frozen=True, slots=True)
class Region:
    """A payload's place in a staging segment."""

    offset: int
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """A block or a piece of one; pieces come in order and without gaps.

    Attributes:
        offset: where in the block the piece begins, in bytes.
        payload: the bytes, or where they lie on their way from one end to the other.
        digest: xxh3-128 of the whole block on its last piece, empty on the others.
        num_tokens: filled slots of the block; the other slots are zero.
    """

    id: AttemptId
    block_index: int
    offset: int
    payload: bytes | memoryview | Region
    digest: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockFrames:
    """Several frames in one message: what a message costs is shared."""

    frames: tuple[BlockFrame, ...]


@dataclass(frozen=True, slots=True)
class StagedFrames:
    """Frames whose payloads lie in the staging segment: many in one message, which is then small."""

    frames: tuple[BlockFrame, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Every wanted block was sent; the sequence may run.

    Attributes:
        first_token_ids: sampled by the sender, one a choice; for beam search the most likely ones, best first.
        first_logprobs: for beam search, of those tokens.
    """

    id: AttemptId
    first_token_ids: tuple[int, ...]
    first_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Want:
    """Room is reserved; `block_indices` are the blocks the receiver lacks, ascending."""

    block_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """The digest of what was written differs: this block again."""

    block_index: int


@dataclass(frozen=True, slots=True)
class Credit:
    """The payloads of the `num_frames` oldest staged frames were taken: their places may be used again."""

    num_frames: int


@dataclass(frozen=True, slots=True)
class CommitAck:
    """The sequence runs. `already_committed`: it did before this shipment, which changed nothing."""

    already_committed: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life; carries no progress."""


SenderMessage = Offer | BlockFrame | BlockFrames | StagedFrames | Commit | Alive
ReceiverMessage = Want | Nack | Credit | CommitAck | Alive
