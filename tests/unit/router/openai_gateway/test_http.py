"""The wire itself: events, bodies, headers, clients that go away or do not read."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from kvferry.config import ModelConfig, TenantConfig
from kvferry.sampling import Finish, FinishKind
from kvferry.telemetry import Attributes
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import worker_pb2
from router.openai import exchange
from router.openai.app import ROUTES
from router.openai.body import Body
from router.openai.requests import ChatBody, CompletionBody
from router.openai.tokens import DetokenizeBody, TokenizeBody
from tests.support.fake_workers import FakeNetwork, Point
from tests.support.workers import until
from tests.unit.router.openai_gateway.conftest import OUTPUT, Gateway, StartGateway

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "AB", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
IS_JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
ODD_VALUES: tuple[object, ...] = (
    "text",
    "",
    math.nan,
    math.inf,
    -1,
    1.5,
    1e300,
    1 << 70,
    True,
    [],
    {},
    ["a", 1, None],
    [[]],
    {"a": [{}]},
)


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> AsyncIterator[Gateway]:
    async with start_gateway() as running:
        yield running


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0, headers=IS_JSON) as client:
        yield client


def fault_in(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    error: dict[str, Any] = content["error"]
    return error


async def test_events_are_framed_one_a_chunk(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "HE"
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)


async def test_what_some_take_for_the_end_of_a_line_is_escaped(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        tokenizer = gateway.router.app.models.find("tiny").tokenizer
        ids = tokenizer.encode("a\u2028b\x85c\r\n")
        gateway.network.output[: len(ids)] = ids
        async with httpx.AsyncClient() as http:
            fields = {**COMPLETION, "max_tokens": len(ids), "stream": True}
            response = await http.post(f"{gateway.url}/v1/completions", json=fields)
        assert response.content.isascii()
        chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if "{" in line]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a\u2028b\x85c\r\n"


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "n": NaN}',
        b'{"prompt": "a", "n": -Infinity}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "response_format": {"type": "text", "type": "text"}}',
        b"[" * 5000,
        b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        '{"prompt": "\xe4"}'.encode("latin-1"),
        b'{"prompt": "a"} {}',
    ],
)
async def test_a_body_that_is_none_is_refused(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    fault_in(await http.post(path, content=body))


@pytest.mark.parametrize(("path", "kind"), [("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)])
async def test_every_field_with_odd_values_is_served_or_a_bad_request(
    http: httpx.AsyncClient, gateway: Gateway, path: str, kind: type[CompletionBody] | type[ChatBody]
) -> None:
    """Never an error of ours; a value of a wrong type is refused by the field's name."""
    finish = finish_to_pb(Finish(FinishKind.LENGTH))
    gateway.network.beams = [worker_pb2.Beam(token_ids=OUTPUT[:2], finish=finish)]
    num_refused = 0
    for name in kind.model_fields:
        for value in ODD_VALUES:
            body = {**BODIES[path], name: value}
            response = await http.post(path, content=json.dumps(body))
            if response.status_code == 200:
                continue
            error = fault_in(response, 404 if name == "model" and response.status_code == 404 else 400)
            assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error"), error
            num_refused += 1
    assert num_refused > 8 * len(kind.model_fields)
    await gateway.network.all_ended()


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        ("/v1/completions", "temperature", "1", "temperature"),
        ("/v1/completions", "temperature", math.nan, "temperature"),
        ("/v1/completions", "n", 1.0, "n"),
        ("/v1/completions", "n", 1 << 32, "n"),
        ("/v1/completions", "stop", ["a", 5], "stop[1]"),
        ("/v1/completions", "stop", [""], "stop[0]"),
        ("/v1/completions", "prompt", None, "prompt"),
        ("/v1/completions", "prompt", [], "prompt"),
        ("/v1/completions", "prompt", [1, -1], "prompt[1]"),
        ("/v1/completions", "prompt", [[1], [1, "a"]], "prompt[1][1]"),
        ("/v1/completions", "prompt", ["a"] * 129, "prompt"),
        ("/v1/completions", "logit_bias", {"x": 1}, "logit_bias.x"),
        ("/v1/completions", "logit_bias", {"01": 1, "1": -1}, "logit_bias.01"),
        ("/v1/completions", "logit_bias", {"5_04": 1}, "logit_bias.5_04"),
        ("/v1/completions", "logit_bias", {" 5": 1}, "logit_bias. 5"),
        ("/v1/completions", "logit_bias", {str(key): 1 for key in range(5000)}, "body"),
        ("/v1/completions", "stream_options", {"include_usage": True}, "stream_options"),
        ("/v1/completions", "length_penalty", 1.0, "length_penalty"),
        ("/v1/completions", "response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("/v1/completions", "unknown", None, "unknown"),
        ("/v1/completions", "request_id", "a\nb", "request_id"),
        ("/v1/completions", "user", "a" * 257, "user"),
        ("/v1/chat/completions", "messages", [], "messages"),
        ("/v1/chat/completions", "messages", None, "messages"),
        ("/v1/chat/completions", "messages", [{"role": "user"}], "messages[0].content"),
        ("/v1/chat/completions", "messages", [{"role": "", "content": "a"}], "messages[0].role"),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "a", "speaker": "b"}], "messages[0].speaker"),
        (
            "/v1/chat/completions",
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
        ("/v1/chat/completions", "top_logprobs", 2, "top_logprobs"),
        ("/v1/chat/completions", "max_completion_tokens", 3, "max_completion_tokens"),
    ],
)
async def test_what_is_refused_is_named_by_its_place(
    http: httpx.AsyncClient, path: str, field: str, value: object, param: str
) -> None:
    response = await http.post(path, content=json.dumps({**BODIES[path], field: value}))
    assert fault_in(response)["param"] == param


async def test_null_is_as_good_as_absent(http: httpx.AsyncClient) -> None:
    for path, kind in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        nulls = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
        response = await http.post(path, json={**nulls, **BODIES[path]})
        assert response.status_code == 200, response.text


async def test_more_than_one_constraint_is_refused(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "guided_regex": "a", "structured_outputs": {"choice": ["a"]}}
    assert "more than one constraint" in fault_in(await http.post("/v1/completions", json=body))["message"]


async def test_a_body_above_the_limit_is_refused_before_it_is_read_whole(start_gateway: StartGateway) -> None:
    async with start_gateway(max_request_bytes=2048) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.host_port)
        writer.write(HEAD + b"content-length: 1000000000\r\n\r\n")
        async with asyncio.timeout(10):
            assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=gateway.url, headers=IS_JSON) as http:

            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(4):
                    yield b" " * 1024

            told = fault_in(await http.post("/v1/completions", content=chunks()), 413)
            assert told["code"] == "request_too_large" and "2048" in told["message"]
            assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_body_that_does_not_come_gives_up_its_place(gateway: Gateway) -> None:
    with patch.object(exchange, "BODY_TIMEOUT_S", 0.05):
        reader, writer = await asyncio.open_connection(*gateway.host_port)
        writer.write(HEAD + b"content-length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_a_number_that_is_none_is_named_by_its_field_or_the_body(http: httpx.AsyncClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": math.nan}}}
    for field, value, param in (("temperature", math.nan, "temperature"), ("response_format", schema, "body")):
        response = await http.post("/v1/completions", content=json.dumps({**COMPLETION, field: value}))
        assert fault_in(response)["param"] == param


async def test_a_key_that_is_there_twice_is_named(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "AB", "n": 1, "temperature": 0, "n": 2}'
    assert "key 'n' more than once" in fault_in(await http.post("/v1/completions", content=body))["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_a_body_that_is_declared_json_is_taken(http: httpx.AsyncClient, kind: str) -> None:
    body = json.dumps(COMPLETION)
    assert (await http.post("/v1/completions", content=body, headers={"content-type": kind})).status_code == 200


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-type": ""}, "content-type"),
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type"),
        ({"content-type": "multipart/form-data; boundary=application/json"}, "content-type"),
        ({"content-encoding": "gzip"}, "content-encoding"),
    ],
)
async def test_a_body_that_is_declared_something_else_is_not(
    http: httpx.AsyncClient, gateway: Gateway, headers: dict[str, str], param: str
) -> None:
    """Browsers send text and forms to any site unasked; a page must not run a router that needs no key."""
    for path in (*BODIES, "/tokenize", "/detokenize"):
        error = fault_in(await http.post(path, content=json.dumps(COMPLETION), headers=headers), 415)
        assert (error["param"], error["code"]) == (param, "unsupported_media_type")
    assert gateway.network.calls == []


async def test_routes_that_are_not_there(http: httpx.AsyncClient) -> None:
    for path in ("/v1/embeddings", "/v1", "/", "/openai.json"):
        assert fault_in(await http.post(path, json={}), 404)["code"] == "unknown_url"
    for method, path, allowed in (
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("OPTIONS", "/v1/chat/completions", {"POST"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
    ):
        answer = await http.request(method, path)
        assert fault_in(answer, 405)["code"] == "method_not_supported"
        assert set(answer.headers["allow"].split(", ")) == allowed
        assert "access-control-allow-origin" not in answer.headers


async def test_heads_are_answers_without_a_body(http: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/live", "/metrics", "/openapi.json", "/docs"):
        answer = await http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    for path, status in (("/v1/completions", 405), ("/v1/models/none", 404)):
        answer = await http.head(path)
        assert (answer.status_code, answer.content) == (status, b"")


# --- what it says of itself ---


async def test_the_routes_are_described_with_what_they_take(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(method, path.replace(":path", "")) for method, path, _ in ROUTES}
    schemas = document["components"]["schemas"]
    kinds: dict[str, type[Body]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
    kinds |= {"/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}
    for path, kind in kinds.items():
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[reference.rpartition("/")[2]]
        assert set(schema["properties"]) == {field.alias or name for name, field in kind.model_fields.items()}
        assert schema["additionalProperties"] is False
        assert {"200", "400", "401", "415", "429", "503"} <= set(operation["responses"])
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in schemas


async def test_the_page_of_the_routes_loads_nothing(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for word in ("POST /v1/chat/completions", "max_completion_tokens", "GET /v1/models/{name}", "openapi.json"):
        assert word in page.text
    assert not re.search(r"<script|<link|src=|https?://", page.text)


async def test_the_description_needs_no_key_and_tokens_are_counted_by_tenant(start_gateway: StartGateway) -> None:
    names = ("search", "shop")
    tenants = tuple(TenantConfig.model_validate({"name": name, "api_keys": [f"{name}-key-1"]}) for name in names)
    async with start_gateway(tenants=tenants) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/openapi.json")).status_code == (await http.get("/docs")).status_code == 200
        for name, stream, number in (("search", False, 2), ("shop", True, 3), ("search", True, 5), ("none", False, 1)):
            body = {**COMPLETION, "max_tokens": number, "stream": stream}
            answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {name}-key-1"})
            assert answer.status_code == (401 if name == "none" else 200)
        shown = (await http.get("/metrics")).text
    for name, num_prompt, num_output in (("search", 4, 7), ("shop", 2, 3)):
        assert f'kvferry_tokens_total{{kind="prompt",tenant="{name}"}} {num_prompt}.0' in shown
        assert f'kvferry_tokens_total{{kind="output",tenant="{name}"}} {num_output}.0' in shown


async def test_every_response_of_the_port_has_an_id(http: httpx.AsyncClient) -> None:
    for path in ("/live", "/health", "/metrics", "/openapi.json", "/docs", "/v1/models", "/nowhere"):
        assert (await http.get(path)).headers["x-request-id"] not in ("", "mine"), path
        ids = (await http.get(path, headers={"x-request-id": "mine"})).headers.get_list("x-request-id")
        assert ids == ["mine"], path
    slash = await http.post("/v1/chat/completions/", json=CHAT)
    assert fault_in(slash, 404)["code"] == "unknown_url"


async def test_roles_are_those_that_are_known(http: httpx.AsyncClient, gateway: Gateway) -> None:
    """A role that no template knows would be written into the prompt by some and left out by others."""

    async def prompt_of(role: str) -> list[int]:
        messages = [{"role": role, "content": "a"}, *CHAT["messages"]]
        told: list[int] = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        assert (await http.post("/v1/chat/completions", json={**CHAT, "messages": messages})).status_code == 200
        assert list(gateway.network.calls_of("prefill")[-1].spec.token_ids) == told
        return told

    assert await prompt_of("developer") == await prompt_of("system") != await prompt_of("user")
    messages = [*CHAT["messages"], {"role": "nobody", "content": "a"}]
    for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", {})):
        error = fault_in(await http.post(path, json={**body, "messages": messages}))
        assert error["param"] == "messages[1].role"
        assert "'nobody' is none of system, developer, user, assistant, tool" in error["message"]


# --- models and text ---


async def test_models_and_aliases_are_listed(start_gateway: StartGateway, model_folder: Path) -> None:
    other = ModelConfig(name="big", path=str(model_folder), served_name="org/big")
    async with start_gateway(aliases=("default",), models=(other,)) as gateway:
        models = {model.id: model async for model in gateway.openai.models.list()}
        assert set(models) == {"tiny", "default", "org/big"}
        assert {name: (model.model_extra or {})["root"] for name, model in models.items()} == {
            "tiny": "tiny",
            "default": "tiny",
            "org/big": "org/big",
        }
        assert (models["tiny"].model_extra or {})["max_model_len"] == 256
        assert (models["org/big"].model_extra or {})["max_model_len"] is None
        assert (await gateway.openai.models.retrieve("default")).id == "default"
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            assert (await http.get("/v1/models/org/big")).json()["id"] == "org/big"
            for unknown in ("none", ""):
                assert fault_in(await http.get(f"/v1/models/{unknown}"), 404)["param"] == "model"
        by_alias = await gateway.openai.completions.create(model="default", prompt="AB", max_tokens=1)
        assert by_alias.model == "tiny"


async def test_text_becomes_tokens_and_text_again(http: httpx.AsyncClient, gateway: Gateway) -> None:
    told = (await http.post("/tokenize", json={"prompt": "AB", "return_token_strs": True})).json()
    assert told == {"count": 2, "max_model_len": 256, "tokens": [35, 36], "token_strs": ["A", "B"]}
    assert (await http.post("/detokenize", json={"tokens": [35, 36, 1]})).json() == {"prompt": "AB<|im_start|>"}
    chat = (await http.post("/tokenize", json={"model": "tiny", "messages": CHAT["messages"]})).json()
    await http.post("/v1/chat/completions", json=CHAT)
    assert chat["tokens"] == list(gateway.network.calls[0].spec.token_ids) and chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 257}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_what_the_text_plane_refuses(http: httpx.AsyncClient, path: str, body: object, param: str) -> None:
    assert fault_in(await http.post(path, json=body))["param"] == param


# --- ids and traces ---


async def test_request_ids_go_in_and_out(http: httpx.AsyncClient, gateway: Gateway) -> None:
    mine = await http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine"})
    assert mine.headers["x-request-id"] == "mine"
    drawn = await http.post("/v1/completions", json=COMPLETION)
    assert drawn.headers["x-request-id"] not in ("", "mine")
    long = await http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "a" * 257})
    assert fault_in(long)["param"] == "x-request-id"


async def spans_of(gateway: Gateway) -> list[ReadableSpan]:
    """All spans of one call, its own first; it ends after the response."""

    def found() -> list[ReadableSpan]:
        gateway.router.telemetry.provider.force_flush()
        return sorted(gateway.router.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    await until(lambda: any(Attributes.HTTP_STATUS in (span.attributes or {}) for span in found()))
    return found()


async def test_the_callers_trace_is_continued_to_the_workers(http: httpx.AsyncClient, gateway: Gateway) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    fields = {**CHAT, "user": "someone"}
    await http.post("/v1/chat/completions", json=fields, headers={"traceparent": parent})
    assert all(call.traceparent.split("-")[1] == parent.split("-")[1] for call in gateway.network.calls)
    server = (await spans_of(gateway))[0]
    assert server.name == "chat tiny"
    assert server.parent is not None and f"{server.parent.span_id:016x}" == parent.split("-")[2]
    attributes = server.attributes or {}
    assert attributes[Attributes.HTTP_ROUTE] == "/v1/chat/completions"
    assert attributes[Attributes.HTTP_STATUS] == 200
    assert attributes[Attributes.END_USER_ID] == "someone"


async def test_the_span_of_a_refused_call_has_its_id(http: httpx.AsyncClient, gateway: Gateway) -> None:
    await http.post("/v1/completions", json={**COMPLETION, "unheard": 1}, headers={"x-request-id": "mine"})
    (span,) = await spans_of(gateway)
    assert (span.attributes or {})[Attributes.REQUEST_ID] == "mine"


async def test_prompts_of_one_call_have_a_span_each(http: httpx.AsyncClient, gateway: Gateway) -> None:
    await http.post("/v1/completions", json={**COMPLETION, "prompt": ["A", "B"]})
    spans = await spans_of(gateway)
    server = next(span for span in spans if span.name == "POST /v1/completions")
    prompts = [span for span in spans if span.name == "text_completion tiny"]
    assert len(prompts) == 2
    assert all(span.parent == server.context for span in prompts)


async def test_responses_and_requests_are_counted(http: httpx.AsyncClient, gateway: Gateway) -> None:
    await http.post("/v1/completions", json=COMPLETION)
    await http.post("/v1/completions", json={**COMPLETION, "top_p": 5})
    await http.post("/v1/completions", content=b"{")
    name, route = "kvferry_http_responses_total", "/v1/completions"
    assert gateway.router.sample(name, route=route, status="200") == 1
    assert gateway.router.sample(name, route=route, status="400") == 2
    assert gateway.router.sample("kvferry_requests_started_total") == 2


# --- clients that go away, or do not read ---


async def _post(gateway: Gateway, path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*gateway.host_port)
    content = json.dumps(body).encode()
    assert path == "/v1/completions"
    writer.write(HEAD + f"content-length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", [Point.PREFILL_START, Point.TOKEN])
async def test_a_client_that_goes_away_ends_the_work(gateway: Gateway, point: Point, stream: bool) -> None:
    """In the queue and in mid-stream; the work, not only the response."""
    gateway.network.hold(point, 1 if point is Point.TOKEN else 0)
    reader, writer = await _post(gateway, "/v1/completions", {**COMPLETION, "max_tokens": 9, "stream": stream})
    await gateway.network.reached(point, 1 if point is Point.TOKEN else 0)
    begun = stream and point is Point.TOKEN
    if begun:
        await reader.readuntil(b"data: ")
    writer.close()
    await gateway.network.all_ended()
    await until(lambda: gateway.router.app.serving.num_running == 0)
    assert all(call.cancelled for call in gateway.network.calls_of("decode"))
    count = gateway.router.sample
    phases = ["prefilling", *(["first_token", "decoding"] if point is Point.TOKEN else [])]  # as far as the router saw
    await until(lambda: sum(count("kvferry_requests_total", outcome="cancelled", phase=phase) for phase in phases) == 1)
    status = "200" if begun else "499"
    await until(lambda: count("kvferry_http_responses_total", route="/v1/completions", status=status) == 1)


async def test_a_client_that_does_not_read_holds_up_no_worker(start_gateway: StartGateway) -> None:
    """The workers finish; the client gets everything once it reads."""
    num_tokens = 30_000
    network = FakeNetwork(OUTPUT * 2_000, max_context=40_000, num_blocks=10_000)
    network.tokens_per_message = 50
    async with start_gateway(network) as gateway:
        fields = {**COMPLETION, "max_tokens": num_tokens, "stream": True, "logprobs": 5}
        reader, writer = await _post(gateway, "/v1/completions", fields)
        transport = cast(asyncio.Transport, writer.transport)
        transport.pause_reading()
        await gateway.network.reached(Point.TOKEN, 1)
        await network.all_ended(timeout_s=60.0)
        await until(lambda: gateway.router.app.serving.num_running == 0)
        transport.resume_reading()
        text = 0
        async with asyncio.timeout(60):
            while (line := await reader.readline()) != b"data: [DONE]\n":
                if line.startswith(b"data: "):
                    text += len(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"])
        assert text == num_tokens
        writer.close()
        await writer.wait_closed()
