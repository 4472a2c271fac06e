"""One Ship call at the decode worker: the real `ShipReceiver` in a shell like `kvtransfer.receiving_end`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.core import EngineCore
from kvferry.errors import KvferryError
from kvtransfer.messages import BlockFrame, Commit, CommitAck, Nack, Offer, Region, Want
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
from kvtransfer.transport import CommitOutcome, Grant
from tests.simulation.network import End, Life

MAX_FRAME_BYTES = 16
"""Half a block, so that every block has two frames."""


class ReceiptHost(Protocol):
    """What the decode worker does for one shipment."""

    def grant(self, offer: Offer, done: Callable[[Grant | KvferryError], None]) -> None: ...

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None: ...

    def verify(self, block_index: int, digest: bytes) -> bool: ...

    def commit(
        self,
        first_token_ids: tuple[int, ...],
        first_logprobs: tuple[float, ...],
        done: Callable[[CommitOutcome | KvferryError], None],
    ) -> None: ...

    def release(self) -> None: ...


class ShipReceipt:
    """Drives one receiving end."""

    def __init__(self, life: Life, core: EngineCore, end: End, open_host: Callable[[Offer], ReceiptHost]) -> None:
        self._world = life.world
        self._name = life.name
        self._end = end
        self._open_host = open_host
        self._receiver = ShipReceiver(layout=core.layout, epoch=life.epoch, max_frame_bytes=MAX_FRAME_BYTES)
        self._host: ReceiptHost | None = None
        self._is_settled = False
        self._is_over = False

    def on_message(self, message: object) -> None:
        assert isinstance(message, Offer | BlockFrame | Commit)
        self._perform(self._receiver.on_message(message))

    def on_end(self, error: KvferryError | None) -> None:
        if error is None:
            self._perform(self._receiver.on_end())
        else:
            self._leave()

    def _perform(self, actions: list[ReceiverAction]) -> None:
        for action in actions:
            if self._is_over:
                return
            try:
                self._perform_one(action)
            except KvferryError as error:
                self._fail(error)

    def _perform_one(self, action: ReceiverAction) -> None:
        match action:
            case WriteFrame() | VerifyBlock():
                self._touch_block(action)
            case RequestGrant(offer=offer):
                self._request_grant(offer)
            case CommitSequence():
                self._commit(action)
            case SendWant(block_indices=block_indices):
                self._end.send(Want(block_indices))
            case SendNack(block_index=block_index):
                self._world.counts["nacks"] += 1
                self._world.note(self._name, "nack", self._end.tag, block_index)
                self._end.send(Nack(block_index))
            case SendCommitAck(already_committed=already_committed):
                self._world.counts["already committed" if already_committed else "commits"] += 1
                self._end.send(CommitAck(already_committed))
            case ReceiveFinished():
                self._end.close()
                self._leave()
            case ReceiveFailed(error=error):
                self._fail(error)

    def _touch_block(self, action: WriteFrame | VerifyBlock) -> None:
        assert self._host is not None, "a grant came first"
        if isinstance(action, WriteFrame):
            assert not isinstance(action.payload, Region), "payloads travel in messages here"
            self._host.write(action.block_index, action.offset, action.payload)
            return
        digest_ok = self._host.verify(action.block_index, action.digest)
        self._perform(self._receiver.on_block_written(action.block_index, digest_ok=digest_ok))

    def _request_grant(self, offer: Offer) -> None:
        try:
            self._host = self._open_host(offer)
            self._host.grant(offer, self._on_grant)
        except KvferryError as error:
            self._perform(self._receiver.on_refused(error))

    def _on_grant(self, result: Grant | KvferryError) -> None:
        if self._is_over:
            return
        if isinstance(result, KvferryError):
            self._perform(self._receiver.on_refused(result))
        elif result.already_committed:
            self._perform(self._receiver.on_committed(already_committed=True))
        else:
            self._perform(self._receiver.on_granted(result.wanted))

    def _commit(self, action: CommitSequence) -> None:
        assert self._host is not None, "a grant came first"
        try:
            self._host.commit(action.first_token_ids, action.first_logprobs, self._on_committed)
        except KvferryError as error:
            self._perform(self._receiver.on_refused(error))

    def _on_committed(self, result: CommitOutcome | KvferryError) -> None:
        if self._is_over:
            return
        if isinstance(result, KvferryError):
            self._perform(self._receiver.on_refused(result))
            return
        self._is_settled = True
        already_committed = result is CommitOutcome.ALREADY_COMMITTED
        self._perform(self._receiver.on_committed(already_committed=already_committed))

    def _fail(self, error: KvferryError) -> None:
        self._world.note(self._name, "refuses a shipment:", self._end.tag, error)
        self._leave()
        self._end.close(error)

    def _leave(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._host is not None and not self._is_settled:
            self._host.release()
