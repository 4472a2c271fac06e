"""Errors of ours as gRPC statuses with google.rpc details, and back.

ErrorInfo carries the reason (which class of the tree), BadRequest the field, RetryInfo when to come again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvferry.errors import ERRORS_BY_STATUS, Internal, InvalidArgument, KvferryError, UnsupportedField

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "kvferry"
MAX_MESSAGE_CHARS = 1_500
"""Status messages travel in headers, of which peers accept 8 KB; the message is in there twice."""


def status_details(error: KvferryError) -> tuple[str, tuple[tuple[str, bytes], ...]]:
    """What `context.abort` takes after the code: message and trailing metadata."""
    message = error.message[:MAX_MESSAGE_CHARS]
    number: int = error.status.value[0]
    status = status_pb2.Status(code=number, message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:200], description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMicroseconds(round(error.retry_after_s * 1e6))
        status.details.add().Pack(retry)
    return message, ((DETAILS_KEY, status.SerializeToString()),)


def error_from_rpc(error: grpc.aio.AioRpcError, target: str = "") -> KvferryError:
    """The error of ours that a peer's status means; `target` is named where the peer said nothing itself."""
    try:
        told = _read_details(error)
    except DecodeError:  # a peer that is not ours, or a broken one: its code and message still stand
        told = _Told()
    said = error.details() or error.code().name
    message = said if told.reason or not target else f"{target}: {said}"
    return _make(_class_for(error.code(), told.reason), message, told.field, told.retry_after_s)


@dataclass(frozen=True, slots=True)
class _Told:
    """What the details of a status say."""

    reason: str = ""
    field: str | None = None
    retry_after_s: float | None = None


def _read_details(error: grpc.aio.AioRpcError) -> _Told:
    """Raises DecodeError when they are garbage."""
    told = _Told()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                told = _with_detail(told, detail)
    return told


def _with_detail(told: _Told, detail: any_pb2.Any) -> _Told:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    if detail.Unpack(info) and info.domain == DOMAIN:
        return replace(told, reason=info.reason)
    if detail.Unpack(bad) and bad.field_violations:
        return replace(told, field=bad.field_violations[0].field)
    if detail.Unpack(retry):
        return replace(told, retry_after_s=retry.retry_delay.ToMicroseconds() / 1e6)
    return told


def _make(kind: type[KvferryError], message: str, field: str | None, retry_after_s: float | None) -> KvferryError:
    """An error with a message that is complete already; subclasses' own constructors would compose it again."""
    error = kind.__new__(kind)
    KvferryError.__init__(error, message, field=field, retry_after_s=retry_after_s)
    return error


def _class_for(code: grpc.StatusCode, reason: str) -> type[KvferryError]:
    travelling = (kind for kind in _tree(KvferryError) if kind.__module__ == KvferryError.__module__)
    by_reason = {kind.reason: kind for kind in travelling if kind is not KvferryError}
    if reason in by_reason:
        return by_reason[reason]
    fixed: dict[grpc.StatusCode, type[KvferryError]] = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
        grpc.StatusCode.UNIMPLEMENTED: UnsupportedField,
    }
    return fixed.get(code) or ERRORS_BY_STATUS.get(code, Internal)


def _tree(kind: type[KvferryError]) -> Iterator[type[KvferryError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)
