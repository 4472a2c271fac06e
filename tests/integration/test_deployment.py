"""Router, prefill and decode together over real gRPC; the scripted model's tokens depend on every shipped byte."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import ChatMessage, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import InvalidArgument, NotFound, ResourceExhausted
from kvferry.sampling import FinishKind
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.workers import core_of


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return deployment_config(chat_folder(tmp_path / "model"))


def oracle(config: Config, prompt: list[int], num_tokens: int) -> list[int]:
    assert config.model.path is not None
    return reference_continuation(prompt, num_tokens, load_script_config(Path(config.model.path)))


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(num_tokens)]


async def ask(deployment: Deployment, prompt: list[int], max_tokens: int, **options: object) -> Completion:
    values = {"temperature": 0.0, "ignore_eos": True, **options}
    request = GenerateOptions(prompt=prompt, max_tokens=max_tokens, **values)  # type: ignore[arg-type]
    return await deployment.client.complete(request, timeout_s=60.0)


@pytest.mark.parametrize("num_prefill", [0, 1, 2])
async def test_tokens_are_the_oracles_split_and_in_single_process_mode(config: Config, num_prefill: int) -> None:
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for length in (1, 3, 4, 5, 12, 13, 50):
            prompt = random_prompt(length, length)
            answer = await ask(deployment, prompt, 11)
            assert answer.choices[0].token_ids == oracle(config, prompt, 11)
            assert answer.usage.prompt_tokens == length and answer.usage.completion_tokens == 11
            assert (answer.timings.num_blocks_shipped > 0) == (num_prefill > 0)
        await deployment.assert_idle()


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5])
async def test_the_count_of_tokens_is_exact(config: Config, max_tokens: int) -> None:
    async with running_deployment(config) as deployment:
        prompt = random_prompt(0, 9)
        answer = await ask(deployment, prompt, max_tokens)
        assert answer.choices[0].token_ids == oracle(config, prompt, max_tokens)
        assert answer.choices[0].finish is not None and answer.choices[0].finish.kind is FinishKind.LENGTH
        if max_tokens == 1:
            assert answer.timings.num_blocks_shipped == 0
            assert deployment.decode[0].role.load().num_blocks_shipped == 0
        await deployment.assert_idle()


async def test_sixty_four_streams_of_mixed_lengths_complete(config: Config) -> None:
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment:
        cases = [(random_prompt(i, 1 + (7 * i) % 60), 1 + (5 * i) % 40) for i in range(64)]
        answers = await asyncio.gather(*(ask(deployment, prompt, number) for prompt, number in cases))
        for (prompt, number), answer in zip(cases, answers, strict=True):
            assert answer.choices[0].token_ids == oracle(config, prompt, number)
        await deployment.assert_idle()


async def test_a_slow_reader_slows_only_itself(config: Config) -> None:
    async with running_deployment(config) as deployment:
        slow = GenerateOptions(prompt=random_prompt(1, 5), max_tokens=300, temperature=0.0, ignore_eos=True)
        async with deployment.client.generate(slow, timeout_s=60.0) as events:
            assert (await anext(events)).WhichOneof("event") == "started"
            # It reads nothing more; meanwhile others are served and its own tokens are made.
            for number in range(5):
                prompt = random_prompt(number, 20)
                assert (await ask(deployment, prompt, 20)).choices[0].token_ids == oracle(config, prompt, 20)
            answer = Completion()
            async for event in events:
                answer.add(event)
        assert answer.choices[0].token_ids == oracle(config, random_prompt(1, 5), 300)
        await deployment.assert_idle()


async def test_the_same_seed_gives_the_same_tokens_in_every_company_and_mode(config: Config) -> None:
    prompt = random_prompt(3, 17)
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 1234567890123456789}
    outputs = []
    for num_prefill in (0, 1):
        async with running_deployment(config, num_prefill=num_prefill) as deployment:
            outputs.append((await ask(deployment, prompt, 20, **sampled)).choices[0].token_ids)
            others = [ask(deployment, random_prompt(i, 10), 20, temperature=1.0) for i in range(31)]
            answers = await asyncio.gather(ask(deployment, prompt, 20, **sampled), *others)
            outputs.append(answers[0].choices[0].token_ids)
            assert answers[0].started.sampling.seed == sampled["seed"]
    assert len({tuple(output) for output in outputs}) == 1
    assert outputs[0] != oracle(config, prompt, 20)


async def test_a_drawn_seed_is_echoed_and_repeats_the_answer(config: Config) -> None:
    async with running_deployment(config) as deployment:
        prompt = random_prompt(5, 8)
        first = await ask(deployment, prompt, 12, temperature=1.0)
        again = await ask(deployment, prompt, 12, temperature=1.0, seed=first.started.sampling.seed)
        other = await ask(deployment, prompt, 12, temperature=1.0)
        assert first.choices[0].token_ids == again.choices[0].token_ids
        assert first.started.sampling.seed != other.started.sampling.seed


async def test_cached_tokens_are_counted_when_a_prompt_comes_again(config: Config) -> None:
    async with running_deployment(config) as deployment:
        prompt = random_prompt(6, 18)
        cold, warm = await ask(deployment, prompt, 5), await ask(deployment, prompt, 5)
        assert cold.choices[0].token_ids == warm.choices[0].token_ids
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 16)
        assert (warm.timings.num_blocks_shipped, warm.timings.num_blocks_reused) == (1, 4)


async def test_chat_goes_through_the_template(config: Config) -> None:
    async with running_deployment(config) as deployment:
        messages = [ChatMessage("user", "Hello")]
        answer = await deployment.client.complete(GenerateOptions(prompt=messages, max_tokens=4, ignore_eos=True))
        assert answer.usage.prompt_tokens > len("Hello") // 2
        assert len(answer.choices[0].token_ids) == 4


async def test_decode_dies_in_mid_stream_and_the_text_goes_on(tmp_path: Path) -> None:
    config = deployment_config(chat_folder(tmp_path / "model", step_delay_s=0.005))
    async with running_deployment(config, num_prefill=1, num_decode=2) as deployment:
        prompt = random_prompt(7, 21)
        options = GenerateOptions(prompt=prompt, max_tokens=60, temperature=0.0, ignore_eos=True)
        answer = Completion()
        async with deployment.client.generate(options, timeout_s=60.0) as events:
            async for event in events:
                answer.add(event)
                if len(answer.choices and answer.choices[0].token_ids) == 10:
                    (victim,) = [worker for worker in deployment.decode if core_of(worker).sequences]
                    await victim.stop()
        answer.check_complete()
        assert answer.choices[0].token_ids == oracle(config, prompt, 60)
        assert answer.timings.num_attempts == 2


BAD = {
    "empty prompt": (GenerateOptions(prompt=""), InvalidArgument, "text"),
    "empty ids": (GenerateOptions(prompt=[]), InvalidArgument, "token_ids"),
    "id out of range": (GenerateOptions(prompt=[1 << 20]), InvalidArgument, "token_ids"),
    "prompt beyond the context": (GenerateOptions(prompt=[1] * 5000), InvalidArgument, "context"),
    "max_tokens beyond the context": (GenerateOptions(prompt=[1], max_tokens=5000), InvalidArgument, "max_tokens"),
    "negative temperature": (GenerateOptions(prompt=[1], temperature=-1.0), InvalidArgument, "temperature"),
    "nan temperature": (GenerateOptions(prompt=[1], temperature=float("nan")), InvalidArgument, "temperature"),
    "unknown model": (GenerateOptions(prompt=[1], model="gpt-9"), NotFound, "gpt-9"),
    "unknown tier": (GenerateOptions(prompt=[1], tier="gold"), InvalidArgument, "gold"),
    "too many choices": (GenerateOptions(prompt=[1], n=65), InvalidArgument, "sampling.n: 65"),
    "larger than the pool": (GenerateOptions(prompt=[1], max_tokens=600), ResourceExhausted, "128"),
}


async def test_bad_requests_are_refused_by_name_and_good_ones_go_on(config: Config) -> None:
    async with running_deployment(config) as deployment:
        for name, (options, error, word) in BAD.items():
            with pytest.raises(error, match=word):
                await deployment.client.complete(options, timeout_s=10.0)
            prompt = random_prompt(len(name), 6)
            assert (await ask(deployment, prompt, 3)).choices[0].token_ids == oracle(config, prompt, 3), name
        await deployment.assert_idle()
        assert sum(core_of(worker).num_steps for worker in deployment.prefill) < 60


@pytest.mark.parametrize("data", [b"\x1a\x03\xff\xfe\xfd", b"\xff\xff\xff\xff"], ids=["bad utf-8", "garbage"])
async def test_bytes_that_are_no_message_are_refused_and_nothing_dies(config: Config, data: bytes) -> None:
    async with running_deployment(config) as deployment:
        addresses = {
            "/kvferry.v1.InferenceService/Generate": deployment.router.address,
            "/kvferry.v1.PrefillService/Prefill": deployment.prefill[0].address,
        }
        for method, address in addresses.items():
            async with grpc.aio.insecure_channel(address) as channel:
                unary: Any = channel.unary_stream(method)
                call = unary(data)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for method in ("/kvferry.v1.DecodeService/Decode", "/kvferry.v1.ShipService/Ship"):
            async with grpc.aio.insecure_channel(deployment.decode[0].address) as channel:
                duplex: Any = channel.stream_stream(method)
                stream = duplex()
                await stream.write(data)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        prompt = random_prompt(1, 6)
        assert (await ask(deployment, prompt, 3)).choices[0].token_ids == oracle(config, prompt, 3)
        await deployment.assert_idle()


async def test_two_hundred_cancels_at_random_moments_leave_nothing(tmp_path: Path) -> None:
    config = deployment_config(chat_folder(tmp_path / "model", step_delay_s=0.002), max_chunk_tokens=8, num_blocks=64)
    rng = random.Random(0)
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment:

        async def one(number: int) -> None:
            prompt = random_prompt(number, 1 + number % 50)
            asking = asyncio.ensure_future(ask(deployment, prompt, 30))
            done, _ = await asyncio.wait([asking], timeout=rng.random() * 0.3)
            if done:
                assert asking.result().choices[0].token_ids == oracle(config, prompt, 30)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        for start in range(0, 200, 16):
            await asyncio.gather(*(one(number) for number in range(start, start + 16)))
        await deployment.assert_idle()
        prompt = random_prompt(9, 30)
        assert (await ask(deployment, prompt, 30)).choices[0].token_ids == oracle(config, prompt, 30)
