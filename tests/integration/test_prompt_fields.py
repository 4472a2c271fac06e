"""Fields about the prompt, through a whole deployment: cut to its end, echoed, scored, and all of that resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from engine.scripted import load_script_config, reference_continuation, scripted_logprob
from kvferry.client import AsyncClient, ChatMessage, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import InvalidArgument
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import inference_pb2_grpc
from router.resume import prompt_digest
from tests.integration.test_missing_workers import routed
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.worker_processes import worker_process
from tests.support.workers import running_worker

PROMPT = list(range(20, 42))
"""Five full blocks of four and a partial one; byte-level ids of letters."""
TEXT = "Once upon a time, there was a café."


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = chat_folder(tmp_path / "model", max_context=96, lowest_token_id=20)
    return deployment_config(folder, max_chunk_tokens=4)


@pytest.fixture
async def deployment(config: Config) -> AsyncIterator[Deployment]:
    async with running_deployment(config) as deployment:
        yield deployment
        await deployment.assert_idle()


async def ask(client: AsyncClient, prompt: str | Sequence[int] | Sequence[ChatMessage], **fields: object) -> Completion:
    values = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **fields}
    return await client.complete(GenerateOptions(prompt=prompt, **values), timeout_s=60.0)  # type: ignore[arg-type]


def oracle(config: Config, prompt: Sequence[int], num_tokens: int = 5) -> list[int]:
    assert config.model.path is not None
    return reference_continuation(prompt, num_tokens, load_script_config(Path(config.model.path)))


def is_scored(answer: Completion, prompt: Sequence[int] = PROMPT) -> bool:
    return [(one.token_id, one.logprob) for one in answer.prompt_logprobs] == [
        (token_id, scripted_logprob(token_id)) for token_id in prompt[1:]
    ]


# --- cut to its end ---


@pytest.mark.parametrize("number", [1, 21, 22, 23, 95])
async def test_the_end_of_a_prompt_is_all_there_is(config: Config, deployment: Deployment, number: int) -> None:
    answer = await ask(deployment.client, PROMPT, max_tokens=1, truncate_prompt_tokens=number)
    kept = PROMPT[-number:]
    assert answer.choices[0].token_ids == oracle(config, kept, 1)
    assert answer.usage.prompt_tokens == answer.started.num_prompt_tokens == len(kept) == min(number, 22)
    assert answer.started.prompt_digest == prompt_digest(kept)


async def test_prompts_far_beyond_the_context_are_cut_whatever_their_kind(
    config: Config, deployment: Deployment
) -> None:
    tokenizer = deployment.router.models.all[0].tokenizer
    text = TEXT * 400
    for prompt, token_ids in (
        (text, tokenizer.encode(text)),
        (PROMPT * 30, PROMPT * 30),
        ([ChatMessage("user", text)], None),
    ):
        with pytest.raises(InvalidArgument, match="at most 95"):
            await ask(deployment.client, prompt)  # a text before it is encoded
        answer = await ask(deployment.client, prompt, truncate_prompt_tokens=50, max_tokens=3)
        assert answer.usage.prompt_tokens == 50
        if token_ids is not None:
            assert answer.choices[0].token_ids == oracle(config, token_ids[-50:], 3)
    with pytest.raises(InvalidArgument, match="bytes"):
        await ask(deployment.client, "x" * (config.router.max_request_bytes + 1), truncate_prompt_tokens=5)


async def test_a_cut_prompt_is_resumed(deployment: Deployment) -> None:
    whole = await ask(deployment.client, TEXT * 40, truncate_prompt_tokens=9, seed=3, echo=True, prompt_logprobs=0)
    ids, text = whole.choices[0].token_ids, whole.choices[0].text
    request = GenerateOptions(
        prompt=TEXT * 40,
        truncate_prompt_tokens=9,
        seed=3,
        max_tokens=5,
        temperature=0.0,
        ignore_eos=True,
        echo=True,
        prompt_logprobs=0,
    ).to_pb()
    request.resume.prompt_digest = whole.started.prompt_digest
    request.resume.num_prompt_logprobs = 8
    request.resume.choices.add(token_ids=ids[:2], num_text_chars=4)
    messages = await raw(deployment, request)
    assert [token_id for message in messages for token_id in message.delta.token_ids] == ids[2:]
    assert "".join(message.delta.text for message in messages) == text[4:]
    assert not any(message.HasField("prompt_logprobs") for message in messages)


async def raw(deployment: Deployment, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with RpcChannel(deployment.router.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
        async with channel.stream(stub.Generate, request, timeout_s=30.0) as call:
            return [message async for message in call]


# --- echoed ---


async def test_each_choice_begins_with_the_prompt(deployment: Deployment) -> None:
    tokenizer = deployment.router.models.all[0].tokenizer
    ids = tokenizer.encode(TEXT)
    for prompt, shown in ((TEXT, TEXT), (ids, TEXT)):
        for fields in ({"n": 2}, {"n": 1, "best_of": 3}):
            sampled = {"temperature": 1.0, "seed": 5, "stop": ["a time"], **fields}
            plain = await ask(deployment.client, prompt, **sampled)
            answer = await ask(deployment.client, prompt, echo=True, **sampled)
            assert [one.token_ids for one in answer.choices] == [one.token_ids for one in plain.choices]
            assert [one.text for one in answer.choices] == [shown + one.text for one in plain.choices]
    beams = await ask(deployment.client, TEXT, echo=True, beam_width=2, n=2, temperature=None)
    assert all(choice.text.startswith(TEXT) for choice in beams.choices)
    cut = await ask(deployment.client, TEXT, echo=True, truncate_prompt_tokens=3)
    assert cut.choices[0].text == tokenizer.decode([*ids[-3:], *cut.choices[0].token_ids])


# --- scored ---


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_scores_come_once_whatever_the_cache_holds(config: Config, num_prefill: int) -> None:
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for number_cached, fields in ((0, {}), (0, {"prompt_logprobs": 2}), (20, {}), (0, {"prompt_logprobs": 0})):
            answer = await ask(deployment.client, PROMPT, **fields)
            assert answer.choices[0].token_ids == oracle(config, PROMPT)
            assert answer.usage.cached_tokens == number_cached
            assert is_scored(answer) if fields else not answer.prompt_logprobs
            assert all(len(one.top) == fields.get("prompt_logprobs", 0) for one in answer.prompt_logprobs)
        several = await ask(
            deployment.client, PROMPT, temperature=1.0, n=2, best_of=3, echo=True, prompt_logprobs=0, logprobs=0
        )
        assert is_scored(several)
        assert is_scored(await ask(deployment.client, [7], prompt_logprobs=3), [7])
        await deployment.assert_idle()


async def test_a_resume_computes_only_what_is_missing(config: Config, deployment: Deployment) -> None:
    await ask(deployment.client, PROMPT)
    for num_received, num_cached in ((0, 0), (10, 8), (20, 20), (21, 20)):
        request = resumed(num_received)
        messages = await raw(deployment, request)
        scores = [message.prompt_logprobs for message in messages if message.HasField("prompt_logprobs")]
        told = [one.token_id for message in scores for one in message.logprobs]
        assert told == PROMPT[1 + num_received :]
        assert not scores or scores[0].token_index == 1 + num_received
        assert messages[-1].completed.usage.cached_tokens == num_cached
        assert [token_id for one in messages for token_id in one.delta.token_ids] == oracle(config, PROMPT)


def resumed(num_prompt_logprobs: int, *token_ids: int, **response: int) -> pb.GenerateRequest:
    options = GenerateOptions(prompt=PROMPT, max_tokens=5, temperature=0.0, seed=1, ignore_eos=True)
    request = options.to_pb()
    request.response.MergeFrom(pb.ResponseOptions(**(response or {"prompt_logprobs": 0})))  # type: ignore[arg-type]
    request.resume.prompt_digest = prompt_digest(PROMPT)
    request.resume.num_prompt_logprobs = num_prompt_logprobs
    if token_ids:
        request.resume.choices.add(token_ids=token_ids)
    return request


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (resumed(22), "22 is above 21"),
        (resumed(20, 30), "20 is below 21"),
        (resumed(1, logprobs=0), "response.prompt_logprobs is not set"),
    ],
)
async def test_resumes_that_cannot_be_are_refused(
    deployment: Deployment, request_: pb.GenerateRequest, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        await raw(deployment, request_)
    assert refused.value.field == "resume.num_prompt_logprobs"


@pytest.mark.processes
async def test_a_prefill_worker_killed_within_the_prompt_changes_nothing(tmp_path: Path, config: Config) -> None:
    """Each place comes once: `AsyncClient.complete` refuses one that is doubled or missing."""
    faulty = config.replace("faults", allow_faults=True, kill_prefill_at_step=4)
    async with (
        running_worker("prefill", config) as well,
        running_worker("decode", config) as decode,
        worker_process(tmp_path, faulty, "prefill_svc") as killed,
        routed(config, prefill=[killed.address, well.address], decode=[decode.address]) as deployment,
    ):
        assert await deployment.router.wait_ready(20.0)
        async with asyncio.timeout(60.0):
            answers: list[Completion] = []
            while not answers or max(answer.timings.num_attempts for answer in answers) == 1:
                answers.append(await ask(deployment.client, PROMPT, prompt_logprobs=1, bypass_prefix_cache=True))
        for answer in answers:
            assert is_scored(answer)
            assert answer.choices[0].token_ids == oracle(config, PROMPT)
        assert killed.process.poll() is not None
