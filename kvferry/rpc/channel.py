"""A channel whose calls carry the trace, raise our errors, and never outlive the block they are used in.

Every streaming call lives in an `async with` that cancels it and ends its span; without that a relay leaks its
backend's streams. No client interceptors: they break cancellation and leak on long two-way streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import grpc
import grpc.aio
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.errors import KvferryError, Unavailable
from kvferry.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, channel_options
from kvferry.rpc.status import error_from_rpc
from kvferry.telemetry import Attributes, mark_error

if TYPE_CHECKING:  # subscripted at type-check time only; at run time these classes are not generic
    from grpc.aio import (
        StreamStreamCall,
        StreamStreamMultiCallable,
        UnaryStreamCall,
        UnaryStreamMultiCallable,
        UnaryUnaryMultiCallable,
    )

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_AnyCall = TypeVar("_AnyCall", bound="_Call")

PROPAGATOR = TraceContextTextMapPropagator()


class _Call(Protocol):
    """What all calls of grpc.aio share."""

    def cancel(self) -> bool: ...
    def done(self) -> bool: ...
    async def code(self) -> grpc.StatusCode: ...
    async def details(self) -> str: ...
    async def trailing_metadata(self) -> grpc.aio.Metadata: ...


class RpcChannel:
    """A channel to one peer. Calls made through it carry the trace and raise errors of `kvferry.errors`.

    `headers` go with every call. Channels of one process to one peer share a connection, unless `has_own_connection`:
    then a dead one is left by making another channel. `service_config` is gRPC's, as JSON. `parent=` is the context
    under whose span the call's span hangs; by default the running task's.
    """

    def __init__(
        self,
        target: str,
        *,
        tracer: Tracer | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        headers: Mapping[str, str] | None = None,
        has_own_connection: bool = False,
        service_config: str | None = None,
    ) -> None:
        options: list[tuple[str, int | str]] = [
            *channel_options(max_message_bytes),
            ("grpc.use_local_subchannel_pool", int(has_own_connection)),
        ]
        if service_config is not None:
            options.append(("grpc.service_config", service_config))
        self.target = target
        self.grpc = grpc.aio.insecure_channel(target, options=options)
        self._tracer = tracer or NoOpTracer()
        self._headers = dict(headers or {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls that still run are cancelled."""
        await self.grpc.close()

    @property
    def is_down(self) -> bool:
        """Whether the peer could not be reached, and the next try to connect is still to come: calls fail at once."""
        return self.grpc.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def unary(
        self,
        method: UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool = False,
        parent: Context | None = None,
    ) -> _Response:
        """One request, one answer."""
        span, metadata = self._start_span(method, parent)
        call = method(request, timeout=timeout_s, metadata=metadata, wait_for_ready=wait_for_ready)
        async with self._owned(call, span):
            return await call

    def stream(
        self,
        method: UnaryStreamMultiCallable[_Request, _Response],
        request: _Request,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool = False,
        parent: Context | None = None,
    ) -> AbstractAsyncContextManager[UnaryStreamCall[_Request, _Response]]:
        """One request, many answers. Leaving the block cancels the call."""
        span, metadata = self._start_span(method, parent)
        return self._owned(method(request, timeout=timeout_s, metadata=metadata, wait_for_ready=wait_for_ready), span)

    def duplex(
        self,
        method: StreamStreamMultiCallable[_Request, _Response],
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool = False,
        parent: Context | None = None,
    ) -> AbstractAsyncContextManager[StreamStreamCall[_Request, _Response]]:
        """Messages both ways, with `read`, `write` and `done_writing`. Leaving the block cancels the call."""
        span, metadata = self._start_span(method, parent)
        call = method(timeout=timeout_s, metadata=metadata, wait_for_ready=wait_for_ready)
        return self._owned(_keeping_status(call), span)

    def _start_span(self, method: object, parent: Context | None) -> tuple[Span, grpc.aio.Metadata]:
        name = bytes(getattr(method, "_method", b"unknown")).decode().lstrip("/")
        host, _, port = self.target.rpartition(":")
        attributes: dict[str, str | int] = {
            Attributes.RPC_SYSTEM: "grpc",
            Attributes.RPC_METHOD: name,
            Attributes.SERVER_ADDRESS: host,
        }
        if port.isdigit():
            attributes[Attributes.SERVER_PORT] = int(port)
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.CLIENT, attributes=attributes)
        carrier = dict(self._headers)
        PROPAGATOR.inject(carrier, context=set_span_in_context(span))
        return span, grpc.aio.Metadata(*carrier.items())

    @asynccontextmanager
    async def _owned(self, call: _AnyCall, span: Span) -> AsyncIterator[_AnyCall]:
        """The life of a call: always cancelled (of no effect once it has ended), its span always ended."""
        try:
            yield call
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.BaseError) as error:
            failure = await self._failure(error, call)
            span.set_attribute(Attributes.RPC_STATUS, failure.status.name)
            mark_error(span, failure)
            raise failure from error
        except BaseException as error:
            mark_error(span, error)
            raise
        finally:
            call.cancel()
            span.end()

    async def _failure(self, error: Exception, call: _Call) -> KvferryError:
        """What the failure of a read or write means: the peer's status, or that the stream ended under the writer."""
        if isinstance(error, grpc.aio.AioRpcError):
            return error_from_rpc(error, self.target)
        if not call.done():
            return Unavailable(f"{self.target}: the stream broke")
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            return Unavailable(f"{self.target}: the peer ended the stream early")
        return error_from_rpc(grpc.aio.AioRpcError(code, None, await call.trailing_metadata(), details), self.target)


class _KeepsStatus:
    """Stands before the library's core call so that a write which meets the end of the call does not hide its status.

    The library answers such a write with `set_internal_error`, which replaces the peer's status, not yet delivered, by
    "Internal error from Core" for good. Without it the write waits for the status and raises that.
    """

    def __init__(self, core_call: object) -> None:
        self._core_call = core_call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core_call, name)

    def set_internal_error(self, error: str) -> None:
        """Keeps the status open for the peer's."""


def _keeping_status(call: _AnyCall) -> _AnyCall:
    core_call = getattr(call, "_cython_call", None)
    if core_call is not None:
        call._cython_call = _KeepsStatus(core_call)  # type: ignore[attr-defined]
    return call
