"""The receiver's side of links: answers a sender's Hello and owns the memory set aside for it until the call ends.

    Link call: Hello ─► agree ─► staging segment ─► Welcome ─► heartbeats both ways … ─► the call ends, the segment goes

The call ends with its sender: when its process dies, when its connection breaks, or when it is silent for longer than
the progress timeout.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvferry.errors import FailedPrecondition, InvalidArgument, KvferryError, Unavailable
from kvferry.rpc import HeartbeatWriter, read_with_progress_deadline
from kvferry.telemetry import log_event
from kvtransfer.handshake import Agreement, Hello, LinkTerms, Transport, Welcome, agree
from kvtransfer.link_codec import hello_from_pb, welcome_to_pb
from kvtransfer.liveness import HEARTBEATS_PER_TIMEOUT
from kvtransfer.staging import HEADER_BYTES, SLOT_ALIGNMENT_BYTES, StagingSegment
from proto.kvferry.v1 import ship_pb2, worker_pb2

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

    Context = ServicerContext[ship_pb2.LinkRequest, ship_pb2.LinkResponse]

logger = logging.getLogger(__name__)

PEER = "the sender at the other end of the link"
SEGMENT_OVERHEAD_BYTES = HEADER_BYTES + SLOT_ALIGNMENT_BYTES
"""Beside the payloads. Not counted: memory for the shares of so many senders is enough for so many."""


class ReceiverLinks:
    """The links of one receiving process in its life `epoch`."""

    def __init__(self, terms: LinkTerms, epoch: int) -> None:
        self._terms = terms
        self._epoch = epoch
        self._segments: dict[int, StagingSegment | None] = {}  # one entry a link

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def staging_bytes(self) -> int:
        """Room for payloads in all staging segments together."""
        segments = [segment for segment in self._segments.values() if segment is not None]
        return sum(segment.num_bytes - SEGMENT_OVERHEAD_BYTES for segment in segments)

    def segment(self, link_id: int) -> StagingSegment | None:
        """Where the payloads of a link lie; None where they travel in messages, as they do without a link.

        Raises FailedPrecondition once it has ended, and without a link where nothing but shared memory may be used.
        """
        if not link_id:
            if Transport.GRPC not in self._terms.transports:
                raise FailedPrecondition("transfer.transport: shm here, and the shipment belongs to no link")
            return None
        if link_id not in self._segments:
            raise FailedPrecondition(f"link {link_id:x} is not open here (any more)")
        return self._segments[link_id]

    async def serve(self, context: Context, hello_timeout_s: float) -> None:
        """One Link call from its first message to its end."""
        message = await read_with_progress_deadline(context, hello_timeout_s, PEER)
        if message is None or message.WhichOneof("event") != "hello":
            raise InvalidArgument("event", "the first message of Link must be `hello`")
        hello = hello_from_pb(message.hello)
        with self._open(hello) as welcome:
            timeout_s = hello.progress_timeout_s
            async with HeartbeatWriter(
                context.write,
                lambda: ship_pb2.LinkResponse(heartbeat=worker_pb2.Heartbeat()),
                interval_s=timeout_s / HEARTBEATS_PER_TIMEOUT,
                stall_timeout_s=timeout_s,
                peer=PEER,
            ) as writer:
                await writer.write(ship_pb2.LinkResponse(welcome=welcome_to_pb(welcome)))
                while await read_with_progress_deadline(context, timeout_s, PEER) is not None:
                    pass

    @contextmanager
    def _open(self, hello: Hello) -> Iterator[Welcome]:
        """The link for the length of the block."""
        try:
            agreement = agree(hello, self._terms)
            segment = self._new_segment(hello, agreement)
        except KvferryError as error:
            log_event(logger, "link_refused", level=logging.WARNING, sender=hello.worker_id, reason=error.message)
            raise
        link_id = secrets.randbits(63) | 1
        self._segments[link_id] = segment
        transport = Transport.GRPC if segment is None else Transport.SHARED_MEMORY
        log_event(logger, "link_opened", sender=hello.worker_id, transport=transport.value, link_id=f"{link_id:x}")
        try:
            name = None if segment is None else segment.name
            yield Welcome(agreement.wire_version, self._epoch, link_id, transport, agreement.max_frame_bytes, name)
        finally:
            del self._segments[link_id]
            if segment is not None:
                segment.close()
            log_event(logger, "link_closed", sender=hello.worker_id, link_id=f"{link_id:x}")

    def _new_segment(self, hello: Hello, agreement: Agreement) -> StagingSegment | None:
        """None where payloads travel in messages: agreed on so, or no memory is left and the sender knows gRPC too."""
        if agreement.transport is not Transport.SHARED_MEMORY:
            return None
        slot_bytes = min(agreement.max_frame_bytes, self._terms.layout.block_bytes)
        room = min(self._terms.peer_bytes, hello.max_inflight_bytes or self._terms.peer_bytes)
        num_bytes = max(room, slot_bytes)
        try:
            if self.staging_bytes + num_bytes > self._terms.max_staging_bytes:
                raise Unavailable(
                    f"transfer.max_staging_bytes: {self._terms.max_staging_bytes} bytes, {self.staging_bytes} in use, "
                    f"{num_bytes} more are wanted"
                )
            return StagingSegment(num_bytes + SEGMENT_OVERHEAD_BYTES)
        except Unavailable as error:
            if Transport.GRPC not in hello.transports or Transport.GRPC not in self._terms.transports:
                raise
            log_event(logger, "staging_used_up", level=logging.WARNING, sender=hello.worker_id, reason=error.message)
            return None
