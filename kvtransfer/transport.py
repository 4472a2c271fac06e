"""What a transport must do, and the values both services hand to one.

A shipment is two state machines (`sender.py`, `receiver.py`), each driven by a shell (`sending_end.py`,
`receiving_end.py`) over a pair of message streams. A transport supplies the streams; it may move the payload of block
frames by another way than the other messages, but then

- the receiver copies a payload out of the peer's staging memory before it is verified, so that a late write of the peer
  can never change a verified block; no transport writes the pool itself;
- messages of one direction arrive in order, once, or the stream ends;
- `write` returns when the message is on its way and waits while the peer does not take it (that is the backpressure);
  it is called by one task at a time;
- `read` on the sending side raises the error with which the receiver refused, or Unavailable when the receiver is gone;
  on the receiving side it returns None when the sender will send nothing more;
- leaving a stream, in whatever way, ends it for the peer too, and leaves no task behind.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.faults import NO_FAULTS, CommittedFault, Faults, log_fault
from kvtransfer.frames import MAX_FRAME_BYTES
from kvtransfer.messages import Offer, ReceiverMessage, Region, SenderMessage
from kvtransfer.sender import ShipSender, ShipSummary
from kvtransfer.staging import UncreditedBytes


class SendingStream(Protocol):
    """The sender's end of a pair of message streams."""

    async def read(self) -> ReceiverMessage: ...

    async def write(self, message: SenderMessage) -> None: ...


class ReceivingStream(Protocol):
    """The receiver's end of a pair of message streams."""

    async def read(self) -> SenderMessage | None: ...

    @property
    def uncredited(self) -> UncreditedBytes:
        """Of the staging segment; one of its own without a segment."""
        ...

    def staged(self, region: Region) -> memoryview:
        """The payload that lies there; raises a KvferryError where none can."""
        ...

    async def write(self, message: ReceiverMessage) -> None: ...


class BlockSource(Protocol):
    """Where the sender's blocks are."""

    async def secure(self) -> None:
        """Called when the receiver wants blocks, before any is read: from its return on they stay as they are.

        Returns at once but where the blocks were given up while the shipment waited for its grant: then it returns when
        everything that was reported as computed is in blocks again. May be called more than once.
        """
        ...

    def read(self, block_index: int, num_tokens: int) -> bytes | memoryview:
        """The whole slab of a block of the sequence, slots from `num_tokens` on zeroed.

        Called for a block only after it was reported as computed, perhaps again after a Nack; the block must stay as it
        is until the shipment has ended, for it is read when its turn to be sent comes.
        """
        ...

    def digest(self, block_index: int) -> bytes | None:
        """The digest made when the block filled; None where there is none, and it is made from what is sent."""
        ...


@dataclass(frozen=True, slots=True)
class TokensComputed:
    """The KV of the first `num_tokens` tokens is in its blocks."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Everything offered is computed and these tokens were sampled after it, as in `messages.Commit`."""

    first_token_ids: tuple[int, ...]
    first_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelShipment:
    """Nothing more is wanted; `ship` raises Cancelled."""


ShipEvent = TokensComputed | FirstToken | CancelShipment


class ShipTransport(Protocol):
    """Carries one shipment after another to one receiver."""

    async def ship(self, sender: ShipSender, source: BlockSource, events: asyncio.Queue[ShipEvent]) -> ShipSummary:
        """Runs one shipment to its acknowledgement; `events` brings what the engine did meanwhile.

        Raises a KvferryError: DataLoss naming the block in `field` when its repeat was wrong too, Unavailable when the
        receiver is gone or silent, Cancelled after CancelShipment, else what the receiver refused with.
        """
        ...


def always_alive() -> bool:
    """For ends without an engine behind them."""
    return True


def untold(block_index: int) -> None:
    """For ends without a trace."""


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a sending end behaves.

    Attributes:
        max_frame_bytes: largest payload of a frame.
        is_alive: whether the engine makes progress; while it does not, no heartbeat is sent and the receiver gives up.
        faults: faults to commit on purpose.
        on_fault: told of each fault that is committed.
        on_nack: told of each block that the receiver refused.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    is_alive: Callable[[], bool] = always_alive
    faults: Faults = NO_FAULTS
    on_fault: Callable[[CommittedFault], None] = log_fault
    on_nack: Callable[[int], None] = untold


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """How a receiving end behaves.

    Attributes:
        max_frame_bytes: largest payload taken.
        is_alive: whether the engine makes progress; while it does not, no heartbeat is sent and the sender gives up.
        offer_timeout_s: how long a new stream may take to bring its Offer, which then sets the progress timeout.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    is_alive: Callable[[], bool] = always_alive
    offer_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Grant:
    """Room is reserved for the whole offer.

    Attributes:
        wanted: indices of the blocks that must be sent, strictly ascending, the partial last block always among them.
        already_committed: this attempt runs already; nothing was reserved and `wanted` is ignored.
    """

    wanted: tuple[int, ...] = ()
    already_committed: bool = False


class CommitOutcome(enum.Enum):
    """How a commit ended; both settle the reservation."""

    COMMITTED = "committed"
    ALREADY_COMMITTED = "already_committed"


class ReceiverHost(Protocol):
    """What the decode service does for one shipment. Opened by `OpenHost`, which reserves nothing.

    Any method may raise a KvferryError, which ends the shipment and is what the sender gets.
    """

    async def grant(self, offer: Offer) -> Grant:
        """Waits for room and reserves all of it in one step. May be cancelled at any time; `release` follows then."""
        ...

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        """Writes a piece into the reserved block. Ranges were checked: inside the block, in order, wanted."""
        ...

    def verify(self, block_index: int, digest: bytes, num_tokens: int) -> bool:
        """Whether the digest of the block, as it now lies in the pool, is `digest`."""
        ...

    async def commit(self, first_token_ids: tuple[int, ...], first_logprobs: tuple[float, ...]) -> CommitOutcome:
        """Lets the sequence run. If cancelled after it took effect, the `release` that follows must change nothing."""
        ...

    def release(self) -> None:
        """Frees what this host's grant reserved, also one that still waits. Called once unless `commit` returned."""
        ...


OpenHost = Callable[[Offer], ReceiverHost]
"""Finds the registration an offer belongs to; raises NotFound or FailedPrecondition when there is none."""
