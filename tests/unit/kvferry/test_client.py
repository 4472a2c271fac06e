"""The public client against a router with fixed answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy
import pytest

from kvferry.client import AsyncClient, ChatMessage, GenerateOptions, PinOptions, Prompt, Tool, ToolCall
from kvferry.errors import DataLoss, InvalidArgument, Unavailable
from kvferry.rpc.retries import MAX_ATTEMPTS
from kvferry.sampling import Finish, FinishKind
from proto.kvferry.v1 import inference_pb2
from tests.support.fake_router import TEXT, FakeRouter, start_fake_router


@asynccontextmanager
async def connected(fake: FakeRouter) -> AsyncIterator[AsyncClient]:
    server, address = await start_fake_router(fake)
    try:
        async with AsyncClient(address) as client:
            yield client
    finally:
        await server.drain(0)


async def test_completion_gathers_all_events() -> None:
    async with connected(FakeRouter()) as client:
        completion = await client.complete(GenerateOptions(prompt="x", request_id="label", tier="batch"))
    (choice,) = completion.choices
    assert (choice.text, choice.token_ids) == (TEXT, [5, 6, 2])
    assert choice.finish == Finish(FinishKind.END_OF_SEQUENCE, token_id=2)
    assert (completion.started.request_id, completion.started.tier) == ("label", "batch")
    assert (completion.usage.completion_tokens, completion.timings.num_blocks_shipped) == (3, 2)


@pytest.mark.parametrize(
    ("left_out", "words"), [((4,), "last message"), ((1,), "token 1 came after 0"), ((2,), "1 tok")]
)
async def test_lost_events_are_an_error(left_out: Sequence[int], words: str) -> None:
    async with connected(FakeRouter(left_out=left_out)) as client:
        with pytest.raises(DataLoss, match=words):
            await client.complete(GenerateOptions(prompt="x"))


async def test_events_can_be_read_one_by_one_and_left() -> None:
    async with connected(FakeRouter()) as client:
        async with client.generate(GenerateOptions(prompt="x")) as events:
            async for event in events:
                assert event.WhichOneof("event") == "started"
                break
        assert (await client.capabilities()).model == "fake"
        assert await client.abort("a", "b") == ("a",)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("text", "text"), ([1, 2], "token_ids"), ([], "token_ids"), ([ChatMessage("user", "hi")], "chat")],
)
def test_prompts_of_each_kind(prompt: Prompt, kind: str) -> None:
    assert GenerateOptions(prompt=prompt).to_pb().WhichOneof("prompt") == kind


def test_unset_options_stay_unset_and_set_ones_are_all_sent() -> None:
    assert not GenerateOptions(prompt="x").to_pb().sampling.HasField("temperature")
    request = GenerateOptions(prompt="x", temperature=0.0, seed=2**64 - 1, stop=["a"], ignore_eos=False).to_pb()
    assert request.sampling == inference_pb2.SamplingOptions(temperature=0.0, seed=2**64 - 1)
    assert request.stopping == inference_pb2.StoppingOptions(stop=["a"], ignore_eos=False)
    assert request.response == inference_pb2.ResponseOptions() and not request.HasField("truncate_prompt_tokens")
    request = GenerateOptions(prompt="x", echo=True, prompt_logprobs=0, truncate_prompt_tokens=5).to_pb()
    assert request.response == inference_pb2.ResponseOptions(echo=True, prompt_logprobs=0)
    assert request.truncate_prompt_tokens == 5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerateOptions(prompt="x", max_tokens=-1), "stopping.max_tokens"),
        (GenerateOptions(prompt="x", seed=2**64), "sampling.seed"),
        (GenerateOptions(prompt=[-1]), "prompt.token_ids"),
        (GenerateOptions(prompt="\ud800"), "prompt.text"),
        (GenerateOptions(prompt="x", model="\ud800"), "model"),
        (GenerateOptions(prompt="x", tier="\ud800"), "tier"),
        (GenerateOptions(prompt="x", request_id="\ud800"), "request_id"),
        (GenerateOptions(prompt=[ChatMessage("user", "\ud800")]), "prompt.chat.messages[0].content"),
        (GenerateOptions(prompt="x", stop_token_ids=[2**32]), "stopping.stop_token_ids"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options.to_pb()
    assert caught.value.field == field


@pytest.mark.parametrize(
    "wrong",
    ["yes", b"yes", bytearray(b"yes"), {"yes": 1}, iter(["yes"]), (item for item in [1]), 5, memoryview(b"yes")],
)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("prompt", "prompt"),
        ("tools", "tools"),
        ("stop", "stopping.stop"),
        ("stop_token_ids", "stopping.stop_token_ids"),
        ("choice", "choice"),
        ("bad_words", "sampling.bad_words"),
        ("allowed_token_ids", "sampling.allowed_token_ids"),
        ("logprob_token_ids", "response.logprob_token_ids"),
        ("kept_special_token_ids", "response.kept_special_token_ids"),
    ],
)
def test_what_python_takes_for_a_list_is_none(name: str, path: str, wrong: Any) -> None:
    """Else a text would be sent as its letters, bytes as numbers, an iterator once only: with status OK."""
    if name in ("prompt", "stop") and wrong == "yes":
        wrong = 5  # one text is what these take
    options = GenerateOptions(**{"prompt": "x", name: wrong})
    with pytest.raises(InvalidArgument, match="must be ") as caught:
        options.to_pb()
    assert caught.value.field == path


def test_one_text_ends_the_output_and_lists_may_be_of_any_kind() -> None:
    assert list(GenerateOptions("x", stop="Paris").to_pb().stopping.stop) == ["Paris"]
    assert GenerateOptions("x", stop="Paris").to_pb() == GenerateOptions("x", stop=["Paris"]).to_pb()
    ids = numpy.array([1, 2], dtype=numpy.int32)
    options: Any = GenerateOptions(ids, stop_token_ids=ids, allowed_token_ids=ids, max_tokens=numpy.int64(3))  # type: ignore[arg-type]
    assert (
        options.to_pb()
        == options.to_pb()
        == GenerateOptions((1, 2), stop_token_ids=range(1, 3), allowed_token_ids=[1, 2], max_tokens=3).to_pb()
    )
    unset: Any = {"stop": None, "bad_words": None, "logit_bias": None, "choice": None, "allowed_token_ids": None}
    request = GenerateOptions("x", **unset).to_pb()
    assert (request.sampling, request.stopping) == (inference_pb2.SamplingOptions(), inference_pb2.StoppingOptions())
    assert request.WhichOneof("constraint") is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"choice": []}, "choice"),
        ({"choice": ()}, "choice"),
        ({"allowed_token_ids": []}, "sampling.allowed_token_ids"),
        ({"logit_bias": [(1, 2.0)]}, "sampling.logit_bias"),
        ({"prompt": {1, 2}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [ChatMessage("user", "a"), 5]}, "prompt.chat.messages[1]"),
        ({"prompt": [5, ChatMessage("user", "a")]}, "prompt.token_ids"),
        ({"prompt": [True]}, "prompt.token_ids"),
        ({"temperature": True}, "sampling.temperature"),
        ({"json_schema": {"enum": [float("nan")]}}, "json_schema"),
        ({"json_schema": ["a"]}, "json_schema"),
        ({"structural_tag": {"a": object()}}, "structural_tag"),
    ],
)
def test_values_that_would_be_read_as_something_else_are_refused(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        GenerateOptions(**{"prompt": "x", **fields}).to_pb()
    assert caught.value.field == path


def test_json_may_be_given_as_a_dict() -> None:
    schema = {"type": "object", "title": "Übung"}
    assert json.loads(GenerateOptions("x", json_schema=schema).to_pb().json_schema) == schema
    assert GenerateOptions("x", json_schema='{"a" :1}').to_pb().json_schema == '{"a" :1}'
    assert json.loads(GenerateOptions("x", structural_tag={"tags": []}).to_pb().structural_tag) == {"tags": []}


async def test_tools_are_part_of_what_a_conversation_becomes() -> None:
    asked: list[inference_pb2.TokenizeRequest] = []

    class Recording(FakeRouter):
        async def Tokenize(
            self, request: inference_pb2.TokenizeRequest, context: Any
        ) -> inference_pb2.TokenizeResponse:
            asked.append(request)
            return inference_pb2.TokenizeResponse(token_ids=[1])

    async with connected(Recording()) as client:
        assert await client.tokenize([QUESTION], tools=[Tool("f", parameters={"type": "object"})]) == (1,)
    assert list(asked[0].chat.tools) == [inference_pb2.Tool(name="f", parameters='{"type": "object"}')]


QUESTION = {"role": "user", "content": "Hi"}
CALL = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def test_messages_and_tools_may_be_those_of_openai() -> None:
    turns: list[dict[str, Any]] = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "7", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "Adds.", "parameters": {"type": "object"}}}]
    ours = [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "", [ToolCall("f", {"a": 1}, "7")]),
        ChatMessage("tool", "2", tool_call_id="7", name="f"),
    ]
    told = GenerateOptions(turns, tools=tools).to_pb()
    ours_told = GenerateOptions(ours, tools=[Tool("f", "Adds.", '{"type": "object"}')]).to_pb()
    ours_told.chat.messages[1].tool_calls[0].arguments = '{"a":1}'
    assert told == ours_told


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"content": "Hi"}, "role"),
        ({"role": "user"}, "content"),
        ({**QUESTION, "audio": "x"}, "audio"),
        ({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "assistant", "tool_calls": CALL}, "tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}, "tool_calls[0].arguments"),
    ],
)
def test_messages_that_are_not_understood_are_refused_by_name(message: Any, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        GenerateOptions([QUESTION, message]).to_pb()
    assert caught.value.field == f"prompt.chat.messages[1].{path}"


async def test_a_prompt_will_do_where_options_are_expected() -> None:
    fake = FakeRouter()
    async with connected(fake) as client:
        for prompt in ("x", [1, 2], [ChatMessage("user", "Hi")], [QUESTION]):
            assert (await client.complete(prompt, max_tokens=5)).text == TEXT
        assert (await client.complete(GenerateOptions("x", max_tokens=4, seed=1), max_tokens=5)).text == TEXT
        assert (await client.chat([QUESTION], max_tokens=5)).text == TEXT
        async with client.stream("x", max_tokens=5) as pieces:
            assert [piece async for piece in pieces] == [TEXT[:5], TEXT[5:]]
        wrong: Any
        for wrong in (5, None, b"x", {"role": "user"}):
            with pytest.raises(InvalidArgument, match="prompt: must be text, token ids or messages"):
                await client.complete(wrong)
        for wrong in ([1, 2], [], QUESTION, 5):
            with pytest.raises(InvalidArgument, match="messages: must be"):
                await client.chat(wrong)
        with pytest.raises(InvalidArgument, match="tools: is only for a conversation"):
            await client.tokenize("x", tools=[Tool("f")])
        with pytest.raises(InvalidArgument, match="request_ids"):
            await client.abort(wrong)
        with pytest.raises(InvalidArgument, match="token_ids: must be a list"):
            await client.detokenize(b"ab")
    assert [request.WhichOneof("prompt") for request in fake.requests] == [
        *("text", "token_ids", "chat", "chat", "text", "chat", "text")
    ]
    assert {request.stopping.max_tokens for request in fake.requests} == {5}
    assert fake.requests[4].sampling.seed == 1


def test_options_of_the_cache_and_of_a_pin() -> None:
    request = GenerateOptions(prompt="x", cache_salt="c", shared_salt="s", bypass_prefix_cache=True).to_pb()
    assert (request.cache.cache_salt, request.cache.shared_salt, request.cache.bypass_prefix_cache) == ("c", "s", True)
    assert not GenerateOptions(prompt="x").to_pb().HasField("cache")
    pin = PinOptions("name", [ChatMessage("user", "hi")], shared_salt="s", tenant="t").to_pb()
    assert (pin.name, pin.chat.messages[0].content, pin.cache.shared_salt, pin.tenant) == ("name", "hi", "s", "t")
    assert pin.chat.HasField("add_generation_prompt") and not pin.chat.add_generation_prompt
    assert not PinOptions("name", "text").to_pb().HasField("chat")


@pytest.mark.parametrize("key", ["", "a b", "line\nfeed", "schlüssel"])
async def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(InvalidArgument, match="printable ASCII") as caught:
        AsyncClient("127.0.0.1:1", api_key=key)
    assert not key or key not in caught.value.message


def test_tools_and_their_turns_are_sent() -> None:
    turns = [
        ChatMessage("assistant", "", [ToolCall("f", '{"a":1}', "7")]),
        ChatMessage("tool", "2", tool_call_id="7", name="f"),
    ]
    tools = [Tool("f", "Adds.", '{"type":"object"}'), Tool("g")]
    options = GenerateOptions(prompt=turns, tools=tools, structural_tag="{}", kept_special_token_ids=[5])
    request = options.to_pb()
    call = inference_pb2.ToolCall(id="7", name="f", arguments='{"a":1}')
    assert list(request.chat.messages) == [
        inference_pb2.ChatMessage(role="assistant", tool_calls=[call]),
        inference_pb2.ChatMessage(role="tool", content="2", tool_call_id="7", name="f"),
    ]
    assert [(tool.name, tool.HasField("description"), tool.parameters) for tool in request.chat.tools] == [
        ("f", True, '{"type":"object"}'),
        ("g", False, ""),
    ]
    assert (request.structural_tag, list(request.response.kept_special_token_ids)) == ("{}", [5])
    pin = PinOptions("here", turns, tools=tools).to_pb()
    assert list(pin.chat.tools) == list(request.chat.tools)
    with pytest.raises(InvalidArgument, match="tools: is only for a conversation"):
        PinOptions("here", "text", tools=tools).to_pb()
    with pytest.raises(InvalidArgument, match=r"prompt\.chat\.tools"):
        GenerateOptions(prompt=turns, tools=[Tool("\ud800")]).to_pb()


# -- plain calls to routers that refuse them ---------------------------------------------------------------------------


class Refusing(FakeRouter):
    """Refuses its first calls."""

    def __init__(self, num_refused: int) -> None:
        super().__init__()
        self.num_calls, self._num_refused = 0, num_refused

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        self.num_calls += 1
        if self.num_calls <= self._num_refused:
            raise Unavailable("not now")
        return await super().Tokenize(request, context)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.num_calls += 1
        raise Unavailable("not now")


async def test_a_plain_call_to_a_single_router_is_retried_and_a_request_is_not() -> None:
    fake = Refusing(MAX_ATTEMPTS - 1)
    async with connected(fake) as client:
        assert await client.tokenize("A") == (65,)
        assert fake.num_calls == MAX_ATTEMPTS
        with pytest.raises(Unavailable, match="not now"):
            await client.complete(GenerateOptions(prompt="x"))
        assert fake.num_calls == MAX_ATTEMPTS + 1


async def test_a_router_that_refuses_all_gets_few_calls_more() -> None:
    """Retries are throttled: ten failures would be thirty calls."""
    fake = Refusing(1000)
    async with connected(fake) as client:
        for number in range(10):
            with pytest.raises(Unavailable, match="not now"):
                await client.tokenize("A")
            assert number or fake.num_calls == MAX_ATTEMPTS
    assert fake.num_calls < 16


async def test_of_several_routers_each_gets_a_plain_call_once() -> None:
    fakes = [Refusing(1000) for _ in range(3)]
    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        for fake in fakes:
            server, address = await start_fake_router(fake)
            stack.push_async_callback(server.drain, 0)
            addresses.append(address)
        client = await stack.enter_async_context(AsyncClient(addresses))
        with pytest.raises(Unavailable, match="not now"):
            await client.tokenize("A")
    assert [fake.num_calls for fake in fakes] == [1, 1, 1]
