"""The OpenAI package against real workers: the same tokens and text as over gRPC, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from engine.scripted import scripted_logprob
from kvferry.client import ChatMessage, GenerateOptions
from kvferry.config import Config
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.workers import until

MESSAGES: Any = [{"role": "user", "content": "what are you?"}]


def client_of(deployment: Deployment) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{deployment.router.http_url}/v1", api_key="none", max_retries=0, timeout=60.0)


def config_in(folder: Path, **script: object) -> Config:
    return deployment_config(chat_folder(folder / "model", **script))


async def streamed(client: AsyncOpenAI, model: str, **fields: Any) -> str:
    stream = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **fields)
    return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


async def test_chat_over_http_is_chat_over_grpc(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running_deployment(config) as deployment, client_of(deployment) as client:
        (model,) = (await client.models.list()).data
        for seed in (1, 2, 3):
            fields: Any = {"max_tokens": 20, "seed": seed, "temperature": 0.7, "top_p": 0.9}
            options = GenerateOptions(prompt=[ChatMessage("user", "what are you?")], **fields)
            expected = await deployment.client.complete(options, timeout_s=60.0)
            whole = await client.chat.completions.create(model=model.id, messages=MESSAGES, **fields)
            assert whole.choices[0].message.content == expected.choices[0].text
            assert whole.usage is not None and whole.usage.prompt_tokens == expected.usage.prompt_tokens
            assert whole.usage.completion_tokens == expected.usage.completion_tokens
            assert await streamed(client, model.id, **fields) == expected.choices[0].text
        await deployment.assert_idle()


async def test_several_prompts_with_several_choices_at_once(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment, client_of(deployment) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="",
                    prompt=[[1, 2, 3, number], [7, 8, 9, 10, number]],
                    n=2,
                    max_tokens=9,
                    seed=number,
                    logprobs=1,
                )
                for number in range(4)
            )
        )
        for number, answer in enumerate(answers):
            options = GenerateOptions(prompt=[7, 8, 9, 10, number], n=2, max_tokens=9, seed=number)
            alone = await deployment.client.complete(options, timeout_s=60.0)
            assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]
            assert answer.usage is not None
            num_told = sum(len(choice.logprobs.tokens or ()) for choice in answer.choices if choice.logprobs)
            assert num_told == answer.usage.completion_tokens > 0
        await deployment.assert_idle()


async def test_leaving_in_mid_stream_leaves_nothing_behind(tmp_path: Path) -> None:
    config = config_in(tmp_path, step_delay_s=0.01)
    async with running_deployment(config) as deployment, client_of(deployment) as client:
        for num_chunks in (1, 4):
            stream = await client.completions.create(
                model="", prompt=[1, 2, 3], max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(num_chunks):
                await anext(stream)
            await stream.close()
        await deployment.assert_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_dropped_connection_ends_the_work(tmp_path: Path, stream: bool) -> None:
    """R096: no goodbye, whether its client waits for events or for the whole."""
    config = config_in(tmp_path, step_delay_s=0.01)
    async with running_deployment(config) as deployment:
        decode = deployment.decode[0].role
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": stream})
        _, _, address = deployment.router.http_url.partition("://")
        host, _, port = address.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        await until(lambda: decode.load().num_running > 0)
        num_sampled = decode.load().num_sampled_tokens
        await until(lambda: decode.load().num_sampled_tokens > num_sampled + 3)
        writer.transport.abort()
        await until(lambda: decode.load().num_running == 0)
        assert decode.load().num_sampled_tokens < 350
        await deployment.assert_idle()


async def test_an_echoed_prompt_has_its_log_probabilities(tmp_path: Path) -> None:
    """As evaluations read them: one list over prompt and output, nothing known of the first token."""
    async with running_deployment(config_in(tmp_path)) as deployment, client_of(deployment) as client:
        tokenizer = deployment.router.models.all[0].tokenizer
        prompts = [tokenizer.encode(text) for text in ("once upon a time", "Hello")]
        fields: Any = {"model": "", "max_tokens": 1, "temperature": 0.0, "logprobs": 1, "echo": True, "n": 1}
        answer = await client.completions.create(prompt=prompts, **fields)
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            logprobs = choice.logprobs
            assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
            shown = "".join(logprobs.tokens[:-1])
            assert choice.text.startswith(shown) and shown == tokenizer.decode(prompt)
            assert logprobs.text_offset == [len("".join(logprobs.tokens[:n])) for n in range(len(prompt) + 1)]
            known = [None if n == 0 else scripted_logprob(token_id) for n, token_id in enumerate(prompt)]
            assert logprobs.token_logprobs[:-1] == known
            assert logprobs.top_logprobs is not None and not logprobs.top_logprobs[0]
            assert all(one and len(one) == 1 for one in logprobs.top_logprobs[1:])
        chunks = [chunk async for chunk in await client.completions.create(prompt=prompts[0], stream=True, **fields)]
        told = [one.logprobs for chunk in chunks for one in chunk.choices if one.logprobs is not None]
        assert [one.token_logprobs for one in told] == [answer.choices[0].logprobs.token_logprobs]
        with pytest.raises(BadRequestError, match="prompt_logprobs"):
            await client.completions.create(prompt=prompts[0], extra_body={"prompt_logprobs": 1}, **fields)
        await deployment.assert_idle()
