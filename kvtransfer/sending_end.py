"""Shell of the sending end: drives a `ShipSender` over any transport's stream.

events (engine) ─┐
messages (peer) ─┴► ShipSender ─► actions ─► outbox ─► read block, cut frames, write them, one block at a time
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from typing import Any

from kvferry.errors import Internal
from kvferry.rpc import HeartbeatWriter
from kvferry.tasks import run_until_first
from kvtransfer.frames import cut_block
from kvtransfer.liveness import HEARTBEATS_PER_TIMEOUT, bounded_silence
from kvtransfer.messages import Alive, BlockFrame, Commit, SenderMessage
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
) -> ShipSummary:
    """Runs one shipment to its acknowledgement; errors as `ShipTransport.ship` says."""
    return await _SendingEnd(stream, sender, source, events, options).run()


class _SendingEnd:
    def __init__(
        self,
        stream: SendingStream,
        sender: ShipSender,
        source: BlockSource,
        events: asyncio.Queue[ShipEvent],
        options: SendOptions,
    ) -> None:
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
            return await run_until_first(self._read_loop(), self._event_loop(), self._write_loop())

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
            self._take(self._sender.on_message(message))
        return self._summary

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
                case SendCommit(first_token_ids=token_ids, first_logprobs=logprobs):
                    self._begin()
                    await self._writer.write(Commit(self._sender.offer.id, token_ids, logprobs))

    async def _write_block(self, block_index: int, num_tokens: int) -> None:
        self._begin()
        self._num_sends[block_index] += 1
        frames = self._frames_of(block_index, num_tokens)
        faulty = self._options.faults.apply(frames, self._num_sends[block_index])
        if faulty.delay_s > 0:
            await asyncio.sleep(faulty.delay_s)
        for frame in faulty.frames:
            await self._writer.write(frame)

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
        if isinstance(message, Alive) and not (self._has_offered and self._options.is_alive()):
            return
        self._has_offered = True  # the first message is the Offer, however late the event loop comes to it
        await self._stream.write(message)
