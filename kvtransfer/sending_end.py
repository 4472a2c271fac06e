"""Shell of the sending end: drives a `ShipSender` over any transport's stream.

events (engine) ─┐
messages (peer) ─┴► ShipSender ─► actions ─► outbox ─► read block, cut frames ─► lane (turn and room) ─► write

Frames that found room without waiting travel in one message where the lane allows it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from contextlib import closing
from typing import Any

from kvferry.errors import Internal, Unavailable
from kvferry.rpc import HeartbeatWriter
from kvferry.tasks import run_until_first
from kvtransfer.frames import cut_block
from kvtransfer.lane import Lane
from kvtransfer.liveness import HEARTBEATS_PER_TIMEOUT, bounded_silence
from kvtransfer.messages import Alive, BlockFrame, Commit, Credit, Nack, SenderMessage, Want
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
from kvtransfer.transport import (
    BlockSource,
    CancelShipment,
    FirstToken,
    SendingStream,
    SendOptions,
    ShipEvent,
    TokensComputed,
)

PEER = "the receiver of the shipment"


async def run_sending_end(
    stream: SendingStream,
    sender: ShipSender,
    source: BlockSource,
    events: asyncio.Queue[ShipEvent],
    options: SendOptions,
    lane: Lane,
) -> ShipSummary:
    """Runs one shipment to its acknowledgement; errors as `ShipTransport.ship` says. Closes the lane."""
    with closing(lane):
        return await _SendingEnd(stream, sender, source, events, options, lane).run()


class _SendingEnd:
    def __init__(
        self,
        stream: SendingStream,
        sender: ShipSender,
        source: BlockSource,
        events: asyncio.Queue[ShipEvent],
        options: SendOptions,
        lane: Lane,
    ) -> None:
        self._lane = lane
        self._entered: list[BlockFrame] = []  # in the lane, not written; at most the lane's `max_batch_frames`
        self._stream = stream
        self._sender = sender
        self._source = source
        self._events = events
        self._options = options
        self._timeout_s = sender.offer.progress_timeout_s
        # Offer, commit, and each block at most twice (one repeat): the sender can never ask for more.
        self._outbox: asyncio.Queue[SenderAction] = asyncio.Queue(2 * sender.offer.num_blocks + 2)
        self._num_sends: Counter[int] = Counter()
        self._began_s: float | None = None
        self._has_offered = False
        self._has_stalled = False
        self._wants: asyncio.Queue[Want] = asyncio.Queue(1)  # a second one is an error, which the sender finds
        self._summary: ShipSummary | None = None
        self._writer: HeartbeatWriter[SenderMessage] = HeartbeatWriter(
            self._write,
            Alive,
            interval_s=self._timeout_s / HEARTBEATS_PER_TIMEOUT,
            stall_timeout_s=self._timeout_s,
            peer=PEER,
        )

    async def run(self) -> ShipSummary:
        self._take(self._sender.start())
        async with self._writer:
            return await run_until_first(
                self._read_loop(), self._want_loop(), self._event_loop(), self._write_loop(), self._watch_loop()
            )

    def _take(self, actions: list[SenderAction]) -> None:
        for action in actions:
            match action:
                case ShipFailed(error=error):
                    raise error
                case ShipFinished(summary=summary):
                    now_s = time.monotonic()
                    self._summary = dataclasses.replace(summary, ship_s=now_s - (self._began_s or now_s))
                case _:
                    self._outbox.put_nowait(action)

    async def _read_loop(self) -> ShipSummary:
        while self._summary is None:
            async with bounded_silence(self._timeout_s, PEER):
                message = await self._stream.read()
            if isinstance(message, Want):
                await self._wants.put(message)
            elif isinstance(message, Credit):
                self._lane.on_taken(message.num_frames)
            else:
                if isinstance(message, Nack):
                    self._options.on_nack(message.block_index)
                self._take(self._sender.on_message(message))
        return self._summary

    async def _want_loop(self) -> Any:
        """The sender learns of a Want when the blocks are secured, which may take long; messages are read meanwhile."""
        while True:
            want = await self._wants.get()
            if want.block_indices:
                await self._source.secure()
            self._take(self._sender.on_message(want))

    async def _event_loop(self) -> Any:
        while True:
            match await self._events.get():
                case TokensComputed(num_tokens=num_tokens):
                    self._take(self._sender.on_tokens_computed(num_tokens))
                case FirstToken(first_token_ids=token_ids, first_logprobs=logprobs):
                    self._take(self._sender.on_first_token(token_ids, logprobs))
                case CancelShipment():
                    self._take(self._sender.cancel())

    async def _write_loop(self) -> Any:
        while True:
            match await self._outbox.get():
                case SendOffer(offer=offer):
                    await self._writer.write(offer)
                case SendBlock(block_index=block_index, num_tokens=num_tokens):
                    await self._write_block(block_index, num_tokens)
                    if self._outbox.empty():
                        await self._flush()
                case SendCommit(first_token_ids=token_ids, first_logprobs=logprobs):
                    self._begin()
                    await self._flush()
                    await self._writer.write(Commit(self._sender.offer.id, token_ids, logprobs))

    async def _watch_loop(self) -> Any:
        """A receiver that beats but takes no payload is given up, as is one that reads no message."""
        while True:
            await asyncio.sleep(self._timeout_s / HEARTBEATS_PER_TIMEOUT)
            since_s = self._lane.untaken_since_s()
            if since_s is not None and time.monotonic() - since_s > self._timeout_s:
                raise Unavailable(f"{PEER} took nothing for {self._timeout_s:g} s")

    async def _write_block(self, block_index: int, num_tokens: int) -> None:
        self._begin()
        self._num_sends[block_index] += 1
        frames = self._frames_of(block_index, num_tokens)
        faulty = self._options.faults.apply(frames, self._num_sends[block_index])
        for fault in faulty.committed:
            self._options.on_fault(fault)
        if faulty.delay_s > 0 or faulty.stalls:
            await self._flush()
            await asyncio.sleep(faulty.delay_s)
        if faulty.stalls:
            self._has_stalled = True
            await asyncio.get_running_loop().create_future()  # until the peer gives up
        for frame in faulty.frames:
            await self._enter(frame)

    async def _enter(self, frame: BlockFrame) -> None:
        entered = self._lane.try_enter(frame)
        if entered is None:  # what has room already must not wait for what has none
            await self._flush()
            entered = await self._lane.enter(frame)
        self._entered.append(entered)
        if len(self._entered) >= self._lane.max_batch_frames:
            await self._flush()

    async def _flush(self) -> None:
        """Writes what is in the lane."""
        if self._entered:
            frames, self._entered = self._entered, []
            await self._writer.write(self._lane.message(frames))
            self._lane.on_sent(frames)

    def _frames_of(self, block_index: int, num_tokens: int) -> list[BlockFrame]:
        offer, options = self._sender.offer, self._options
        contents = self._source.read(block_index, num_tokens)
        if len(contents) != offer.layout.block_bytes:
            raise Internal(f"block {block_index} has {len(contents)} bytes, {offer.layout.block_bytes} due")
        return cut_block(
            contents,
            id=offer.id,
            block_index=block_index,
            num_tokens=num_tokens,
            max_frame_bytes=options.max_frame_bytes,
            digest=self._source.digest(block_index),
        )

    def _begin(self) -> None:
        if self._began_s is None:
            self._began_s = time.monotonic()

    async def _write(self, message: SenderMessage) -> None:
        if isinstance(message, Alive) and (self._has_stalled or not (self._has_offered and self._options.is_alive())):
            return
        self._has_offered = True  # the first message is the Offer, however late the event loop comes to it
        await self._stream.write(message)
