"""Hello and Welcome to protobuf and back, and what is refused before anybody agrees on it."""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidArgument
from kvtransfer.handshake import Hello, Transport, Welcome, WireVersions
from kvtransfer.link_codec import (
    MAX_NAME_CHARS,
    MAX_SEGMENT_BYTES,
    hello_from_pb,
    hello_to_pb,
    welcome_from_pb,
    welcome_to_pb,
)
from kvtransfer.staging import HEADER_BYTES, TOKEN_BYTES, SegmentName
from proto.kvferry.v1 import ship_pb2
from tests.unit.kvtransfer.support import LAYOUT

HELLO = Hello(
    worker_id="prefill-0",
    epoch=2**63 - 1,
    versions=WireVersions(1, 2),
    layout=dataclasses.replace(LAYOUT, rope_digest="theta 4"),
    transports=(Transport.SHARED_MEMORY, Transport.GRPC),
    host_id="machine",
    max_frame_bytes=1 << 20,
    progress_timeout_s=10.0,
    max_inflight_bytes=3 << 20,
)
SEGMENT = SegmentName(pid=4_000_000, fd=17, num_bytes=16 << 20, token=bytes(range(TOKEN_BYTES)))
OVER_GRPC = Welcome(2, 7, 2**63 + 1, Transport.GRPC, 1 << 20)
STAGED = dataclasses.replace(OVER_GRPC, transport=Transport.SHARED_MEMORY, segment=SEGMENT)


@pytest.mark.parametrize("changes", [{}, {"transports": ()}, {"worker_id": "", "host_id": ""}, {"max_frame_bytes": 1}])
def test_hellos_survive_the_wire(changes: dict[str, Any]) -> None:
    hello = dataclasses.replace(HELLO, **changes)
    assert hello_from_pb(ship_pb2.Hello.FromString(hello_to_pb(hello).SerializeToString())) == hello


@pytest.mark.parametrize("welcome", [OVER_GRPC, STAGED])
def test_welcomes_survive_the_wire(welcome: Welcome) -> None:
    assert welcome_from_pb(ship_pb2.Welcome.FromString(welcome_to_pb(welcome).SerializeToString())) == welcome


def test_transports_of_later_versions_are_left_out() -> None:
    message = hello_to_pb(HELLO)
    message.transports[:] = [9, ship_pb2.TRANSPORT_GRPC, 0, 2**31 - 1]  # type: ignore[list-item]
    assert hello_from_pb(message).transports == (Transport.GRPC,)


def test_a_segment_that_is_not_used_is_not_looked_at() -> None:
    message = welcome_to_pb(OVER_GRPC)
    message.staging.num_bytes = 3
    assert welcome_from_pb(message) == OVER_GRPC


def changed_hello(field: str, value: object) -> ship_pb2.Hello:
    message = hello_to_pb(HELLO)
    setattr(message, field, value)
    return message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", "x" * (MAX_NAME_CHARS + 1)),
        ("host_id", "x" * (MAX_NAME_CHARS + 1)),
        ("progress_timeout_s", 0.0),
        ("progress_timeout_s", -1.0),
        ("progress_timeout_s", 0.09),
        ("progress_timeout_s", 3601.0),
        ("progress_timeout_s", math.inf),
        ("progress_timeout_s", math.nan),
        ("max_frame_bytes", 0),
    ],
)
def test_malformed_hellos_name_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        hello_from_pb(changed_hello(field, value))
    assert caught.value.field == f"hello.{field}"


def test_a_hello_without_a_layout_is_malformed() -> None:
    message = hello_to_pb(HELLO)
    message.ClearField("layout")
    with pytest.raises(InvalidArgument) as caught:
        hello_from_pb(message)
    assert caught.value.field == "layout.dtype"


def changed_welcome(**changes: object) -> ship_pb2.Welcome:
    message = welcome_to_pb(STAGED)
    for name, value in changes.items():
        target: Any = message
        *path, last = name.split("__")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"transport": 0}, "welcome.transport"),
        ({"transport": 9}, "welcome.transport"),
        ({"max_frame_bytes": 0}, "welcome.max_frame_bytes"),
        ({"staging__num_bytes": 0}, "welcome.staging.num_bytes"),
        ({"staging__num_bytes": HEADER_BYTES}, "welcome.staging.num_bytes"),
        ({"staging__num_bytes": MAX_SEGMENT_BYTES + 1}, "welcome.staging.num_bytes"),
        ({"staging__num_bytes": 2**64 - 1}, "welcome.staging.num_bytes"),
        ({"staging__token": b""}, "welcome.staging.token"),
        ({"staging__token": bytes(TOKEN_BYTES + 1)}, "welcome.staging.token"),
    ],
)
def test_malformed_welcomes_name_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        welcome_from_pb(changed_welcome(**changes))
    assert caught.value.field == field


def test_shared_memory_without_a_segment_is_malformed() -> None:
    message = welcome_to_pb(STAGED)
    message.ClearField("staging")
    with pytest.raises(InvalidArgument):
        welcome_from_pb(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    with suppress(DecodeError, InvalidArgument):
        hello_from_pb(ship_pb2.Hello.FromString(data))
    with suppress(DecodeError, InvalidArgument):
        welcome_from_pb(ship_pb2.Welcome.FromString(data))
