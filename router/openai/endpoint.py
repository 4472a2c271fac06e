"""What all routes have in common: who calls, a bounded number at a time, a span, errors as JSON, and the client's end.

A handler runs beside a watch of the connection: when the client goes, the handler is cancelled, and with it the work.
The calls are counted among those of the gRPC server, so one drain waits for both and ends both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry.context import Context, attach
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvferry.errors import Cancelled, Internal, InvalidArgument, KvferryError, Unauthenticated
from kvferry.rpc.server import PROPAGATOR, CallsInFlight
from kvferry.telemetry import Attributes, mark_error
from router.admission import Admission
from router.openai.errors import answer_of, error_headers, error_json, in_headers
from router.openai.exchange import REQUEST_ID, ClientGone, Exchange
from router.request_log import FailedCall, log_failed_call
from router.serving import Serving
from router.validation import MAX_REQUEST_ID_CHARS, is_request_id

logger = logging.getLogger(__name__)

GONE = 499
"""What the figures call a response that nobody waited for."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler.

    Attributes:
        route: its path, as the figures and the log have it.
        span: the call's.
        started_s: Unix time of the router's start.
    """

    serving: Serving
    exchange: Exchange
    route: str
    span: Span
    started_s: int

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that say who calls."""
        return tuple(self.exchange.headers.items())

    async def body(self) -> bytes:
        """The whole body, within `router.max_request_bytes`."""
        return await self.exchange.body(self.serving.parts.config.router.max_request_bytes)


Handler = Callable[[Call], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class EndpointParts:
    """What endpoints share.

    Attributes:
        admission: calls in flight, each of which may hold a body in memory.
        calls: of the whole process, for the drain.
        responses: counted by route and status.
        started_s: Unix time of the router's start.
    """

    serving: Serving
    admission: Admission
    calls: CallsInFlight
    responses: Counter
    started_s: int


class Endpoint:
    """A route's ASGI application around its handler."""

    def __init__(self, parts: EndpointParts, route: str, handler: Handler) -> None:
        self._parts, self._route, self._handler = parts, route, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._parts.calls.add_current(self._route)
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        exchange = Exchange(scope, receive, send)
        span = self._start_span(scope["method"], headers)
        span.set_attribute(Attributes.REQUEST_ID, exchange.request_id)
        attach(set_span_in_context(span))  # ends with the task
        try:
            await self._answer(exchange, given, span)
        finally:
            status = exchange.status or GONE
            span.set_attribute(Attributes.HTTP_STATUS, status)
            span.end()
            self._parts.responses.labels(self._route, status).inc()

    async def _answer(self, exchange: Exchange, given_id: str, span: Span) -> None:
        """Runs the handler, and tells its error to whoever is there."""
        try:
            await self._run(exchange, given_id, span)
        except ClientGone:
            gone = Cancelled("the client went away")
            mark_error(span, gone)
            self._log(exchange, gone)
        except asyncio.CancelledError:
            ended_with = self._parts.calls.error_of_current()
            if ended_with is None:
                raise
            await self._tell(exchange, span, ended_with)
        except KvferryError as error:
            await self._tell(exchange, span, error)
        except Exception as error:
            fields = {"request_id": exchange.request_id, "route": self._route, "error": type(error).__name__}
            logger.exception("http_fault", extra={"fields": fields})
            await self._tell(exchange, span, Internal("internal error; the server's log has the details"))

    async def _run(self, exchange: Exchange, given_id: str, span: Span) -> None:
        """The handler, as long as the client is there. Raises ClientGone when it has gone."""
        serving = self._parts.serving
        if given_id and not is_request_id(given_id):
            raise InvalidArgument(REQUEST_ID, f"is not printable text of at most {MAX_REQUEST_ID_CHARS} characters")
        try:
            serving.tenant(tuple(exchange.headers.items()))
        except Unauthenticated as error:
            raise Unauthenticated(in_headers(error.message)) from error
        serving.check_open()
        with self._parts.admission.admit():
            work = asyncio.create_task(self._handler(Call(serving, exchange, self._route, span, self._parts.started_s)))
            gone = asyncio.create_task(exchange.wait_gone())
            try:
                await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientGone
                work.result()
            finally:
                await _end(work, gone)

    async def _tell(self, exchange: Exchange, span: Span, error: KvferryError) -> None:
        """As a response, or in a stream that began as its last event; such a stream has no `[DONE]`."""
        mark_error(span, error)
        self._log(exchange, error)
        with suppress(OSError):
            if exchange.status is None:
                await exchange.answer(error_json(error), answer_of(error).status, error_headers(error))
            elif exchange.is_streaming:
                await exchange.event(error_json(error))
                await exchange.end(is_whole=False)

    def _log(self, exchange: Exchange, error: KvferryError) -> None:
        answer = answer_of(error)
        status = answer.status if exchange.status is None else exchange.status
        tenant = self._parts.serving.tenant_name(tuple(exchange.headers.items()))
        log_failed_call(
            FailedCall(exchange.request_id, exchange.method, self._route, status, answer.code, tenant), error
        )

    def _start_span(self, method: str, headers: Mapping[str, str]) -> Span:
        parent = PROPAGATOR.extract(headers, context=Context())
        attributes = {Attributes.HTTP_METHOD: method, Attributes.HTTP_ROUTE: self._route}
        tracer = self._parts.serving.parts.telemetry.tracer
        return tracer.start_span(f"{method} {self._route}", context=parent, kind=SpanKind.SERVER, attributes=attributes)


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancels them and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
