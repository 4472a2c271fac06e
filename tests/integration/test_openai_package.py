"""What code written for OpenAI does with its package, against a small real model behind real workers, unmodified.

The model has random weights: all that keeps its output in shape is what the calls ask for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from kvferry.config import Config
from tests.support.deployment import Deployment, deployment_config, running_deployment
from tests.support.models import save_tiny_model

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who are you?"}]


class Pet(BaseModel):
    """What the model has to answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1, max_length=12)
    kind: Literal["cat", "dog", "日本の鳥"]
    age: int = Field(ge=0, le=30)
    tags: list[bool] = Field(max_length=3)


PET_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "description": "a pet", "strict": True, "schema": Pet.model_json_schema()},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def config(folder: Path) -> Config:
    return deployment_config(folder, timeout_s=30.0, block_size=16, num_blocks=1024)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[Deployment, AsyncOpenAI]]:
    """Workers, a router and a client; nothing is left behind."""
    async with running_deployment(config) as deployment:
        async with AsyncOpenAI(base_url=url_of(deployment), api_key="none", max_retries=0, timeout=90.0) as client:
            yield deployment, client
        await deployment.assert_idle()


def url_of(deployment: Deployment) -> str:
    return f"{deployment.router.http_url}/v1"


async def check_json_schema(client: AsyncOpenAI, number: int) -> str:
    """One output by a schema: chat and completions, streamed and not, in turn."""
    fields: Any = {"model": "llama", "max_tokens": 400, "seed": number, "response_format": PET_FORMAT}
    is_streamed = number % 2 == 1
    if number % 4 < 2:
        answer: Any = await client.chat.completions.create(messages=MESSAGES, stream=is_streamed, **fields)
    else:
        extra = {"response_format": fields.pop("response_format")}
        answer = await client.completions.create(prompt="a pet:", stream=is_streamed, extra_body=extra, **fields)
    choices = [choice async for chunk in answer for choice in chunk.choices] if is_streamed else answer.choices
    assert choices[-1].finish_reason == "stop"
    return "".join(text_of(choice) for choice in choices)


def text_of(choice: Any) -> str:
    part = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return str(choice.text if part is None else part.content or "")


async def check_json_schemas(config: Config, numbers: range) -> set[str]:
    at_once = asyncio.Semaphore(16)

    async def one(number: int) -> str:
        async with at_once:
            return await check_json_schema(client, number)

    async with serving(config) as (_, client):
        texts = await asyncio.gather(*map(one, numbers))
    for text in texts:
        Pet.model_validate_json(text)
    return set(texts)


async def test_outputs_satisfy_their_json_schema(config: Config) -> None:
    assert len(await check_json_schemas(config, range(8))) > 4


@pytest.mark.sweep
@pytest.mark.timeout(600)
async def test_a_hundred_outputs_of_a_hundred_satisfy_their_json_schema(config: Config) -> None:
    assert len(await check_json_schemas(config, range(100))) > 90


async def test_a_pydantic_model_is_parsed(config: Config) -> None:
    """`parse`, `stream` with a format, and what the package makes of an output that was cut short."""
    async with serving(config) as (_, client):
        fields: Any = {"model": "llama", "messages": MESSAGES, "response_format": Pet}
        parsed = await client.chat.completions.parse(**fields, seed=3, n=2, max_completion_tokens=400)
        assert [type(choice.message.parsed) for choice in parsed.choices] == [Pet, Pet]
        async with client.chat.completions.stream(**fields, seed=3, max_completion_tokens=400) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
        with pytest.raises(LengthFinishReasonError):
            await client.chat.completions.parse(**fields, seed=3, max_completion_tokens=5)


async def test_the_same_seed_gives_the_same_choices_whole_and_streamed(config: Config) -> None:
    async with serving(config) as (_, client):
        fields: Any = {"model": "llama", "messages": MESSAGES, "n": 3, "max_tokens": 12, "temperature": 0.8}
        whole, again, other = [await client.chat.completions.create(**fields, seed=seed) for seed in (7, 7, 8)]
        texts = [choice.message.content for choice in whole.choices]
        assert len(set(texts)) == 3
        assert texts == [choice.message.content for choice in again.choices]
        assert texts != [choice.message.content for choice in other.choices]
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(**fields, seed=7, stream=True, stream_options=options)
        streamed, usages = ["", "", ""], []
        async for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts
        assert [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens if whole.usage else None]


async def test_log_probabilities_and_stops_of_both_interfaces_agree(config: Config) -> None:
    async with serving(config) as (_, client):
        fields: Any = {"model": "llama", "max_tokens": 30, "temperature": 0, "seed": 1}
        free = await client.completions.create(prompt="abc", logprobs=2, **fields)
        text, logprobs = free.choices[0].text, free.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and free.usage
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == free.usage.completion_tokens
        stop = text[8:10]
        cut = await client.completions.create(prompt="abc", stop=[stop, "\0"], **fields)
        assert (cut.choices[0].finish_reason, cut.choices[0].text) == ("stop", text[: text.index(stop)])
        chat = await client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **fields)
        told = chat.choices[0].logprobs
        assert told is not None and told.content and chat.usage
        assert len(told.content) == chat.usage.completion_tokens
        for entry in told.content:  # greedy: the sampled token is the most likely one
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
            assert len(entry.top_logprobs) == 2 and entry.logprob <= 0


def use_synchronously(url: str) -> None:
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=90.0) as client:
        assert [model.id for model in client.models.list()] == ["llama"]
        assert client.models.retrieve("llama").object == "model"
        raw = client.chat.completions.with_raw_response.create(
            model="llama", messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "mine"}
        )
        assert (raw.headers["x-request-id"], raw.parse().object) == ("mine", "chat.completion")
        whole = client.completions.create(model="llama", prompt="abc", max_tokens=9, seed=5)
        assert whole._request_id
        with client.completions.create(model="llama", prompt="abc", max_tokens=9, seed=5, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        with client.completions.with_streaming_response.create(model="llama", prompt="abc", max_tokens=1) as response:
            assert json.loads("".join(response.iter_text()))["object"] == "text_completion"
        ours: Any = {"top_k": 1, "return_token_ids": True, "min_tokens": 4, "service_tier": "interactive"}
        extra = client.completions.create(model="llama", prompt="abc", max_tokens=4, extra_body=ours)
        assert len((extra.choices[0].model_extra or {})["token_ids"]) == 4
        left = client.completions.create(model="llama", prompt="abc", max_tokens=1500, stream=True)
        next(iter(left))
        left.close()


async def test_the_synchronous_client(config: Config) -> None:
    """With raw responses, fields of ours, and a stream that is left in the middle."""
    async with running_deployment(config) as deployment:
        await asyncio.to_thread(use_synchronously, url_of(deployment))
        await deployment.assert_idle()
