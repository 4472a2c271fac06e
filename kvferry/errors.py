"""The error tree of kvferry and its one table to gRPC status codes.

    KvferryError
    ├── InvalidArgument       the caller's fault; names the field and the limit
    │   ├── UnsupportedField  a field this version does not support (UNIMPLEMENTED), never ignored
    │   └── ContextExceeded   prompt, or prompt and output, longer than the model's context
    ├── Unauthenticated       no API key, or one that nobody has
    ├── PermissionDenied      a good API key, for something that is not its tenant's
    ├── NotFound              unknown model, adapter, request
    ├── FailedPrecondition    layout, model or version mismatch between processes
    ├── ResourceExhausted     no room now (or never, then `retry_after_s` is None)
    ├── Unavailable           a peer is gone or not there yet
    │   ├── TargetUnavailable the decode worker a prefill was to ship to
    │   ├── WorkerDraining    a worker that takes no new work, or has let go of what ran
    │   └── RouterDraining    a router that does so
    ├── DeadlineExceeded      the deadline passed, also while waiting in a queue
    ├── Cancelled             the caller went away
    ├── DataLoss              a block's digest stayed wrong after a repeat
    └── Internal              our own fault

Code raises these; the interceptors of `kvferry/rpc/` turn them into a status with google.rpc details and back.
"""

from __future__ import annotations

import grpc


class KvferryError(Exception):
    """Root of all errors that may cross a process border."""

    status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"  # ErrorInfo.reason, UPPER_SNAKE_CASE

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field  # path of the offending request field, for BadRequest details
        self.retry_after_s = retry_after_s  # for RetryInfo details; None: do not retry


class InvalidArgument(KvferryError):
    """The request can never be served as it is; `field` says what to change."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class UnsupportedField(InvalidArgument):
    """A field of the public request that this version does not support; refused by name."""

    status = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED_FIELD"

    def __init__(self, field: str, message: str = "not supported by this version; leave it unset") -> None:
        super().__init__(field, message)


class ContextExceeded(InvalidArgument):
    """The prompt, or it and the output that is asked for, is longer than the context; clients look for this one."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unauthenticated(KvferryError):
    """No API key, or one that nobody has; the message never repeats it."""

    status = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(KvferryError):
    """The API key is good, but what is asked for is not its tenant's."""

    status = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class NotFound(KvferryError):
    """An unknown model, adapter or request."""

    status = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class FailedPrecondition(KvferryError):
    """Two processes do not fit together, or a folder does not hold what it must."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class ResourceExhausted(KvferryError):
    """No room: now (`retry_after_s` given) or ever (None)."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"


class Unavailable(KvferryError):
    """A peer is gone, stalled, or not there yet."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class TargetUnavailable(Unavailable):
    """A prefill's decode worker is gone, stalled, or refused the shipment; the prefill worker itself is fine."""

    reason = "SHIP_TARGET_UNAVAILABLE"


class WorkerDraining(Unavailable):
    """A worker takes no new work, or has ended what ran for others to go on with: an order, and no fault of its own."""

    reason = "WORKER_DRAINING"


class RouterDraining(Unavailable):
    """A router takes no new requests, or has ended what ran for clients to go on at another: an order, and no fault."""

    reason = "ROUTER_DRAINING"


class DeadlineExceeded(KvferryError):
    """The request's deadline passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Cancelled(KvferryError):
    """The caller went away or aborted the request."""

    status = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class DataLoss(KvferryError):
    """Block contents stayed different from their digest after a repeat."""

    status = grpc.StatusCode.DATA_LOSS
    reason = "BLOCK_DIGEST_MISMATCH"


class Internal(KvferryError):
    """A fault of ours; the message says what was being done."""


ERRORS_BY_STATUS: dict[grpc.StatusCode, type[KvferryError]] = {
    error.status: error
    for error in (
        Unauthenticated,
        PermissionDenied,
        NotFound,
        FailedPrecondition,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        DataLoss,
        Internal,
    )
}
"""For callers: which class a status of a peer becomes. INVALID_ARGUMENT and UNIMPLEMENTED: see `rpc/status.py`."""
