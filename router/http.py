"""The HTTP side: `/live`, `/health`, `/metrics`, in the router's own event loop; `openai/` adds its routes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvferry.errors import FailedPrecondition

logger = logging.getLogger(__name__)

NOT_READY = 503
PROBES = ["GET", "HEAD"]
CLOSE_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 75
"""How long an idle connection stays: longer than clients keep theirs (the OpenAI package 5 s, proxies often 60), which
would else send a request into one that is being closed."""


def make_app(registry: CollectorRegistry, why_not_ready: Callable[[], Sequence[str]]) -> FastAPI:
    """The application. `why_not_ready` is empty while a request could be served."""
    app = FastAPI(title="kvferry", docs_url=None, redoc_url=None, openapi_url=None)

    @app.api_route("/live", methods=PROBES)
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    @app.api_route("/health", methods=PROBES)
    async def health() -> JSONResponse:
        reasons = list(why_not_ready())
        if reasons:
            return JSONResponse({"status": "not ready", "reasons": reasons}, status_code=NOT_READY)
        return JSONResponse({"status": "ready"})

    @app.api_route("/metrics", methods=PROBES)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on `listen` (host:port, port 0 for any); use it as `async with`.

    Raises FailedPrecondition naming the address when it cannot be bound.
    """

    def __init__(self, app: FastAPI, listen: str) -> None:
        self._app = app
        self._listen = listen
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        listener = _bind(self._listen)
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=2 * CLOSE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise FailedPrecondition(f"HTTP listen address {listen!r} must be host:port", field="http")
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise FailedPrecondition(f"cannot listen on {listen} for HTTP: {error.strerror}", field="http") from error
