"""Texts to token ids and back over gRPC: what `Generate` makes of a prompt, with its limits, and for whom it may."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.client import AsyncClient, ChatMessage
from kvferry.config import TenantConfig
from kvferry.errors import (
    InvalidArgument,
    KvferryError,
    NotFound,
    ResourceExhausted,
    RouterDraining,
    Unauthenticated,
    Unavailable,
)
from proto.kvferry.v1 import inference_pb2 as pb
from router.text.encode_queue import EncodeQueue
from tests.support.fake_workers import FakeNetwork
from tests.unit.router.conftest import StartRouter

OUTPUT = [40, 41, 42]
CHAT = [ChatMessage("system", "be brief"), ChatMessage("user", "<|im_end|>hi")]


async def test_a_prompt_has_the_ids_of_its_request_and_becomes_text_again(start_router: StartRouter) -> None:
    async with (
        FakeNetwork(OUTPUT) as network,
        start_router(network, aliases=("default",)) as router,
        AsyncClient(router.app.address) as client,
    ):
        for prompt in ("AB<|im_start|>", CHAT):
            ids = await client.tokenize(prompt, model="default")
            await client.chat(prompt, max_tokens=1) if isinstance(prompt, list) else await router.generate(
                pb.GenerateRequest(text=prompt, stopping=pb.StoppingOptions(max_tokens=1))
            )
            assert list(ids) == list(network.calls_of("prefill")[-1].spec.token_ids)
        assert await client.tokenize("AB") == await client.tokenize("AB", add_special_tokens=False) == (35, 36)
        assert await client.detokenize([35, 36, 1]) == "AB<|im_start|>"
        assert await client.detokenize([35, 36, 1], skip_special_tokens=True) == "AB"
        assert await client.detokenize([]) == ""
        request = pb.TokenizeRequest(text="AB")
        assert (await router.channel.unary(router.stub.Tokenize, request)).max_context == 256


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (pb.TokenizeRequest(), InvalidArgument, "prompt: one of text and chat"),
        (pb.TokenizeRequest(text=""), InvalidArgument, "prompt.text: is empty"),
        (pb.TokenizeRequest(text="a" * 5000), InvalidArgument, "prompt.text: gives .* at most 255"),
        (pb.TokenizeRequest(text="a", model="no"), NotFound, "no model 'no'"),
        (pb.TokenizeRequest(chat=pb.Chat()), InvalidArgument, "prompt.chat.messages: is empty"),
        (
            pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")]), add_special_tokens=True),
            InvalidArgument,
            "add_special_tokens: is not for a chat",
        ),
        (pb.DetokenizeRequest(token_ids=[400]), InvalidArgument, "token_ids: has token id 400"),
        (pb.DetokenizeRequest(token_ids=[1] * 257), InvalidArgument, "token_ids: has 257 ids; at most 256"),
        (pb.DetokenizeRequest(model="no"), NotFound, "no model 'no'"),
    ],
)
async def test_what_is_refused_names_field_and_limit(
    start_router: StartRouter,
    request_: pb.TokenizeRequest | pb.DetokenizeRequest,
    kind: type[KvferryError],
    words: str,
) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        with pytest.raises(kind, match=words):
            if isinstance(request_, pb.TokenizeRequest):
                await router.channel.unary(router.stub.Tokenize, request_)
            else:
                await router.channel.unary(router.stub.Detokenize, request_)


async def test_it_is_for_those_who_may_generate_while_the_router_is_open(start_router: StartRouter) -> None:
    tenants = (TenantConfig(name="search", api_keys=("a-key-of-search",)),)  # type: ignore[arg-type]
    async with FakeNetwork(OUTPUT) as network, start_router(network, tenants=tenants) as router:
        async with AsyncClient(router.app.address) as client:
            for call in (client.tokenize("AB"), client.detokenize([35])):
                with pytest.raises(Unauthenticated):
                    await call
        async with AsyncClient(router.app.address, api_key="a-key-of-search") as client:
            assert await client.tokenize("AB") == (35, 36)
            router.app.serving.drain()
            for call in (client.tokenize("AB"), client.detokenize([35])):
                with pytest.raises(RouterDraining):
                    await call
    async with start_router(wait=False, accept_joins=True) as router, AsyncClient(router.app.address) as client:
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await client.tokenize("AB")


async def test_long_texts_wait_off_the_loop_in_a_bounded_queue(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones never wait; the bound is that of prompts."""
    async with FakeNetwork(OUTPUT, max_context=1 << 16) as network, start_router(network) as router:
        tokenizer = router.app.models.all[0].tokenizer
        queue = EncodeQueue(num_threads=1, max_jobs=1)
        monkeypatch.setattr(tokenizer, "_queue", queue)
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        blocking = asyncio.create_task(
            queue.run(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result())
        )
        async with AsyncClient(router.app.address) as client:
            await asyncio.sleep(0)
            for call in (client.tokenize("AB" * 5000), client.detokenize([35] * 5000)):
                with pytest.raises(ResourceExhausted, match="1 prompts are being tokenised"):
                    await call
            assert await client.tokenize("AB") == (35, 36) and await client.detokenize([35]) == "A"
            release.set()
            await blocking
            assert len(await client.tokenize("AB" * 5000)) == 10000
            assert await client.detokenize([35] * 5000) == "A" * 5000
        queue.close()
