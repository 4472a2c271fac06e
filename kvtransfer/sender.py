"""The sending end of a shipment as a state machine: inputs in, actions out; no sockets, threads or clock.

    start ─► OFFERED ── Want ─► SHIPPING ── first token known, all sent ─► COMMITTING ── CommitAck ─► DONE
                │                   │ Nack: that block once more                 │ Nack: the same
                └───────────────────┴──────────────── FAILED ◄───────────────────┘

A block leaves as soon as it is wanted and full, while later chunks are still being computed; the partial last block and
the Commit leave when the first token is known. Every input after the end is ignored.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.errors import Cancelled, DataLoss, FailedPrecondition, Internal, KvferryError
from kvtransfer.messages import Alive, CommitAck, Credit, Nack, Offer, ReceiverMessage, Want


@dataclass(frozen=True, slots=True)
class ShipSummary:
    """What a shipment did.

    Attributes:
        num_blocks_shipped: blocks that crossed the wire, each counted once.
        num_blocks_reused: blocks the receiver already held.
        shipped_bytes: contents of the blocks sent, repeats included.
        num_nacks: blocks that had to be sent again.
        already_committed: the attempt had been committed before; this shipment changed nothing.
        ship_s: first block (or Commit) to acknowledgement; filled in by the transport, which has a clock.
    """

    num_blocks_shipped: int = 0
    num_blocks_reused: int = 0
    shipped_bytes: int = 0
    num_nacks: int = 0
    already_committed: bool = False
    ship_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Send the offer."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Read this block and send all its frames."""

    block_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send the commit."""

    first_token_ids: tuple[int, ...]
    first_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ShipFinished:
    """The receiver acknowledged; the shipment is complete."""

    summary: ShipSummary


@dataclass(frozen=True, slots=True)
class ShipFailed:
    """The shipment is over without a commit that we know of."""

    error: KvferryError


SenderAction = SendOffer | SendBlock | SendCommit | ShipFinished | ShipFailed


class SenderState(enum.Enum):
    """Where a sending end stands."""

    NEW = "new"
    OFFERED = "offered"
    SHIPPING = "shipping"
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"


class ShipSender:
    """Decides what one shipment sends and when. Actions must be carried out in the order they are returned."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self._state = SenderState.NEW
        self._num_computed_tokens = 0
        self._first_token_ids: tuple[int, ...] = ()
        self._first_logprobs: tuple[float, ...] = ()
        self._wanted: tuple[int, ...] | None = None  # None until the Want came
        self._pending: deque[int] = deque()  # wanted and not sent, ascending; at most the offered blocks
        self._sent: set[int] = set()
        self._nacked: set[int] = set()
        self._unsound_block: int | None = None
        self._num_sends = 0
        self._already_committed = False

    @property
    def state(self) -> SenderState:
        return self._state

    @property
    def unsound_block(self) -> int | None:
        """The block that arrived wrong, and whose repeat did: the sender's own copy may be the wrong one."""
        return self._unsound_block

    @property
    def summary(self) -> ShipSummary:
        """What was done so far; also meaningful after a failure."""
        return ShipSummary(
            num_blocks_shipped=len(self._sent),
            num_blocks_reused=0 if self._wanted is None else self.offer.num_blocks - len(self._wanted),
            shipped_bytes=self._num_sends * self.offer.layout.block_bytes,
            num_nacks=len(self._nacked),
            already_committed=self._already_committed,
        )

    def start(self) -> list[SenderAction]:
        """Opens the shipment; called once."""
        assert self._state is SenderState.NEW, "a shipment starts once"
        self._state = SenderState.OFFERED
        return [SendOffer(self.offer)]

    def on_message(self, message: ReceiverMessage) -> list[SenderAction]:
        """Takes a message of the receiver."""
        if self._is_over or isinstance(message, Alive | Credit):  # credit is the lane's
            return []
        if isinstance(message, Want):
            return self._on_want(message.block_indices)
        if isinstance(message, Nack):
            return self._on_nack(message.block_index)
        return self._on_commit_ack(message)

    def on_tokens_computed(self, num_tokens: int) -> list[SenderAction]:
        """The KV of the first `num_tokens` tokens is in its blocks; the greatest value counts."""
        if self._is_over:
            return []
        if num_tokens > self.offer.num_tokens:
            return self._fail(Internal(f"{num_tokens} tokens computed, only {self.offer.num_tokens} offered"))
        self._num_computed_tokens = max(self._num_computed_tokens, num_tokens)
        return self._pump()

    def on_first_token(
        self, first_token_ids: Sequence[int], first_logprobs: Sequence[float] = ()
    ) -> list[SenderAction]:
        """All offered tokens are computed and these were sampled after them; called once, not empty."""
        if self._is_over:
            return []
        if self._first_token_ids or not first_token_ids:
            return self._fail(Internal("first tokens must be given once and not be empty"))
        self._num_computed_tokens = self.offer.num_tokens
        self._first_token_ids = tuple(first_token_ids)
        self._first_logprobs = tuple(first_logprobs)
        return self._pump()

    def cancel(self) -> list[SenderAction]:
        """Nothing more is wanted; the receiver frees its reservation when the stream ends."""
        return [] if self._is_over else self._fail(Cancelled(f"shipment of {self.offer.id.seq_id} was cancelled"))

    @property
    def _is_over(self) -> bool:
        return self._state in (SenderState.DONE, SenderState.FAILED)

    def _on_want(self, indices: tuple[int, ...]) -> list[SenderAction]:
        if self._state is not SenderState.OFFERED:
            return self._refuse(f"Want in state {self._state.value}")
        if any(not 0 <= index < self.offer.num_blocks for index in indices):
            return self._refuse(f"Want names a block outside 0 … {self.offer.num_blocks - 1}")
        if any(left >= right for left, right in pairwise(indices)):
            return self._refuse("Want is not strictly ascending")
        if self.offer.has_partial_block and self.offer.num_blocks - 1 not in indices:
            return self._refuse("Want lacks the partial last block, which no cache can hold")
        self._wanted = indices
        self._pending.extend(indices)
        self._state = SenderState.SHIPPING
        return self._pump()

    def _on_nack(self, block_index: int) -> list[SenderAction]:
        if block_index not in self._sent:
            return self._refuse(f"Nack of block {block_index}, which was not sent")
        if block_index in self._nacked:
            self._unsound_block = block_index
            message = f"block {block_index} of {self.offer.id.seq_id} arrived with a wrong digest twice"
            return self._fail(DataLoss(message, field=f"block[{block_index}]"))
        self._nacked.add(block_index)
        return [self._send(block_index)]

    def _on_commit_ack(self, ack: CommitAck) -> list[SenderAction]:
        allowed = [SenderState.COMMITTING, SenderState.OFFERED] if ack.already_committed else [SenderState.COMMITTING]
        if self._state not in allowed:
            return self._refuse(f"CommitAck in state {self._state.value}")
        self._already_committed = ack.already_committed
        self._state = SenderState.DONE
        return [ShipFinished(self.summary)]

    def _pump(self) -> list[SenderAction]:
        """Sends what is wanted and ready, then the Commit."""
        actions: list[SenderAction] = []
        if self._state is not SenderState.SHIPPING:
            return actions
        while self._pending and self._is_ready(self._pending[0]):
            actions.append(self._send(self._pending.popleft()))
        if self._first_token_ids:  # then everything wanted was ready
            self._state = SenderState.COMMITTING
            actions.append(SendCommit(self._first_token_ids, self._first_logprobs))
        return actions

    def _is_ready(self, block_index: int) -> bool:
        if self._first_token_ids:
            return True
        return (block_index + 1) * self.offer.layout.block_size <= self._num_computed_tokens

    def _send(self, block_index: int) -> SendBlock:
        self._sent.add(block_index)
        self._num_sends += 1
        return SendBlock(block_index, self.offer.num_tokens_in(block_index))

    def _refuse(self, message: str) -> list[SenderAction]:
        return self._fail(FailedPrecondition(f"shipment of {self.offer.id.seq_id}: receiver sent {message}"))

    def _fail(self, error: KvferryError) -> list[SenderAction]:
        self._state = SenderState.FAILED
        self._pending.clear()
        return [ShipFailed(error)]
