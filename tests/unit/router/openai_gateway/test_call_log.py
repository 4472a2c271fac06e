"""What a call of HTTP that is refused or fails leaves in the log: one line that finds it, without a text or a key."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from kvferry.config import TenantConfig
from kvferry.errors import FailedPrecondition
from tests.support.fake_workers import FakeNetwork, Point
from tests.support.workers import until
from tests.unit.router.openai_gateway.conftest import OUTPUT, StartGateway

KEY = "good-key-1"
SECRET = "the words of the prompt"
JSON = {"content-type": "application/json"}
BODY: dict[str, Any] = {"model": "tiny", "prompt": SECRET, "max_tokens": 2}


def lines_of(caplog: pytest.LogCaptureFixture, *events: str) -> list[dict[str, Any]]:
    """Fields of the lines of these events, with their names."""
    return [
        {"event": record.getMessage(), **record.fields}  # type: ignore[attr-defined]
        for record in caplog.records
        if record.getMessage() in events
    ]


def body(**fields: object) -> bytes:
    return json.dumps({**BODY, **fields}).encode()


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "code", "error"),
    [
        ("POST", "/v1/completions", body(temperature=-1), {}, 400, "invalid_value", "INVALID_ARGUMENT"),
        ("POST", "/v1/completions", body(unheard=1), {}, 400, "unsupported_field", "UNSUPPORTED_FIELD"),
        ("POST", "/v1/completions", b"{", {}, 400, "invalid_value", "INVALID_ARGUMENT"),
        ("POST", "/v1/completions", body(model="gpt"), {}, 404, "model_not_found", "NOT_FOUND"),
        (
            "POST",
            "/v1/completions",
            body(),
            {"content-type": "text/plain"},
            415,
            "unsupported_media_type",
            "UNSUPPORTED_MEDIA_TYPE",
        ),
        ("POST", "/v1/completions", body(stop=["a" * 5000]), {}, 413, "request_too_large", "REQUEST_TOO_LARGE"),
        ("GET", "/v1/models", b"", {"authorization": "Bearer bad-key-1"}, 401, "invalid_api_key", "UNAUTHENTICATED"),
        ("GET", "/v1/models/none", b"", {}, 404, "model_not_found", "NOT_FOUND"),
        ("POST", "/v1/embeddings", b"{}", {}, 404, "unknown_url", "NOT_FOUND"),
        ("PUT", "/v1/completions", b"{}", {}, 405, "method_not_supported", "METHOD_NOT_ALLOWED"),
    ],
)
async def test_a_refused_call_leaves_one_line_with_its_id(
    start_gateway: StartGateway,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    content: bytes,
    headers: dict[str, str],
    status: int,
    code: str,
    error: str,
) -> None:
    tenants = (TenantConfig.model_validate({"name": "search", "api_keys": [KEY]}),)
    async with start_gateway(tenants=tenants, max_request_bytes=4096) as gateway:
        all_headers = {"authorization": f"Bearer {KEY}", **JSON, "x-request-id": "mine", **headers}
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            answer = await http.request(method, path, content=content, headers=all_headers)
        assert answer.status_code == status and answer.headers["x-request-id"] == "mine"
    (line,) = lines_of(caplog, "http_request_failed")
    assert (line["request_id"], line["method"], line["status"]) == ("mine", method, status)
    assert (line["code"], line["error"]) == (code, error) and line["message"]
    is_routed = code not in ("unknown_url", "method_not_supported")
    assert line["route"] == (path.replace("none", "{name}") if is_routed else "")
    assert line["tenant"] == ("search" if is_routed and status != 401 else "")
    told = str([vars(record) for record in caplog.records])
    assert SECRET not in told and "key-1" not in told


async def test_a_refused_request_is_found_by_its_label_tenant_and_route(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_gateway() as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post("/v1/completions", content=body(temperature=-1), headers=JSON)
    (line,) = lines_of(caplog, "request_failed")
    assert line["label"] == answer.headers["x-request-id"] and line["request"]
    assert (line["route"], line["model"], line["workers"]) == ("/v1/completions", "tiny", [])


async def test_a_served_request_is_told_with_its_route_and_workers(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tenants = (TenantConfig.model_validate({"name": "search", "api_keys": [KEY]}),)
    headers = {**JSON, "authorization": f"Bearer {KEY}"}
    async with start_gateway(tenants=tenants) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        await http.post("/v1/completions", content=body(), headers=headers)
    (line,) = lines_of(caplog, "request_finished")
    assert (line["route"], line["tenant"], line["model"]) == ("/v1/completions", "search", "tiny")
    assert line["workers"] == ["prefill-0", "decode-0"]
    assert lines_of(caplog, "http_request_failed", "http_request_cancelled") == []


async def test_a_stream_that_breaks_and_a_client_that_goes_leave_a_line(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start_gateway(FakeNetwork(OUTPUT), max_attempts=1) as gateway:
        gateway.network.fail(Point.TOKEN, FailedPrecondition("broke"), index=2)
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            await http.post("/v1/completions", content=body(stream=True, max_tokens=8), headers=JSON)
        (line,) = lines_of(caplog, "http_request_failed")
        assert (line["status"], line["code"]) == (200, "failed_precondition")
        gateway.network.hold(Point.PREFILL_START)
        _, writer = await asyncio.open_connection(*gateway.host_port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body())}\r\n\r\n".encode() + body())
        await gateway.network.reached(Point.PREFILL_START)
        writer.close()
        await until(lambda: len(lines_of(caplog, "http_request_cancelled")) == 1)
        assert lines_of(caplog, "http_request_cancelled")[0]["status"] == 499


async def test_a_grpc_client_at_this_port_is_told_of_in_a_line_and_an_answer(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_gateway() as gateway:
        reader, writer = await asyncio.open_connection(*gateway.host_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert b" 400 " in answer and b"router.grpc_listen" in answer
    (line,) = lines_of(caplog, "not_http")
    assert line["status"] == 400 and line["peer"].startswith("127.0.0.1:")
    assert "Invalid HTTP" not in caplog.text
