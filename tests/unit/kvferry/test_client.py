"""The public client against a router with fixed answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

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
        (GenerateOptions(prompt=[ChatMessage("user", "\ud800")]), "prompt.chat"),
        (GenerateOptions(prompt="x", stop_token_ids=[2**32]), "stopping.stop_token_ids"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        options.to_pb()
    assert caught.value.field == field


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
