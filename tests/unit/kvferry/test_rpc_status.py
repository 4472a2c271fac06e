"""Every error of the tree survives the way over a status; foreign statuses become errors of ours."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from kvferry.errors import (
    Cancelled,
    ContextExceeded,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvferryError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    UnsupportedField,
)
from kvferry.rpc.status import MAX_MESSAGE_CHARS, error_from_rpc, status_details

ERRORS = [
    InvalidArgument("sampling.temperature", "must be at least 0, got -1"),
    UnsupportedField("beam_search"),
    ContextExceeded("prompt", "has 300 tokens"),
    NotFound("no adapter x", field="adapter"),
    Unauthenticated("no API key"),
    PermissionDenied("another's", field="tenant"),
    FailedPrecondition("block_size: 16 here, 32 there"),
    ResourceExhausted("no room", retry_after_s=1.5),
    ResourceExhausted("never fits"),
    Unavailable("gone"),
    DeadlineExceeded("late"),
    Cancelled("left"),
    DataLoss("digest"),
    Internal("fault"),
]


def _over_the_wire(error: KvferryError) -> KvferryError:
    message, trailers = status_details(error)
    return error_from_rpc(grpc.aio.AioRpcError(error.status, None, grpc.aio.Metadata(*trailers), message), "h:1")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_round_trip(error: KvferryError) -> None:
    back = _over_the_wire(error)
    assert type(back) is type(error)
    assert (back.message, back.field, back.retry_after_s) == (error.message, error.field, error.retry_after_s)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.UNIMPLEMENTED, UnsupportedField),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
def test_a_status_without_details_names_the_peer(code: grpc.StatusCode, kind: type[KvferryError]) -> None:
    back = error_from_rpc(grpc.aio.AioRpcError(code, None, None, "connection refused"), "h:1")
    assert type(back) is kind
    assert back.message == "h:1: connection refused"


def test_long_messages_are_cut_so_that_they_fit_headers() -> None:
    message, trailers = status_details(InvalidArgument("f" * 10_000, "x" * 10_000))
    assert len(message) == MAX_MESSAGE_CHARS
    assert len(trailers[0][1]) < 4_000


def test_garbage_in_the_details_is_no_failure() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    back = error_from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, None, trailers, "x"))
    assert isinstance(back, NotFound)
