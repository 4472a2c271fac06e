"""The sender's side of a link: agrees with one receiver, keeps the call open, agrees anew when it was lost.

    shipment ─► agreed() ─┬─ open: at once
                          └─ not: Link call ─► Hello ─► Welcome ─► staging segment opened ─► kept by a task of its own

A receiver without Link speaks version 1 over gRPC. Where shared memory was agreed on but cannot be opened from here
(two containers), a second link without it takes its place.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvferry.errors import FailedPrecondition, Internal, KvferryError, Unavailable, UnsupportedField
from kvferry.rpc import HeartbeatWriter, RpcChannel, read_with_progress_deadline
from kvferry.telemetry import log_event
from kvtransfer.block_frames import MAX_FRAMES
from kvtransfer.budget import ByteBudget, PeerBudget, ShipRank
from kvtransfer.handshake import Hello, Transport, Welcome
from kvtransfer.lane import MAX_INLINE_BYTES, InlineLane, Lane, StagedLane
from kvtransfer.link_codec import hello_to_pb, welcome_from_pb
from kvtransfer.liveness import HEARTBEATS_PER_TIMEOUT, bounded_silence
from kvtransfer.staging import StagingView
from proto.kvferry.v1 import ship_pb2, ship_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)

PEER = "the receiver at the other end of the link"
CONNECT_TIMEOUT_S = 3.0
"""Longer than a channel waits between two tries."""
FIRST_WIRE_VERSION = 1
"""Spoken by receivers without Link."""


@dataclass(frozen=True, slots=True)
class Linked:
    """What shipments to a receiver go by."""

    wire_version: int
    link_id: int
    transport: Transport
    max_frame_bytes: int
    budget: PeerBudget
    max_inline_frames: int = 1  # of one message
    view: StagingView | None = None

    def lane(self, rank: ShipRank) -> Lane:
        """A lane for one shipment."""
        if self.view is None:
            return InlineLane(self.budget, rank, max_batch_frames=self.max_inline_frames)
        return StagedLane(self.budget, rank, self.view)


class SenderLink:
    """The link to the receiver at the other end of `channel`, which the caller owns.

    Args:
        hello: what this process says of itself.
        total: bytes on their way from this process.
        peer_bytes: most of them towards this receiver.

    Attributes:
        was_lost: a link broke off, fell silent or could not be opened; what comes next had better take another
            connection, since this one may be dead without having been closed.
    """

    def __init__(self, channel: RpcChannel, hello: Hello, total: ByteBudget, peer_bytes: int) -> None:
        self._channel = channel
        self._stub = ship_pb2_grpc.ShipServiceStub(channel.grpc)
        self._hello = hello
        self._total = total
        self._peer_bytes = peer_bytes
        self._inline_budget = total.peer(peer_bytes)  # one for all links without staging that follow each other
        self._opened: asyncio.Future[Linked] | None = None  # while a link is open or being opened
        self._task: asyncio.Task[None] | None = None
        self.was_lost = False

    async def agreed(self) -> Linked:
        """The link; opened where there is none.

        It may lead to another life of the receiver than a shipment is for: then the receiver refuses the Offer. Raises
        FailedPrecondition naming what does not go together, Unavailable when the receiver is gone or silent.
        """
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            # A context of its own: the link is no part of the trace of the shipment that happens to open it.
            self._task = asyncio.create_task(self._keep(self._opened), context=contextvars.Context())
        return await asyncio.shield(self._opened)

    @property
    def transport(self) -> Transport | None:
        """How payloads travel at present; None while there is no link."""
        opened = self._opened
        is_open = opened is not None and opened.done() and not opened.cancelled() and opened.exception() is None
        return opened.result().transport if opened is not None and is_open else None

    async def close(self) -> None:
        """Ends the link; shipments that use it fail."""
        task, opened = self._task, self._opened
        self._task = self._opened = None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if opened is not None and not opened.done():  # the task was cancelled before its first step
            self._fail(opened, Unavailable("the link was closed"))

    async def _keep(self, opened: asyncio.Future[Linked]) -> None:
        """Holds a link until it is lost; failures before it is open are what `opened` raises."""
        try:
            await self._hold(self._hello, opened)
        except asyncio.CancelledError:
            if not opened.done():
                self._fail(opened, Unavailable("the link was closed"))
            raise
        except UnsupportedField:
            if not opened.done():
                self._open_first_version(opened)
        except KvferryError as error:
            self._fail(opened, error)
        except Exception as error:  # noqa: BLE001 - shipments wait for `opened` and must learn of it
            self._fail(opened, Internal(f"the link to {self._channel.target} broke: {error!r}"))
        finally:
            if self._opened is opened:
                self._opened = None

    def _fail(self, opened: asyncio.Future[Linked], error: KvferryError) -> None:
        self.was_lost = self.was_lost or isinstance(error, Unavailable)
        if not opened.done():
            opened.set_exception(error)
            opened.exception()  # nobody need be waiting any more
            log_event(
                logger, "link_refused", level=logging.WARNING, receiver=self._channel.target, reason=error.message
            )
        else:
            log_event(logger, "link_lost", level=logging.WARNING, receiver=self._channel.target, reason=error.message)

    async def _hold(self, hello: Hello, opened: asyncio.Future[Linked]) -> None:
        # A receiver that was restarted is reached with the channel's next try, and not refused until then.
        async with self._channel.duplex(self._stub.Link, wait_for_ready=True) as call:
            welcome = await self._greet(call, hello)
            try:
                linked = self._linked(welcome)
            except FailedPrecondition as error:
                if Transport.GRPC not in hello.transports:
                    raise
                log_event(
                    logger,
                    "shared_memory_unusable",
                    level=logging.WARNING,
                    receiver=self._channel.target,
                    reason=error.message,
                    transport=Transport.GRPC.value,
                )
                linked = None
            if linked is not None:
                await self._keep_alive(call, hello.progress_timeout_s, linked, opened)
                return
        await self._hold(dataclasses.replace(hello, transports=(Transport.GRPC,)), opened)

    async def _greet(self, call: Any, hello: Hello) -> Welcome:
        timeout_s = min(hello.progress_timeout_s, CONNECT_TIMEOUT_S)
        async with bounded_silence(
            timeout_s, f"the receiver at {self._channel.target}"
        ):  # also of one that takes connections and no more
            with suppress(asyncio.InvalidStateError):  # refused already: the read raises the status
                await call.write(ship_pb2.LinkRequest(hello=hello_to_pb(hello)))
            message = await read_with_progress_deadline(call, hello.progress_timeout_s, PEER)
        if message is None or message.WhichOneof("event") != "welcome":
            raise Unavailable("the receiver did not answer the link's hello")
        return _checked(welcome_from_pb(message.welcome), hello)

    def _linked(self, welcome: Welcome) -> Linked:
        slot_bytes = min(welcome.max_frame_bytes, self._hello.layout.block_bytes)
        view = None if welcome.segment is None else StagingView(welcome.segment, slot_bytes)
        batch_frames = max(1, min(MAX_FRAMES, MAX_INLINE_BYTES // slot_bytes))
        budget = self._inline_budget
        if view is not None:
            budget = self._total.peer(min(self._peer_bytes, view.num_slots * view.slot_bytes))
        return Linked(
            welcome.wire_version,
            welcome.link_id,
            welcome.transport,
            welcome.max_frame_bytes,
            budget,
            batch_frames if welcome.wire_version > FIRST_WIRE_VERSION else 1,
            view,
        )

    def _open_first_version(self, opened: asyncio.Future[Linked]) -> None:
        if Transport.GRPC not in self._hello.transports:
            message = f"transfer.transport: {self._channel.target} speaks wire version 1, which knows grpc alone"
            self._fail(opened, FailedPrecondition(message, field="transfer.transport"))
            return
        opened.set_result(
            Linked(FIRST_WIRE_VERSION, 0, Transport.GRPC, self._hello.max_frame_bytes, self._inline_budget)
        )

    async def _keep_alive(self, call: Any, timeout_s: float, linked: Linked, opened: asyncio.Future[Linked]) -> None:
        writer: HeartbeatWriter[ship_pb2.LinkRequest] = HeartbeatWriter(
            call.write,
            lambda: ship_pb2.LinkRequest(heartbeat=worker_pb2.Heartbeat()),
            interval_s=timeout_s / HEARTBEATS_PER_TIMEOUT,
            stall_timeout_s=timeout_s,
            peer=PEER,
        )
        try:
            async with writer:
                opened.set_result(linked)
                while await read_with_progress_deadline(call, timeout_s, PEER) is not None:
                    pass
            raise Unavailable("the receiver ended the link")
        finally:
            if linked.view is not None:
                linked.view.close()


def _checked(welcome: Welcome, hello: Hello) -> Welcome:
    """Raises FailedPrecondition for an answer that was not among what was offered."""
    versions = hello.versions
    if not versions.oldest <= welcome.wire_version <= versions.newest:
        raise FailedPrecondition(f"wire version: {versions} offered, the receiver chose {welcome.wire_version}")
    if welcome.transport not in hello.transports:
        offered = ", ".join(one.value for one in hello.transports)
        raise FailedPrecondition(f"transfer.transport: {offered} offered, the receiver chose {welcome.transport.value}")
    if welcome.link_id == 0:
        raise FailedPrecondition("link_id: 0, which stands for no link")
    return welcome
