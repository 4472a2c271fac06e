"""Chat completions by the OpenAI package; the same tokens and text as over gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from proto.kvferry.v1 import inference_pb2 as pb
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.openai_gateway.conftest import OUTPUT, StartGateway

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


async def test_a_whole_chat_has_prompt_and_text_of_grpcs(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=6, temperature=0, seed=7
        )
        assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "HELLOW", "length")
        chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in MESSAGES])
        request = pb.GenerateRequest(chat=chat, sampling=pb.SamplingOptions(temperature=0, seed=7))
        request.stopping.max_tokens = 6
        over_grpc = await gateway.router.generate(request)
        assert over_grpc.text == choice.message.content
        http_spec, grpc_spec = (call.spec for call in gateway.network.calls_of("prefill"))
        assert (http_spec.token_ids, http_spec.sampling) == (grpc_spec.token_ids, grpc_spec.sampling)


async def test_a_streamed_chat_opens_every_choice(start_gateway: StartGateway) -> None:
    network = FakeNetwork(OUTPUT)
    network.outputs[1] = OUTPUT[5:]
    async with start_gateway(network) as gateway:
        stream = await gateway.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=5, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, opened, finishes = ["", ""], [0, 0], ["", ""]
        usage = None
        async for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert choice.delta.role is None or texts[choice.index] == ""
                opened[choice.index] += choice.delta.role == "assistant"
                texts[choice.index] += choice.delta.content or ""
                finishes[choice.index] += choice.finish_reason or ""
        assert (texts, opened, finishes) == (["HELLO", "WORLD"], [1, 1], ["length", "length"])
        assert usage is not None and usage.completion_tokens == 10


async def test_a_chat_without_a_limit_runs_to_the_context(start_gateway: StartGateway) -> None:
    async with start_gateway(FakeNetwork(OUTPUT * 20, max_context=64)) as gateway:
        answer = await gateway.openai.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.usage is not None and answer.usage.total_tokens == 64


async def test_parts_of_text_are_lines(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for content in (parts, "a\nb"):
            messages: Any = [{"role": "user", "content": content}]
            await gateway.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        first, second = gateway.network.calls
        assert first.spec.token_ids == second.spec.token_ids


async def test_without_a_generation_prompt(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        for wanted in (True, False):
            await gateway.openai.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"add_generation_prompt": wanted}
            )
        with_prompt, without = (call.spec.token_ids for call in gateway.network.calls)
        assert len(without) < len(with_prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_chat(start_gateway: StartGateway, stream: bool) -> None:
    async with start_gateway() as gateway:
        fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        answer: Any = await gateway.openai.chat.completions.create(**fields, stream=stream)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        told = [
            entry
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content
        ]
        assert [(entry.token, entry.logprob, entry.bytes) for entry in told] == [
            ("H", -1.0, [72]),
            ("E", -1.0, [69]),
            ("L", -1.0, [76]),
        ]
        assert [other.token for other in told[0].top_logprobs] == ["H", "I"]


async def test_a_token_that_is_no_whole_character_is_written_by_its_bytes(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        table = gateway.router.app.models.find("tiny").tokenizer.token_bytes
        broken = next(token_id for token_id in range(300) if table.get(token_id) == b"\xf0")
        gateway.network.output[0] = broken
        answer = await gateway.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=1, logprobs=True
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert (logprobs.content[0].token, logprobs.content[0].bytes) == ("bytes:\\xf0", [0xF0])
        assert logprobs.content[0].top_logprobs == []


async def test_an_abort_by_the_callers_id_ends_a_response_with_what_there_is(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        gateway.network.hold(Point.TOKEN, 3)
        stream = await gateway.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, stream=True, extra_headers={"x-request-id": "mine"}
        )
        text, finish = "", None
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason
            if text == "HEL" and finish is None:
                reply = await gateway.router.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
                assert list(reply.aborted_request_ids) == ["mine"]
        assert (text, finish) == ("HEL", "abort")


async def test_leaving_a_stream_ends_the_work(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        gateway.network.hold(Point.TOKEN, 3)
        stream = await gateway.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await gateway.network.all_ended()
        assert all(call.cancelled for call in gateway.network.calls_of("decode"))


async def test_a_session_is_a_header_a_field_or_openais_own_name_for_it(start_gateway: StartGateway) -> None:
    """Each keeps the decode worker, of two that would take turns; the header yields to the body."""
    network = FakeNetwork(OUTPUT, num_decode=2)
    ways: list[dict[str, Any]] = [
        {"extra_headers": {"x-session-id": "s"}},
        {"extra_body": {"session_id": "s"}, "extra_headers": {"x-session-id": "other"}},
        {"extra_body": {"prompt_cache_key": "s"}},
    ]
    async with start_gateway(network) as gateway:
        create = gateway.openai.chat.completions.create
        for way in ways * 2:
            await create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, **way)
        calls = gateway.network.calls_of("decode")
        assert len(calls) == 6 and len({call.worker for call in calls}) == 1
        assert gateway.router.sample("kvferry_session_choices_total", role="decode", kept="true") == 6
        for _ in range(2):
            await create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0)
        assert len({call.worker for call in gateway.network.calls_of("decode")}) == 2
        differing = {"session_id": "a", "prompt_cache_key": "b"}
        with pytest.raises(Exception, match="prompt_cache_key: differs from session_id"):
            await create(model="tiny", messages=MESSAGES, extra_body=differing)
        with pytest.raises(Exception, match="session_id: has 257 characters"):
            await create(model="tiny", messages=MESSAGES, extra_headers={"x-session-id": "x" * 257})
