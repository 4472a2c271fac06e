"""Completions, whole and streamed, by the OpenAI package."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import openai
import pytest

from kvferry.sampling import BeamParams, Finish, FinishKind
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import worker_pb2
from router.text.tokenizer import TextTokenizer
from tests.support.fake_workers import FakeNetwork, Point
from tests.support.workers import until
from tests.unit.router.openai_gateway.conftest import EOS, OUTPUT, StartGateway


async def test_a_whole_completion(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.openai.completions.create(model="tiny", prompt="AB", max_tokens=5, temperature=0)
        assert answer.model == "tiny"
        assert answer.id.startswith("cmpl-")
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs, choice.index) == ("HELLO", "length", None, 0)
        assert answer.usage is not None
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert gateway.network.calls[0].spec.token_ids == (35, 36)


async def test_sixteen_tokens_unless_told_otherwise(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.openai.completions.create(model="tiny", prompt="AB")
        assert answer.usage is not None and answer.usage.completion_tokens == 16


async def test_a_streamed_completion_has_the_text_of_a_whole_one(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        stream = await gateway.openai.completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert len({chunk.id for chunk in chunks}) == 1
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "HELLOWORL"
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
        assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9


async def test_usage_is_streamed_only_where_it_is_wanted(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        stream = await gateway.openai.completions.create(model="tiny", prompt="AB", max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_numbered_through_with_their_choices(
    start_gateway: StartGateway, stream: bool
) -> None:
    network = FakeNetwork(OUTPUT)
    network.outputs[1] = OUTPUT[5:]
    async with start_gateway(network) as gateway:
        fields = {"model": "tiny", "prompt": [[5], [6, 7]], "max_tokens": 5, "n": 2}
        if stream:
            chunks = await gateway.openai.completions.create(**fields, stream=True)  # type: ignore[call-overload]
            texts = ["", "", "", ""]
            async for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            answer = await gateway.openai.completions.create(**fields)  # type: ignore[call-overload]
            assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 20
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            texts = [choice.text for choice in answer.choices]
        assert texts == ["HELLO", "WORLD", "HELLO", "WORLD"]
        assert {call.spec.token_ids for call in network.calls} == {(5,), (6, 7)}


async def test_a_prompt_that_fails_ends_the_others(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await gateway.openai.completions.create(model="tiny", prompt=[[5], [100_000]], stream=True)
        await gateway.network.all_ended()
        await until(lambda: gateway.router.app.serving.num_running == 0)


async def test_nothing_is_told_before_all_prompts_are_accepted(start_gateway: StartGateway) -> None:
    """The first has all its tokens by the time the second proves too long."""
    encode = TextTokenizer.encode_async
    async with start_gateway() as gateway:
        network = gateway.network

        async def encode_late(self: TextTokenizer, text: str, **fields: Any) -> list[int]:
            if text != "A":
                await network.reached(Point.FIRST_TOKEN_SENT)
                await network.all_ended()
            return await encode(self, text, **fields)

        with (
            patch.object(TextTokenizer, "encode_async", encode_late),
            pytest.raises(openai.BadRequestError, match="fit the context"),
        ):
            prompts = ["A", "a b " * 600]
            await gateway.openai.completions.create(model="tiny", prompt=prompts, stream=True, max_tokens=2)


async def test_stop_strings_end_the_text_and_are_told(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.openai.completions.create(model="tiny", prompt="AB", max_tokens=9, stop=["LO", "X"])
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("HEL", "stop")
        assert choice.model_extra == {"stop_reason": "LO"}
        kept = await gateway.openai.completions.create(
            model="tiny", prompt="AB", max_tokens=9, stop="LO", extra_body={"include_stop_str_in_output": True}
        )
        assert kept.choices[0].text == "HELLO"


async def test_end_of_sequence_is_a_stop(start_gateway: StartGateway) -> None:
    async with start_gateway(FakeNetwork([*OUTPUT[:3], EOS])) as gateway:
        choice = (await gateway.openai.completions.create(model="tiny", prompt="AB", max_tokens=9)).choices[0]
        assert (choice.text, choice.finish_reason) == ("HEL", "stop")
        assert choice.model_extra == {"stop_reason": None}


async def test_fields_reach_the_workers(start_gateway: StartGateway) -> None:
    """Every sampling field, OpenAI's and vLLM's."""
    async with start_gateway() as gateway:
        await gateway.openai.completions.create(
            model="tiny",
            prompt="AB",
            max_tokens=4,
            temperature=0.5,
            top_p=0.25,
            seed=-1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": 2},
            extra_body={
                "top_k": 3,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "stop_token_ids": [9],
                "min_tokens": 2,
                "ignore_eos": True,
                "allowed_token_ids": [7, 8],
                "bad_words": ["A"],
                "cache_salt": "salt",
            },
        )
        spec = gateway.network.calls[0].spec
        sampling, rules = spec.sampling, spec.sampling.rules
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
        assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == ((1 << 64) - 1, 2, True)
        assert (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty) == (0.5, -0.5, 1.5)
        assert (rules.bias, rules.allowed_token_ids, sampling.stop_token_ids) == (((7, 2.0),), (7, 8), (9,))
        assert (35,) in rules.bad_words and spec.cache_salt == "salt"


async def test_top_k_of_minus_one_is_off(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        await gateway.openai.completions.create(model="tiny", prompt="AB", max_tokens=1, extra_body={"top_k": -1})
        assert gateway.network.calls[0].spec.sampling.top_k == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_completions(start_gateway: StartGateway, stream: bool) -> None:
    async with start_gateway() as gateway:
        fields = {"model": "tiny", "prompt": "AB", "max_tokens": 3, "logprobs": 2}
        if stream:
            tokens: list[str] = []
            offsets: list[int] = []
            async for chunk in await gateway.openai.completions.create(**fields, stream=True):  # type: ignore[call-overload]
                for choice in chunk.choices:
                    if choice.logprobs is not None:
                        tokens += choice.logprobs.tokens
                        offsets += choice.logprobs.text_offset
        else:
            answer = await gateway.openai.completions.create(**fields)  # type: ignore[call-overload]
            logprobs = answer.choices[0].logprobs
            tokens, offsets = logprobs.tokens, logprobs.text_offset
            assert logprobs.token_logprobs == [-1.0] * 3
            assert logprobs.top_logprobs[0] == {"H": -1.0, "I": -1.0}
        assert tokens == ["H", "E", "L"]
        assert offsets == [0, 1, 2]


async def test_tokens_may_be_named_by_id_and_returned_as_ids(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        answer = await gateway.openai.completions.create(
            model="tiny", prompt="AB", max_tokens=2, logprobs=0, extra_body=extra
        )
        choice = answer.choices[0]
        assert choice.logprobs is not None and choice.logprobs.tokens == [f"token_id:{OUTPUT[0]}", "token_id:39"]
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == OUTPUT[:2]
        assert choice.model_extra["prompt_token_ids"] == [35, 36]


async def test_service_tier_is_a_tier_of_ours(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        for asked, served in (("auto", "standard"), ("default", "standard"), ("interactive", "interactive")):
            answer = await gateway.openai.completions.create(
                model="tiny", prompt="AB", max_tokens=1, extra_body={"service_tier": asked}
            )
            assert answer.model_extra is not None and answer.model_extra["service_tier"] == served
        with pytest.raises(Exception, match="service_tier: there is no tier 'gold'"):
            await gateway.openai.completions.create(model="tiny", prompt="AB", extra_body={"service_tier": "gold"})


async def test_beam_search_in_vllms_words(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        gateway.network.beams = [
            worker_pb2.Beam(
                token_ids=OUTPUT[start : start + 3],
                score=-0.5,
                cumulative_logprob=-1.5,
                finish=finish_to_pb(Finish(FinishKind.LENGTH)),
            )
            for start in (0, 5)
        ]
        extra = {"use_beam_search": True, "length_penalty": 2.0, "early_stopping": True}
        answer = await gateway.openai.completions.create(
            model="tiny", prompt="AB", max_tokens=3, n=2, best_of=4, extra_body=extra
        )
        assert [choice.text for choice in answer.choices] == ["HEL", "WOR"]
        assert gateway.network.calls[0].spec.beam == BeamParams(4, 2.0, True, 2)
