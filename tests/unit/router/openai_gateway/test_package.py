"""What the OpenAI package makes of statuses: its exception classes, and what it repeats by itself."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import openai
import pytest
from openai import AsyncOpenAI

from kvferry.errors import (
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
from router.serving import Serving
from tests.support.fake_workers import Point
from tests.support.workers import free_address, until
from tests.unit.router.openai_gateway.conftest import Gateway, StartGateway

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ROUTE = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("error", "kind", "status", "code", "param"),
    [
        (InvalidArgument("sampling.top_p", "no"), openai.BadRequestError, 400, "invalid_value", "top_p"),
        (UnsupportedField("adapter"), openai.BadRequestError, 400, "unsupported_field", "adapter"),
        (ContextExceeded("prompt", "no"), openai.BadRequestError, 400, "context_length_exceeded", "messages"),
        (ResourceExhausted("never"), openai.BadRequestError, 400, "request_too_demanding", None),
        (Unauthenticated("no"), openai.AuthenticationError, 401, "invalid_api_key", None),
        (PermissionDenied("no"), openai.PermissionDeniedError, 403, "permission_denied", None),
        (NotFound("no", field="model"), openai.NotFoundError, 404, "model_not_found", "model"),
        (ResourceExhausted("full", retry_after_s=1), openai.RateLimitError, 429, "rate_limit_exceeded", None),
        (FailedPrecondition("no"), openai.UnprocessableEntityError, 422, "failed_precondition", None),
        (DataLoss("no"), openai.InternalServerError, 500, "data_loss", None),
        (Internal("no"), openai.InternalServerError, 500, "internal_error", None),
        (ValueError("no"), openai.InternalServerError, 500, "internal_error", None),
        (Unavailable("no"), openai.InternalServerError, 503, "service_unavailable", None),
        (RouterDraining("no"), openai.InternalServerError, 503, "service_unavailable", None),
        (DeadlineExceeded("no"), openai.InternalServerError, 504, "deadline_exceeded", None),
    ],
)
async def test_errors_are_the_packages_classes(
    start_gateway: StartGateway, error: Exception, kind: type[openai.APIStatusError], status: int, code: str, param: str
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    async with start_gateway() as gateway:
        for stream in (False, True):
            with patch.object(Serving, "generate", fail), pytest.raises(kind) as caught:
                await gateway.openai.chat.completions.create(**CHAT, stream=stream)
            told = caught.value
            assert (told.status_code, told.code, told.param) == (status, code, param)
            assert told.type and told.request_id and isinstance(told.body, dict)
            assert isinstance(error, KvferryError) or "no" not in told.body["message"].split()


async def test_a_wrong_route_is_not_found_and_a_silent_server_times_out(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        with pytest.raises(openai.NotFoundError) as caught:
            await gateway.openai.embeddings.create(model="tiny", input="a")
        assert caught.value.code == "unknown_url" and caught.value.request_id
        gateway.network.hold(Point.PREFILL_START)
        impatient = gateway.openai.with_options(timeout=0.2)
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                await impatient.chat.completions.create(**CHAT, stream=stream)
        await gateway.network.all_ended()
    nobody = AsyncOpenAI(base_url=f"http://{free_address()}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        await nobody.models.list()


def num_told(gateway: Gateway, status: int) -> float:
    return gateway.router.sample("kvferry_http_responses_total", route=ROUTE, status=str(status))


async def test_a_full_router_is_asked_again_after_the_time_it_names(start_gateway: StartGateway) -> None:
    async with start_gateway(max_queue=1) as gateway, gateway.client(max_retries=2) as patient:
        gateway.network.hold(Point.PREFILL_START)
        first = asyncio.create_task(gateway.openai.chat.completions.create(**CHAT))
        await gateway.network.reached(Point.PREFILL_START)
        second = asyncio.create_task(patient.chat.completions.create(**CHAT))
        await until(lambda: num_told(gateway, 429) == 1)
        gateway.network.release(Point.PREFILL_START)
        first.cancel()
        assert (await second).choices
        await until(lambda: num_told(gateway, 200) == 1)
        assert num_told(gateway, 429) == 1


@pytest.mark.parametrize(
    ("error", "status", "is_repeated"),
    [
        (ResourceExhausted("never"), 400, False),
        (InvalidArgument("sampling.top_p", "no"), 400, False),
        (PermissionDenied("no"), 403, False),
        (FailedPrecondition("no"), 422, False),
        (Internal("no"), 500, True),
    ],
)
async def test_only_what_may_go_better_is_repeated(
    start_gateway: StartGateway, error: KvferryError, status: int, is_repeated: bool
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    async with start_gateway() as gateway, gateway.client(max_retries=1) as patient:
        with patch.object(Serving, "generate", fail), pytest.raises(openai.APIStatusError):
            await patient.chat.completions.create(**CHAT)
        await until(lambda: num_told(gateway, status) == 1 + is_repeated)
