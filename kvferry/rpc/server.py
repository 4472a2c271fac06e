"""Servers: health, reflection, tracing, error mapping and draining around the servicers of a process.

Handlers are coroutines that write with `context.write` (an async generator gets GeneratorExit instead of
CancelledError in some cancels). One interceptor around them continues the caller's trace, makes the span current in the
handler's own task, and turns errors into a status with google.rpc details.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from opentelemetry.context import Context, attach
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.errors import Cancelled, FailedPrecondition, Internal, InvalidArgument, KvferryError, Unavailable
from kvferry.rpc.listen import check_can_listen
from kvferry.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, server_options
from kvferry.rpc.status import status_details
from kvferry.tasks import Changes
from kvferry.telemetry import Attributes, mark_error

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

_T = TypeVar("_T")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

logger = logging.getLogger(__name__)

LIVENESS_SERVICE = "liveness"
"""Name the health service knows the process itself by: serving as long as it makes progress, also while it drains or
waits for its peers. Whoever restarts stuck processes asks for it; whoever sends requests asks for the others."""

STATUS_GRACE_S = 1.0
"""How long ended handlers have to get their status out before the transport closes."""

PROPAGATOR = TraceContextTextMapPropagator()


class RpcServer:
    """A grpc.aio server with health, reflection, tracing, error mapping and draining. Create it inside the event loop.

    `background_methods` (bare names, such as `Watch`) are streams that end only with the server; draining does not wait
    for them. `changes` is told whenever a call begins or ends.
    """

    def __init__(
        self,
        *,
        tracer: Tracer | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        background_methods: frozenset[str] = frozenset(),
        changes: Changes | None = None,
    ) -> None:
        self._calls = CallsInFlight(background_methods, changes or Changes())
        interceptor = _ServerInterceptor(tracer or NoOpTracer(), self._calls)
        self.grpc = grpc.aio.server(interceptors=[interceptor], options=server_options(max_message_bytes))
        self._health = health_aio.HealthServicer()
        self._services: tuple[str, ...] = ()

    async def start(self, listen: str, services: Sequence[str], *, serving: bool = True) -> str:
        """Listens on `listen` (host:port, port 0 for any) and returns the address bound.

        `services` are the full names of the services added, for health and reflection. Raises FailedPrecondition naming
        the address when it cannot be bound.
        """
        self._services = ("", *services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        listed = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, self.grpc)
        try:
            address = _bind(self.grpc, listen)
        except FailedPrecondition:
            await self.grpc.stop(None)  # a server that is dropped unstopped complains when the loop is gone
            raise
        await self.set_serving(serving)
        await self.set_alive(True)
        await self.grpc.start()
        return address

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the server and each of its services."""
        for service in self._services:
            await self._health.set(service, _health_status(serving))

    async def set_alive(self, alive: bool) -> None:
        """What the health service answers for `LIVENESS_SERVICE`."""
        await self._health.set(LIVENESS_SERVICE, _health_status(alive))

    @property
    def calls(self) -> CallsInFlight:
        """The calls that run."""
        return self._calls

    async def drain(self, grace_s: float, hurry: asyncio.Event | None = None, error: Unavailable | None = None) -> None:
        """Not serving at once; running calls get `grace_s` (less once `hurry` is set), then end with `error`.

        New calls are still taken, because what runs may need them (a shipment belongs to a running decode); refusing
        new work is the services' own affair.
        """
        await self.set_serving(False)
        await self._calls.wait_idle(grace_s, hurry)
        await self._calls.end_all(STATUS_GRACE_S, error or Unavailable("the server is shutting down"))
        await self.grpc.stop(STATUS_GRACE_S)


def _health_status(is_serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING


def _bind(server: grpc.aio.Server, listen: str) -> str:
    check_can_listen(listen)  # the library's own failure has no reason in it and is logged on top
    try:
        bound = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise FailedPrecondition(f"cannot listen on {listen}: {error}", field="listen") from error
    return f"{listen.rpartition(':')[0]}:{bound}"


class CallsInFlight:
    """Tasks of running handlers, so that a drain can wait for them and then end them with a status."""

    def __init__(self, background_methods: frozenset[str], changes: Changes) -> None:
        self._background = background_methods
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._errors: dict[asyncio.Task[Any], KvferryError] = {}  # of those that were ended
        self._last_error: KvferryError | None = None  # of all that end from now on
        self.changes = changes

    def add_current(self, method: str) -> bool:
        """Counts the running task in; says whether its call is a background one."""
        task = asyncio.current_task()
        assert task is not None
        self._methods[task] = method.rpartition("/")[2]
        task.add_done_callback(self._remove)
        self.changes.notify()
        return self._methods[task] in self._background

    def _remove(self, task: asyncio.Task[Any]) -> None:
        del self._methods[task]
        self._errors.pop(task, None)
        self.changes.notify()

    def error_of_current(self) -> KvferryError | None:
        """What the running task was ended with; None where it was not."""
        task = asyncio.current_task()
        return self._last_error if task is None else self._errors.get(task, self._last_error)

    def num_running(self, methods: frozenset[str]) -> int:
        """Calls of these methods (bare names)."""
        return sum(method in methods for method in self._methods.values())

    @property
    def _has_foreground(self) -> bool:
        return any(method not in self._background for method in self._methods.values())

    async def wait_idle(self, grace_s: float, hurry: asyncio.Event | None) -> None:
        """Returns when only background calls run, after `grace_s`, or with `hurry`."""
        hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
        idle = asyncio.ensure_future(self._idle())
        try:
            await asyncio.wait([hurried, idle], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            idle.cancel()

    async def _idle(self) -> None:
        while self._has_foreground:
            await self.changes.wait_beyond(self.changes.number)

    def end(self, methods: frozenset[str] | None, error: KvferryError) -> Sequence[asyncio.Task[Any]]:
        """Ends the calls of these methods, all for None, with `error`; returns their tasks."""
        ended = [task for task, method in self._methods.items() if methods is None or method in methods]
        for task in ended:
            self._errors.setdefault(task, error)
            task.cancel()
        return ended

    async def end_all(self, timeout_s: float, error: KvferryError) -> None:
        """Ends what runs, and what may still come, and waits for the statuses."""
        self._last_error = error
        tasks = self.end(None, error)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)


def _careful(parse: Callable[[bytes], Any], *, raises: bool) -> Callable[[bytes], Any]:
    """`parse`, but bytes that are no message become InvalidArgument: raised to the handler that reads a stream, handed
    to the wrapper of one that gets a single request (the library parses before any handler runs)."""

    def parse_or_refuse(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            refusal = InvalidArgument("request", f"not a valid message: {error}")
            if raises:
                raise refusal from error
            return refusal

    return parse_or_refuse


class _ServerInterceptor(grpc.aio.ServerInterceptor):
    """Around every handler of ours: trace, error mapping, accounting. The health and reflection services pass by."""

    def __init__(self, tracer: Tracer, calls: CallsInFlight) -> None:
        self._tracer = tracer
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # the library's stubs and its code disagree on whether this may be None
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        behavior = getattr(handler, "_".join(kind))
        assert not inspect.isasyncgenfunction(behavior), "stream handlers are coroutines that use context.write"
        wrapped = self._wrap(behavior, handler_call_details.method.lstrip("/"))
        make = getattr(grpc, f"{'_'.join(kind)}_rpc_method_handler")
        parse = _careful(handler.request_deserializer, raises=handler.request_streaming)
        return make(wrapped, parse, handler.response_serializer)

    def _wrap(self, behavior: Callable[[Any, Any], Awaitable[_T]], method: str) -> Callable[[Any, Any], Awaitable[_T]]:
        async def call(request: Any, context: ServicerContext[Any, Any]) -> _T:
            is_background = self._calls.add_current(method)
            # A stream that lives as long as the server would be a trace that never ends.
            span = INVALID_SPAN if is_background else self._start_span(method, context)
            # Current for this task and those it starts; it ends with the task, so nothing is ever detached.
            attach(set_span_in_context(span))
            try:
                if isinstance(request, InvalidArgument):
                    raise request
                return await behavior(request, context)
            except BaseException as error:
                await self._fail(error, method, context, span)
                raise
            finally:
                span.end()

        return call

    def _start_span(self, method: str, context: ServicerContext[Any, Any]) -> Span:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        parent = PROPAGATOR.extract(metadata, context=Context())
        attributes = {Attributes.RPC_SYSTEM: "grpc", Attributes.RPC_METHOD: method}
        return self._tracer.start_span(method, context=parent, kind=SpanKind.SERVER, attributes=attributes)

    async def _fail(self, error: BaseException, method: str, context: ServicerContext[Any, Any], span: Span) -> None:
        """Ends the call with the status of `error`; returns only if the handler has aborted it itself."""
        if isinstance(error, grpc.aio.AbortError):
            mark_error(span, error)
            return
        ended = isinstance(error, asyncio.CancelledError)
        ended_with = self._calls.error_of_current()
        if ended and ended_with is not None and not context.cancelled():
            error = ended_with
        elif ended or context.cancelled():  # a write to a caller that has gone fails with errors of many kinds
            mark_error(span, Cancelled("the caller went away"))
            raise asyncio.CancelledError from error
        failure = error if isinstance(error, KvferryError) else self._unexpected(error, method)
        mark_error(span, failure)
        span.set_attribute(Attributes.RPC_STATUS, failure.status.name)
        await context.abort(failure.status, *status_details(failure))

    def _unexpected(self, error: BaseException, method: str) -> KvferryError:
        """What the caller may know of a fault of ours; the log has the rest, once."""
        logger.error("rpc_failed", exc_info=error, extra={"fields": {"method": method, "error": type(error).__name__}})
        return Internal("internal error; the server's log has the details under this request's trace id")
