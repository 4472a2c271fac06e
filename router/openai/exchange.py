"""One HTTP request and its response, on ASGI: a bounded body, a whole response or a stream of events, the client's end.

Events wait for the client's connection, and for nothing else.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from router.openai.errors import BodyNotJson, BodyTooLarge, BodyTooSlow
from router.validation import is_request_id

REQUEST_ID = "x-request-id"
SESSION_ID = "x-session-id"
JSON_TYPE = "application/json"
BODY_TIMEOUT_S = 60.0
"""How long a body may take: it holds a place among the requests in flight, and memory."""


def request_id(headers: Mapping[str, str]) -> str:
    """The caller's, or a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if is_request_id(given) else uuid.uuid4().hex


class ClientGone(Exception):
    """The client closed the connection; nobody is there to be told anything."""


class Exchange:
    """One of them.

    Attributes:
        request_id: told in the response's `x-request-id`.
        method: of the request.
        headers: of the request.
        path_params: parts of the path.
        status: of the response; None until it began.
        is_streaming: events were sent, and the end was not.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.headers = Headers(scope=scope)
        self.request_id = request_id(self.headers)
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.status: int | None = None
        self.is_streaming = False
        self._body_read = asyncio.Event()

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises BodyNotJson, BodyTooLarge as soon as that is known, BodyTooSlow, ClientGone."""
        _check_is_json(self.headers)
        length = self.headers.get("content-length", "")
        if length.isdigit() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(max_bytes)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body was not there after {BODY_TIMEOUT_S:g} s") from error
        finally:
            self._body_read.set()

    async def _read(self, max_bytes: int) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            more = message.get("more_body", False)
        return bytes(body)

    async def wait_gone(self) -> None:
        """Returns when the client has closed the connection; begins to look once the body was read."""
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole response."""
        body = _json(content)
        length = {"content-length": str(len(body))}
        await self._start(status, {"content-type": JSON_TYPE, **length, **(headers or {})})
        await self._send_body(body, more=False)

    async def event(self, content: Mapping[str, Any]) -> None:
        """Sends an event of a stream, and the response's head before the first one."""
        await self._send_event(_json(content))

    async def end(self, *, is_whole: bool) -> None:
        """Ends a stream; `[DONE]` says that it is whole."""
        if is_whole:
            await self._send_event(b"[DONE]")
        self.is_streaming = False
        await self._send_body(b"", more=False)

    async def _send_event(self, data: bytes) -> None:
        if self.status is None:
            self.is_streaming = True
            await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        await self._send_body(b"data: " + data + b"\n\n", more=True)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        named = {REQUEST_ID: self.request_id, **headers}
        fields = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await self._send(message)


def _json(content: Mapping[str, Any]) -> bytes:
    """In ASCII: clients split events at what they take for the end of a line, U+2028 for some of them."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _check_is_json(headers: Mapping[str, str]) -> None:
    """A body must be declared JSON: what pages of other sites may send unasked is text, a form, or declared nothing."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        found = f"is {kind!r:.80}" if kind else "is not set"
        raise BodyNotJson("content-type", f"{found}; a body is sent as {JSON_TYPE}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise BodyNotJson("content-encoding", f"is {encoding!r:.80}; a body is sent as it is")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge("body", f"has more than {max_bytes} bytes, the most allowed")
