"""Shell of the receiving end: drives a `ShipReceiver` over any transport's stream, against the decode service's host.

messages (peer) ─► ShipReceiver ─► actions ─┬► host.write, host.verify, at once
                                            ├► host.grant, host.commit, in a task of their own (they wait)
                                            └► Want, Nack, Credit, CommitAck
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvferry.errors import KvferryError
from kvferry.rpc import HeartbeatWriter
from kvferry.tasks import run_until_first
from kvtransfer.liveness import HEARTBEATS_PER_TIMEOUT, bounded_silence
from kvtransfer.messages import (
    Alive,
    BlockFrame,
    CommitAck,
    Credit,
    Nack,
    Offer,
    ReceiverMessage,
    Region,
    StagedFrames,
    Want,
)
from kvtransfer.receiver import (
    CommitSequence,
    ReceiveFailed,
    ReceiveFinished,
    ReceiverAction,
    RequestGrant,
    SendCommitAck,
    SendNack,
    SendWant,
    ShipReceiver,
    VerifyBlock,
    WriteFrame,
)
from kvtransfer.transport import CommitOutcome, OpenHost, ReceiveOptions, ReceiverHost, ReceivingStream

PEER = "the sender of the shipment"
CREDIT_DELAY_S = 0.03
"""How long a few staged frames may wait for more to share a credit with."""


async def run_receiving_end(
    stream: ReceivingStream, receiver: ShipReceiver, open_host: OpenHost, options: ReceiveOptions
) -> None:
    """Runs one shipment until it is committed and acknowledged.

    Raises a KvferryError, for the sender, in every other case; the host's reservation is released by then.
    """
    await _ReceivingEnd(stream, receiver, open_host, options).run()


class _ReceivingEnd:
    def __init__(
        self, stream: ReceivingStream, receiver: ShipReceiver, open_host: OpenHost, options: ReceiveOptions
    ) -> None:
        self._stream = stream
        self._receiver = receiver
        self._open_host = open_host
        self._options = options
        self._timeout_s = options.offer_timeout_s  # until the Offer names one
        self._host: ReceiverHost | None = None
        self._writer: HeartbeatWriter[ReceiverMessage] | None = None  # there once the Offer is
        # Grant, then commit: the receiver asks for one at a time.
        self._host_calls: asyncio.Queue[RequestGrant | CommitSequence] = asyncio.Queue(1)
        self._num_taken_frames = 0  # staged ones, copied and without credit so far
        self._num_taken_bytes = 0
        self._has_taken = asyncio.Event()
        self._has_taken_much = asyncio.Event()
        self._is_settled = False
        self._is_finished = False

    async def run(self) -> None:
        try:
            await self._read_one()  # the Offer, or it fails
            self._writer = HeartbeatWriter(
                self._write,
                Alive,
                interval_s=self._timeout_s / HEARTBEATS_PER_TIMEOUT,
                stall_timeout_s=self._timeout_s,
                peer=PEER,
            )
            async with self._writer:
                await run_until_first(self._host_loop(), self._read_loop(), self._credit_loop())
        finally:
            # Everything that could still write has ended here.
            self._forget_taken()
            if self._host is not None and not self._is_settled:
                self._host.release()

    async def _read_loop(self) -> None:
        while await self._read_one():
            pass
        await asyncio.get_running_loop().create_future()  # half-closed after its Commit: nothing to read any more

    async def _read_one(self) -> bool:
        """Takes one message; says whether more may come."""
        async with bounded_silence(self._timeout_s, PEER):
            message = await self._stream.read()
        if message is None:
            await self._perform(self._receiver.on_end())
            return False
        if isinstance(message, Offer):
            self._timeout_s = message.progress_timeout_s
        await self._perform(self._receiver.on_message(message))
        if isinstance(message, StagedFrames):  # copied by now, every one of them
            self._note_taken(message.frames)
        return True

    def _note_taken(self, frames: Sequence[BlockFrame]) -> None:
        num_bytes = sum(len(frame.payload) for frame in frames)
        self._num_taken_frames += len(frames)
        self._num_taken_bytes += num_bytes
        self._stream.uncredited.num_bytes += num_bytes
        self._has_taken.set()
        if self._stream.uncredited.is_much:
            self._has_taken_much.set()

    def _forget_taken(self) -> int:
        """The frames to give credit for."""
        self._stream.uncredited.num_bytes -= self._num_taken_bytes
        num_frames, self._num_taken_frames, self._num_taken_bytes = self._num_taken_frames, 0, 0
        return num_frames

    async def _credit_loop(self) -> None:
        """Gives credit at once for much, a little later for little: a message costs as much as copying a block."""
        while True:
            await self._has_taken.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(CREDIT_DELAY_S):
                    await self._has_taken_much.wait()
            self._has_taken.clear()
            self._has_taken_much.clear()
            await self._send(Credit(self._forget_taken()))

    async def _host_loop(self) -> None:
        while not self._is_finished:
            try:
                actions = await self._call_host(await self._host_calls.get())
            except KvferryError as error:
                actions = self._receiver.on_refused(error)
            await self._perform(actions)

    async def _call_host(self, call: RequestGrant | CommitSequence) -> list[ReceiverAction]:
        match call:
            case RequestGrant(offer=offer):
                self._host = self._open_host(offer)
                grant = await self._host.grant(offer)
                if grant.already_committed:
                    return self._receiver.on_committed(already_committed=True)
                return self._receiver.on_granted(grant.wanted)
            case CommitSequence(first_token_ids=token_ids, first_logprobs=logprobs):
                assert self._host is not None, "a grant came first"
                outcome = await self._host.commit(token_ids, logprobs)
                self._is_settled = True
                already = outcome is CommitOutcome.ALREADY_COMMITTED
                return self._receiver.on_committed(already_committed=already)

    async def _perform(self, actions: list[ReceiverAction]) -> None:
        for action in [*actions, *self._receive(actions)]:
            match action:
                case WriteFrame() | VerifyBlock():
                    pass  # done
                case RequestGrant() | CommitSequence():
                    self._host_calls.put_nowait(action)
                case SendWant(block_indices=block_indices):
                    await self._send(Want(block_indices))
                case SendNack(block_index=block_index):
                    await self._send(Nack(block_index))
                case SendCommitAck(already_committed=already_committed):
                    await self._send(CommitAck(already_committed))
                case ReceiveFailed(error=error):
                    raise error
                case ReceiveFinished():
                    self._is_finished = True

    def _receive(self, actions: list[ReceiverAction]) -> list[ReceiverAction]:
        """Takes in all blocks of a message, then tells the receiver of each.

        All at once: each copy empties the processor's cache of the code that would run between two of them.
        """
        verified: list[tuple[int, bool]] = []  # index, whether the digest is right
        for action in actions:
            if isinstance(action, WriteFrame):
                self._write_frame(action)
            elif isinstance(action, VerifyBlock):
                assert self._host is not None, "a grant came first"
                digest_ok = self._host.verify(action.block_index, action.digest, action.num_tokens)
                verified.append((action.block_index, digest_ok))
        told = (self._receiver.on_block_written(index, digest_ok=is_right) for index, is_right in verified)
        return [action for answer in told for action in answer]

    def _write_frame(self, action: WriteFrame) -> None:
        assert self._host is not None, "a grant came first"
        payload = action.payload
        if isinstance(payload, Region):
            payload = self._stream.staged(payload)
        self._host.write(action.block_index, action.offset, payload)

    async def _send(self, message: ReceiverMessage) -> None:
        assert self._writer is not None, "nothing is answered before the Offer"
        await self._writer.write(message)

    async def _write(self, message: ReceiverMessage) -> None:
        if not isinstance(message, Alive) or self._options.is_alive():
            await self._stream.write(message)
