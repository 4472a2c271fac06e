"""One Ship call at the prefill worker: the real `ShipSender` in a shell like `kvtransfer.sending_end`.

Blocks are read when they are written to the stream, one after the other, which may be well after the sender decided to
send them. Some arrive damaged or twice, because this shell makes it so.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import Cancelled, KvferryError, Unavailable
from kvtransfer.frames import cut_block
from kvtransfer.messages import BlockFrame, Commit, CommitAck, Nack, Offer, Region, Want
from kvtransfer.sender import (
    SendBlock,
    SendCommit,
    SenderAction,
    SendOffer,
    ShipFailed,
    ShipFinished,
    ShipSender,
    ShipSummary,
)
from tests.simulation.network import Life, Network
from tests.simulation.receipt import MAX_FRAME_BYTES

ReadBlock = Callable[[int, int], bytes | memoryview]
"""`read(block_index, num_tokens)`: the whole slab, slots beyond `num_tokens` zeroed."""

SecureBlocks = Callable[[Callable[[], None]], None]
"""`secure(done)`: calls `done` when the blocks are there and stay, perhaps at once."""


@dataclass(frozen=True, slots=True)
class FrameFaults:
    """How often block frames suffer.

    Attributes:
        corrupt_probability: that a byte of a frame is flipped on the way.
        duplicate_probability: that a frame arrives twice.
    """

    corrupt_probability: float = 0.0
    duplicate_probability: float = 0.0


class Shipment:
    """Drives one sending end.

    Args:
        life: the prefill worker's process.
        network: what lies between.
        address: the decode worker.
        offer: what there is to ship.
        secure: called before anything is read.
        read: reads the sequence's blocks.
        faults: what happens to frames.
        on_shipped: told the summary after the acknowledgement.
        on_failed: told why there will be none.
    """

    def __init__(
        self,
        life: Life,
        network: Network,
        address: str,
        offer: Offer,
        *,
        secure: SecureBlocks,
        read: ReadBlock,
        faults: FrameFaults,
        on_shipped: Callable[[ShipSummary], None],
        on_failed: Callable[[KvferryError], None],
    ) -> None:
        self._life = life
        self._network = network
        self._secure = secure
        self._read = read
        self._faults = faults
        self._on_shipped = on_shipped
        self._on_failed = on_failed
        self._sender = ShipSender(offer)
        self._outbox: deque[SenderAction] = deque()
        self._corrupted: set[int] = set()
        self._is_over = False
        self._end = network.connect(life, address, "ship", self, offer.id.seq_id)
        self._take(self._sender.start())

    def on_message(self, message: object) -> None:
        assert isinstance(message, Want | Nack | CommitAck)
        if isinstance(message, Want) and message.block_indices and not self._is_over:
            self._secure(lambda: self._tell(message))
        else:
            self._tell(message)

    def _tell(self, message: Want | Nack | CommitAck) -> None:
        if not self._is_over:
            self._take(self._sender.on_message(message))

    def on_end(self, error: KvferryError | None) -> None:
        self._fail(error or Unavailable("the receiver ended the shipment before its acknowledgement"))

    def on_tokens_computed(self, num_tokens: int) -> None:
        if not self._is_over:
            self._take(self._sender.on_tokens_computed(num_tokens))

    def on_first_tokens(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        if not self._is_over:
            self._take(self._sender.on_first_token(token_ids, logprobs))

    def leave(self) -> None:
        """Nothing is read or sent any more; the receiver learns it unless it has acknowledged."""
        self._is_over = True
        self._outbox.clear()
        self._end.close(Cancelled("the sender cancelled the shipment"), is_abrupt=True)

    def _take(self, actions: list[SenderAction]) -> None:
        for action in actions:
            if self._is_over:
                return
            if isinstance(action, ShipFailed):
                self._fail(action.error)
            elif isinstance(action, ShipFinished):
                self.leave()
                self._on_shipped(action.summary)
            else:
                self._outbox.append(action)
                if len(self._outbox) == 1:
                    self._schedule_write()

    def _fail(self, error: KvferryError) -> None:
        if not self._is_over:
            self.leave()
            self._on_failed(error)

    def _schedule_write(self) -> None:
        world = self._life.world
        delay_ns = 0 if world.happens(0.8) else world.below(1_000_000)
        self._life.after(delay_ns, self._write)

    def _write(self) -> None:
        """Writes what waits, all of it or only the first."""
        while self._outbox:
            self._write_one(self._outbox.popleft())
            if self._outbox and self._life.world.happens(0.2):
                self._schedule_write()
                return

    def _write_one(self, action: SenderAction) -> None:
        match action:
            case SendOffer(offer=offer):
                self._end.send(offer)
            case SendBlock(block_index=block_index, num_tokens=num_tokens):
                self._write_block(block_index, num_tokens)
            case SendCommit(first_token_ids=first_token_ids, first_logprobs=first_logprobs):
                self._end.send(Commit(self._sender.offer.id, first_token_ids, first_logprobs))

    def _write_block(self, block_index: int, num_tokens: int) -> None:
        self._life.world.counts["blocks shipped"] += 1
        for frame in cut_block(
            self._read(block_index, num_tokens),
            id=self._sender.offer.id,
            block_index=block_index,
            num_tokens=num_tokens,
            max_frame_bytes=MAX_FRAME_BYTES,
        ):
            self._write_frame(frame)

    def _write_frame(self, frame: BlockFrame) -> None:
        world = self._life.world
        assert not isinstance(frame.payload, Region), "payloads travel in messages here"
        payload = bytes(frame.payload)  # the message is made now, whatever becomes of the block
        if world.random() < self._faults.corrupt_probability:
            payload = self._corrupt(frame.block_index, payload)
        frame = dataclasses.replace(frame, payload=payload)
        self._end.send(frame)
        if world.random() < self._faults.duplicate_probability:
            world.counts["frames doubled"] += 1
            self._network.blame(self._end.tag, f"a frame of block {frame.block_index} arrives twice", is_link=True)
            self._end.send(frame)

    def _corrupt(self, block_index: int, contents: bytes) -> bytes:
        world = self._life.world
        world.counts["frames corrupted"] += 1
        world.note(self._end.tag, "a frame is corrupted, of block", block_index)
        if block_index in self._corrupted:  # once is mended by the repeat
            self._network.blame(self._end.tag, f"block {block_index} is corrupted twice", is_link=True)
        self._corrupted.add(block_index)
        payload = bytearray(contents)
        payload[world.below(len(payload))] ^= 1 << world.below(8)
        return bytes(payload)
