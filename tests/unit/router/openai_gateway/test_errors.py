"""Errors, as the OpenAI package raises them and as they are on the wire."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from kvferry.config import TenantConfig
from kvferry.errors import (
    Cancelled,
    ContextExceeded,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvferryError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RouterDraining,
    Unauthenticated,
    Unavailable,
    UnsupportedField,
)
from router.openai.errors import answer_of, error_headers, error_json, public_field
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.openai_gateway.conftest import OUTPUT, Gateway, StartGateway

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "AB", "max_tokens": 4}


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (InvalidArgument("sampling.top_p", "no"), 400, None),
        (UnsupportedField("response.echo"), 400, None),
        (ContextExceeded("prompt", "no"), 400, None),
        (Unauthenticated("no"), 401, None),
        (PermissionDenied("no"), 403, None),
        (NotFound("no"), 404, None),
        (ResourceExhausted("full", retry_after_s=1.5), 429, "2"),
        (ResourceExhausted("never"), 400, None),
        (Cancelled("gone"), 499, None),
        (Unavailable("down"), 503, "1"),
        (RouterDraining("bye", retry_after_s=3.0), 503, "3"),
        (DeadlineExceeded("late"), 504, None),
        (FailedPrecondition("no"), 422, None),
        (DataLoss("no"), 500, None),
        (Internal("no"), 500, None),
        (KvferryError("no"), 500, None),
    ],
)
def test_the_table(error: KvferryError, status: int, retry_after: str | None) -> None:
    assert answer_of(error).status == status
    assert error_headers(error).get("retry-after") == retry_after


@pytest.mark.parametrize(
    ("field", "public"),
    [
        ("sampling.top_p", "top_p"),
        ("stopping.stop[3]", "stop[3]"),
        ("prompt.chat.messages[2].role", "messages[2].role"),
        ("prompt.chat", "messages"),
        ("prompt.token_ids[7]", "prompt[7]"),
        ("tier", "service_tier"),
        ("cache.cache_salt", "cache_salt"),
        ("model", "model"),
    ],
)
def test_fields_have_the_names_they_have_in_http(field: str, public: str) -> None:
    assert public_field(field) == public
    told = error_json(InvalidArgument(field, "is wrong"))["error"]
    assert (told["param"], told["message"]) == (public, f"{public}: is wrong")


async def test_a_value_out_of_its_limits_is_a_bad_request(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        with pytest.raises(openai.BadRequestError, match=r"top_p: 1\.5 is not above 0") as caught:
            await gateway.openai.chat.completions.create(**CHAT, top_p=1.5)
        assert (caught.value.param, caught.value.code, caught.value.type) == (
            "top_p",
            "invalid_value",
            "invalid_request_error",
        )
        with pytest.raises(openai.BadRequestError, match=r"messages: has .* tokens; at most 255 fit") as caught:
            long: Any = [{"role": "user", "content": "a b " * 130}]
            await gateway.openai.chat.completions.create(model="tiny", messages=long)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a b " * 130}, "prompt"),
        ({"prompt": "a b " * 9000}, "prompt"),  # refused before it is tokenised
        ({"prompt": [5] * 256}, "prompt"),
        ({"prompt": [5] * 100, "max_tokens": 157}, "max_tokens"),
        ({"max_tokens": 256}, "max_tokens"),
    ],
)
async def test_what_is_longer_than_the_context_has_the_code_that_clients_look_for(
    start_gateway: StartGateway, fields: dict[str, Any], param: str
) -> None:
    async with start_gateway() as gateway:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await gateway.openai.completions.create(**{**COMPLETION, **fields}, stream=stream)
            assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("unheard_of", 1),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(start_gateway: StartGateway, field: str, value: object) -> None:
    async with start_gateway() as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            await gateway.openai.completions.create(**COMPLETION, extra_body={field: value})
        assert caught.value.code == "unsupported_field"
        assert gateway.network.calls == []


async def test_tools_are_refused_for_a_model_without(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        tools = [{"type": "function", "function": {"name": "f"}}]
        with pytest.raises(openai.BadRequestError, match="tools: the model's chat template has no tools") as caught:
            await gateway.openai.chat.completions.create(**CHAT, extra_body={"tools": tools})
        assert caught.value.param == "tools" and gateway.network.calls == []
        for choice in ("auto", "none"):
            await gateway.openai.chat.completions.create(**CHAT, extra_body={"tool_choice": choice})


async def test_an_unknown_model_is_not_found(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'") as caught:
            await gateway.openai.chat.completions.create(**{**CHAT, "model": "gpt"})
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


async def test_keys_make_the_tenant(start_gateway: StartGateway) -> None:
    tenants = (TenantConfig.model_validate({"name": "search", "api_keys": ["good-key-1"]}),)
    async with start_gateway(tenants=tenants) as gateway, gateway.client("good-key-1") as known:
        with pytest.raises(openai.AuthenticationError, match="not known"):
            await gateway.openai.chat.completions.create(**CHAT)
        with pytest.raises(openai.AuthenticationError):
            await gateway.openai.models.list()
        await known.chat.completions.create(**CHAT)
        assert gateway.network.calls[0].spec.tenant == "search"
        async with httpx.AsyncClient() as http:
            bare = await http.post(f"{gateway.url}/v1/completions", json=COMPLETION)
            assert bare.status_code == 401 and bare.headers["www-authenticate"] == "Bearer"
            assert (await http.get(f"{gateway.url}/metrics")).status_code == 200


async def test_a_full_router_says_when_to_come_again(start_gateway: StartGateway) -> None:
    async with start_gateway(max_queue=1) as gateway:
        gateway.network.hold(Point.PREFILL_START)
        first = asyncio.create_task(gateway.openai.chat.completions.create(**CHAT))
        await gateway.network.reached(Point.PREFILL_START)
        with pytest.raises(openai.RateLimitError, match="at most 1") as caught:
            await gateway.openai.chat.completions.create(**CHAT)
        assert caught.value.response.headers["retry-after"] == "1"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await gateway.network.all_ended()


async def test_a_router_without_workers_is_unavailable(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        await gateway.network.decode[0].stop()
        while not gateway.router.app.models.missing:
            await gateway.router.app.membership.changes.wait_next()
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.openai.chat.completions.create(**CHAT, stream=True)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"


async def test_an_error_before_the_first_token_has_its_status_also_in_a_stream(start_gateway: StartGateway) -> None:
    async with start_gateway(max_attempts=1) as gateway:
        gateway.network.fail(Point.PREFILL_START, Unavailable("died"))
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.openai.chat.completions.create(**CHAT, stream=True)
        assert caught.value.status_code == 503


async def test_an_error_in_mid_stream_is_an_event_and_no_clean_end(start_gateway: StartGateway) -> None:
    async with start_gateway(max_attempts=1) as gateway:
        gateway.network.fail(Point.TOKEN, FailedPrecondition("broke"), index=2)
        text = ""
        with pytest.raises(openai.APIError, match="broke"):
            async for chunk in await gateway.openai.chat.completions.create(**CHAT, stream=True):
                text += chunk.choices[0].delta.content or ""
        assert text == "HE"
        gateway.network.fail(Point.TOKEN, FailedPrecondition("broke"), index=2)
        async with httpx.AsyncClient() as http:
            raw = await http.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True})
        last = raw.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["type"] == "server_error"
        assert "[DONE]" not in raw.text


async def _drained(gateway: Gateway, grace_s: float) -> None:
    gateway.network.hold(Point.TOKEN, 2)
    stream = await gateway.openai.chat.completions.create(**CHAT, stream=True)
    draining = asyncio.create_task(gateway.router.app.drain(grace_s))
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    await draining


async def test_a_drain_refuses_what_comes_and_ends_what_runs(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        await _drained(gateway, 0.05)
        await gateway.network.all_ended()
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            await gateway.openai.chat.completions.create(**CHAT)
        assert caught.value.status_code == 503


async def test_a_drain_waits_for_what_runs(start_gateway: StartGateway) -> None:
    async with start_gateway(FakeNetwork(OUTPUT)) as gateway:
        stream = await gateway.openai.chat.completions.create(**{**CHAT, "max_tokens": 12}, stream=True)
        draining = asyncio.create_task(gateway.router.app.drain(5.0))
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        await draining
        assert text == "HELLOWORLDAG"
