"""Text and ids of outputs that models would hardly write, from real workers (R069, R070, R075, R076)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import AsyncClient, Choice, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import KvferryError
from kvferry.sampling import FinishKind, SamplingParams
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.drains import Request
from tests.support.workers import until

EOS = 2
TIMEOUT_S = 60.0


def tokenizer_of(config: Config) -> Tokenizer:
    assert config.model.path is not None
    return Tokenizer.from_file(f"{config.model.path}/tokenizer.json")


def byte_tokens(folder: Path, text: str) -> list[int]:
    """The tokens of a text's bytes, each by itself."""
    tokenizer = Tokenizer.from_file(str(chat_folder(folder) / "tokenizer.json"))
    by_byte = {text: token_id for text, token_id in tokenizer.get_vocab().items() if len(text) == 1}
    tokenizer.model.dropout = 1.0  # no merges
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert set(ids) <= set(by_byte.values())
    return ids


def script(folder: Path, token_ids: Sequence[int], **more: Any) -> Config:
    return deployment_config(chat_folder(folder, mode="script", script=list(token_ids), **more), num_blocks=1024)


async def deltas(client: AsyncClient, options: GenerateOptions) -> list[str]:
    texts: list[str] = []
    async with client.generate(options, timeout_s=TIMEOUT_S) as events:
        async for event in events:
            texts.append(event.delta.text)
    return texts


async def test_characters_of_many_tokens_come_whole_wherever_the_output_is_cut(tmp_path: Path) -> None:
    """R069: joiners, flags, CJK, Hebrew; a tail that max_tokens cut is one mark, at the very end."""
    text = "👩‍👩‍👧🇩🇪日本שלום!"
    token_ids = byte_tokens(tmp_path / "model", text)
    assert len(token_ids) == len(text.encode())
    async with running_deployment(script(tmp_path / "model", token_ids)) as deployment:
        for max_tokens in (1, 2, 3, 4, 5, 17, 19, 20, 26, 31, 33, len(token_ids)):
            texts = await deltas(deployment.client, GenerateOptions(prompt=[5, 6], max_tokens=max_tokens))
            data = text.encode()[:max_tokens]
            assert "".join(texts) == data.decode(errors="replace")
            marked = [place for place, piece in enumerate(texts) if "\ufffd" in piece]
            assert len(marked) == (data.decode(errors="ignore").encode() != data)
            assert not any(texts[place + 1 :] != [""] * len(texts[place + 1 :]) for place in marked)
        await deployment.assert_idle()


async def test_any_ids_at_all_on_eight_streams(tmp_path: Path) -> None:
    """R070: special ones, half characters, ids of no text; each stream's text is the decode of its ids."""
    config = deployment_config(chat_folder(tmp_path / "model"))
    tokenizer = tokenizer_of(config)
    async with running_deployment(config) as deployment:
        for skips in (True, False):
            asked = [
                GenerateOptions(
                    prompt=[40 + number], max_tokens=60, seed=number, ignore_eos=True, skip_special_tokens=skips
                )
                for number in range(8)
            ]
            answers = await asyncio.gather(*(deployment.client.complete(one, timeout_s=TIMEOUT_S) for one in asked))
            for answer in answers:
                (choice,) = answer.choices
                assert len(choice.token_ids) == 60
                assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=skips)
        await deployment.assert_idle()


async def test_prompts_and_fields_of_long_characters_around_a_thousand_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R075: with debug logging, good and refused alike; no log has a word of them."""
    config = deployment_config(chat_folder(tmp_path / "model"), num_blocks=2048)
    caplog.set_level(logging.DEBUG)
    async with running_deployment(config) as deployment:
        for num_bytes in range(990, 1011):
            text = "日" * (num_bytes // 3) + "a" * (num_bytes % 3)
            assert len(text.encode()) == num_bytes
            wanted = GenerateOptions(prompt=text, max_tokens=1, request_id="請" * 80)
            assert (await deployment.client.complete(wanted, timeout_s=TIMEOUT_S)).is_complete
            for wrong in refused(text):
                with pytest.raises(KvferryError):
                    await deployment.client.complete(
                        GenerateOptions(**{"prompt": text, "max_tokens": 1, **wrong}), timeout_s=TIMEOUT_S
                    )
        await deployment.assert_idle()
    assert caplog.records and "日日日" not in caplog.text


def refused(text: str) -> list[dict[str, Any]]:
    """Fields that hold the text and cannot be served."""
    return [
        {"max_tokens": 1 << 20},
        {"stop": [text]},
        {"regex": f"({text}"},
        {"json_schema": text},
        {"model": text},
        {"tier": text},
        {"adapter": text},
        {"cache_salt": text},
        {"request_id": text},
    ]


# --- which ids, text, log-probabilities and counts go together ---


def assert_goes_together(completion: Completion, *, tokenizer: Tokenizer) -> None:
    """The relation that `kvferry/sampling.py` documents."""
    for choice in completion.choices:
        assert len(choice.logprobs) == len(choice.token_ids)
        assert [one.token_id for one in choice.logprobs] == choice.token_ids
        assert choice.finish is not None
        whole = tokenizer.decode(choice.token_ids)
        match choice.finish.kind:
            case FinishKind.END_OF_SEQUENCE | FinishKind.STOP_TOKEN:
                assert choice.token_ids[-1] == choice.finish.token_id
                assert choice.text == tokenizer.decode(choice.token_ids[:-1])
            case FinishKind.STOP_STRING:
                assert choice.finish.stop_string is not None
                assert choice.text == whole[: whole.rindex(choice.finish.stop_string)]
            case _:
                assert choice.text == whole
    assert completion.usage.completion_tokens == sum(len(choice.token_ids) for choice in completion.choices)


@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_ids_text_logprobs_and_usage_have_one_relation_for_every_end(tmp_path: Path, num_prefill: int) -> None:
    """R076, and R072 for the text of a stop id that is an ordinary word."""
    written = byte_tokens(tmp_path / "model", "one two three four five")
    config = script(tmp_path / "model", [*written, EOS, *written], step_delay_s=0.005)
    stop_id = written[9]
    ends: dict[FinishKind, dict[str, Any]] = {
        FinishKind.END_OF_SEQUENCE: {},
        FinishKind.STOP_TOKEN: {"stop_token_ids": [stop_id]},
        FinishKind.STOP_STRING: {"stop": ["ee f"]},
        FinishKind.LENGTH: {"max_tokens": 11},
        FinishKind.DEADLINE: {"time_limit_s": 0.15, "max_tokens": 2000, "ignore_eos": True},
        FinishKind.CANCELLED: {"max_tokens": 2000, "ignore_eos": True, "request_id": "mine"},
    }
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for kind, fields in ends.items():
            options = GenerateOptions(**{"prompt": [5, 6], "max_tokens": 60, "logprobs": 1, **fields})
            request = Request()
            call = asyncio.create_task(request.run(deployment.client, options))
            if kind is FinishKind.CANCELLED:
                await until(lambda request=request: request.num_tokens >= 3)  # type: ignore[misc]
                await deployment.client.abort("mine")
            completion = await asyncio.wait_for(call, TIMEOUT_S)
            (choice,) = completion.choices
            assert choice.finish is not None and choice.finish.kind is kind
            assert_goes_together(completion, tokenizer=tokenizer_of(config))
        await over_http(deployment, stop_id)
        await deployment.assert_idle()


async def over_http(deployment: Deployment, stop_id: int) -> None:
    async with AsyncOpenAI(base_url=f"{deployment.router.http_url}/v1", api_key="none", max_retries=0) as client:
        for fields in ({}, {"max_tokens": 11}, {"stop": "ee f"}, {"extra_body": {"stop_token_ids": [stop_id]}}):
            body = {"return_token_ids": True, **fields.get("extra_body", {})}  # type: ignore[dict-item]
            asked: Any = {"max_tokens": 60, **fields, "extra_body": body}
            answer = await client.completions.create(model="", prompt=[5, 6], logprobs=1, **asked)
            (choice,) = answer.choices
            assert answer.usage is not None and choice.logprobs is not None and choice.logprobs.tokens is not None
            token_ids: list[int] = json.loads(choice.model_dump_json())["token_ids"]
            assert len(token_ids) == len(choice.logprobs.tokens) == answer.usage.completion_tokens


async def test_one_choice_ends_by_a_stop_string_and_the_others_go_on(tmp_path: Path) -> None:
    """What was made of it behind the stop is neither shown nor billed."""
    config = deployment_config(chat_folder(tmp_path / "model", lowest_token_id=3, step_delay_s=0.002))
    assert config.model.path is not None
    tokenizer, script_config = tokenizer_of(config), load_script_config(Path(config.model.path))
    sampling = SamplingParams(max_tokens=80, temperature=1.0, seed=9)
    outputs = [reference_continuation([7, 8, 9], 80, script_config, sampling, choice) for choice in range(4)]
    texts = [tokenizer.decode(ids) for ids in outputs]
    stop = next(
        piece
        for place in range(20, 60)
        if (piece := texts[2][place : place + 3]) and all(piece not in text for text in texts if text is not texts[2])
    )
    async with running_deployment(config) as deployment:
        wanted = GenerateOptions(
            prompt=[7, 8, 9], n=4, seed=9, max_tokens=80, stop=[stop], temperature=1.0, logprobs=0, ignore_eos=True
        )
        completion = await deployment.client.complete(wanted, timeout_s=TIMEOUT_S)
        await deployment.assert_idle()
    assert_goes_together(completion, tokenizer=tokenizer)
    for number, choice in enumerate(completion.choices):
        assert choice.token_ids == outputs[number][: len(choice.token_ids)]
        assert ends_by(choice) is (FinishKind.STOP_STRING if number == 2 else FinishKind.LENGTH)
        assert number == 2 or choice.text == texts[number]
    assert completion.choices[2].text == texts[2][: texts[2].index(stop)]


def ends_by(choice: Choice) -> FinishKind | None:
    return None if choice.finish is None else choice.finish.kind
