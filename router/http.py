"""The HTTP side: `/live`, `/health`, `/metrics`, in the router's own event loop; `openai/` adds its routes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferry.errors import FailedPrecondition
from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

NOT_READY = 503
PROBES = ["GET", "HEAD"]
CLOSE_TIMEOUT_S, CLOSE_POLL_S = 2.0, 0.005
TICK_S, TICKS_A_DAY = 0.1, 864_000
"""As in the library, which sets the date of its answers at every tenth."""
KEEP_ALIVE_S = 75
"""How long an idle connection stays: longer than clients keep theirs (the OpenAI package 5 s, proxies often 60), which
would else send a request into one that is being closed."""


UVICORNS_NOT_HTTP = "Invalid HTTP request received."
NOT_HTTP = "this is no HTTP/1.1; this port is router.http_listen, gRPC is on router.grpc_listen"


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


class _Protocol(H11Protocol):
    """Tells of bytes that are no HTTP in a structured line: a gRPC client at this port, as a rule."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _Quiet(self.logger)

    def send_400_response(self, msg: str) -> None:
        """As the library's, with its reason to both sides."""
        peer = ":".join(map(str, self.client or ()))
        log_event(logger, "not_http", level=logging.WARNING, peer=peer, status=400, message=NOT_HTTP)
        super().send_400_response(NOT_HTTP)


class _Quiet(logging.Logger):
    """The library's logger without its own line for what `_Protocol` tells."""

    def __init__(self, parent: logging.Logger) -> None:
        super().__init__(parent.name, parent.getEffectiveLevel())
        self.parent = parent

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != UVICORNS_NOT_HTTP


class _Server(uvicorn.Server):
    """Leaves signals to the process, and ends when it is told to: the library looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()

    def end(self) -> None:
        """Whoever has a connection gets `CLOSE_TIMEOUT_S`."""
        self.should_exit = True
        self._is_told.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % TICKS_A_DAY
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_told.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()  # at once, where it is idle
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while state.connections or state.tasks:  # noqa: ASYNC110 - the library has no event for it
                    await asyncio.sleep(CLOSE_POLL_S)
                for server in self.servers:
                    await server.wait_closed()
        for task in list(state.tasks):
            task.cancel()


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
            http=_Protocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._server.end()
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
