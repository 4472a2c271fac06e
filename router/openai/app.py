"""The routes of OpenAI's interface, added to the router's HTTP application.

They share its port with `/live`, `/health` and `/metrics`, which need no key; these do, where tenants are configured,
but for `/openapi.json` and `/docs`, which tell nothing of this router.
"""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.rpc.server import CallsInFlight
from router.admission import Admission
from router.openai.endpoint import Endpoint, EndpointParts, Handler
from router.openai.errors import NoSuchMethod, NoSuchRoute, answer_of, error_json
from router.openai.exchange import REQUEST_ID, request_id
from router.openai.generation import chat, complete
from router.openai.models import list_models, show_model
from router.openai.openapi import PAGE_PATH, PATH, openapi, page
from router.openai.tokens import detokenize, tokenize
from router.request_log import FailedCall, log_failed_call
from router.serving import Serving

NO_METHOD = 405
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", show_model),
    ("POST", "/v1/completions", complete),
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)


def add_routes(app: FastAPI, serving: Serving, calls: CallsInFlight, registry: CollectorRegistry) -> None:
    """Adds them all. `calls`: those that a drain waits for and ends."""
    responses = Counter(
        "kvferry_http_responses",
        "Responses of the OpenAI interface; 499: the client went away before its response began.",
        ("route", "status"),
        registry=registry,
    )
    admission = Admission(serving.parts.config.router.max_queue)
    parts = EndpointParts(serving, admission, calls, responses, started_s=int(time.time()))
    for method, path, handler in ROUTES:
        endpoint = Endpoint(parts, path.replace(":path", ""), handler)  # as the description has it
        app.router.routes.append(Route(path, endpoint, methods=[method]))
    _add_description(app)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.router.redirect_slashes = False  # a path with a slash too many is 404, as any that is not there
    app.add_middleware(_Named)


class _Named:
    """Tells `x-request-id` in responses that do not yet: probes, metrics, the description."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if REQUEST_ID not in headers:
                    headers[REQUEST_ID] = request_id(Headers(scope=scope))
            await send(message)

        await self._app(scope, receive, send_named)


def _add_description(app: FastAPI) -> None:
    """What the routes take, for programs and for people."""
    document = openapi()
    html = page(document)

    async def show_document(_: Request) -> Response:
        return JSONResponse(document)

    async def show_page(_: Request) -> Response:
        return HTMLResponse(html)

    app.router.routes.append(Route(PATH, show_document))
    app.router.routes.append(Route(PAGE_PATH, show_page))


async def _no_such_route(request: Request, error: Exception) -> Response:
    """What the routing itself refuses, in the same shape; 405 tells the methods there are (`allow`)."""
    assert isinstance(error, HTTPException)
    kind = NoSuchMethod if error.status_code == NO_METHOD else NoSuchRoute
    told = kind(f"there is no {request.method} {request.url.path} here")
    answer, named = answer_of(told), request_id(Headers(scope=request.scope))
    log_failed_call(FailedCall(named, request.method, "", answer.status, answer.code), told)
    headers = {**(error.headers or {}), REQUEST_ID: named}
    return JSONResponse(error_json(told), status_code=answer.status, headers=headers)
