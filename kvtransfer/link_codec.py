"""Hello and Welcome to and from protobuf, checked as in `codec.py`."""

from __future__ import annotations

from kvferry.errors import InvalidArgument
from kvferry.wire import layout_from_pb, layout_to_pb
from kvferry.worker import check_progress_timeout
from kvtransfer.handshake import Hello, Transport, Welcome, WireVersions
from kvtransfer.staging import HEADER_BYTES, TOKEN_BYTES, SegmentName
from proto.kvferry.v1 import ship_pb2

MAX_NAME_CHARS = 256
MAX_SEGMENT_BYTES = 1 << 40

_TO_PB = {
    Transport.GRPC: ship_pb2.TRANSPORT_GRPC,
    Transport.SHARED_MEMORY: ship_pb2.TRANSPORT_SHARED_MEMORY,
}
_FROM_PB = {number: transport for transport, number in _TO_PB.items()}


def hello_to_pb(hello: Hello) -> ship_pb2.Hello:
    """Message of a Hello."""
    return ship_pb2.Hello(
        worker_id=hello.worker_id,
        epoch=hello.epoch,
        min_wire_version=hello.versions.oldest,
        max_wire_version=hello.versions.newest,
        layout=layout_to_pb(hello.layout),
        transports=[_TO_PB[transport] for transport in hello.transports],
        host_id=hello.host_id,
        max_frame_bytes=hello.max_frame_bytes,
        progress_timeout_s=hello.progress_timeout_s,
        max_inflight_bytes=hello.max_inflight_bytes,
    )


def hello_from_pb(message: ship_pb2.Hello) -> Hello:
    """Raises InvalidArgument for what could never be right. Transports of later versions are left out."""
    for field in ("worker_id", "host_id"):
        if len(getattr(message, field)) > MAX_NAME_CHARS:
            raise InvalidArgument(f"hello.{field}", f"longer than {MAX_NAME_CHARS} characters")
    check_progress_timeout("hello.progress_timeout_s", message.progress_timeout_s)
    if message.max_frame_bytes < 1:
        raise InvalidArgument("hello.max_frame_bytes", "0; a frame must carry something")
    return Hello(
        worker_id=message.worker_id,
        epoch=message.epoch,
        versions=WireVersions(message.min_wire_version, message.max_wire_version),
        layout=layout_from_pb(message.layout),
        transports=tuple(_FROM_PB[number] for number in message.transports if number in _FROM_PB),
        host_id=message.host_id,
        max_frame_bytes=message.max_frame_bytes,
        progress_timeout_s=message.progress_timeout_s,
        max_inflight_bytes=message.max_inflight_bytes,
    )


def welcome_to_pb(welcome: Welcome) -> ship_pb2.Welcome:
    """Message of a Welcome."""
    segment = welcome.segment
    staging = (
        None
        if segment is None
        else ship_pb2.StagingSegment(pid=segment.pid, fd=segment.fd, num_bytes=segment.num_bytes, token=segment.token)
    )
    return ship_pb2.Welcome(
        wire_version=welcome.wire_version,
        epoch=welcome.epoch,
        link_id=welcome.link_id,
        transport=_TO_PB[welcome.transport],
        max_frame_bytes=welcome.max_frame_bytes,
        staging=staging,
    )


def welcome_from_pb(message: ship_pb2.Welcome) -> Welcome:
    """Raises InvalidArgument for what could never be right."""
    transport = _FROM_PB.get(message.transport)
    if transport is None:
        raise InvalidArgument("welcome.transport", f"{message.transport} is none that was offered")
    if message.max_frame_bytes < 1:
        raise InvalidArgument("welcome.max_frame_bytes", "0; a frame must carry something")
    segment = None
    if transport is Transport.SHARED_MEMORY:
        segment = _segment_from_pb(message.staging)
    return Welcome(message.wire_version, message.epoch, message.link_id, transport, message.max_frame_bytes, segment)


def _segment_from_pb(message: ship_pb2.StagingSegment) -> SegmentName:
    if not HEADER_BYTES < message.num_bytes <= MAX_SEGMENT_BYTES:
        raise InvalidArgument("welcome.staging.num_bytes", f"{message.num_bytes} is no size of a segment")
    if len(message.token) != TOKEN_BYTES:
        raise InvalidArgument("welcome.staging.token", f"{len(message.token)} bytes, {TOKEN_BYTES} allowed")
    return SegmentName(message.pid, message.fd, message.num_bytes, message.token)
