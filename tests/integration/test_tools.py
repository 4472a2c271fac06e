"""Calls of tools with the OpenAI package against real workers: read, made by random weights, the same when streamed.

The tiny models have random weights: all that makes them call a tool, and rightly, is the grammar.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from transformers import PreTrainedTokenizerFast

from engine.scripted import ScriptConfig
from kvferry.client import AsyncClient, ChatMessage, GenerateOptions, PinOptions, Tool, ToolCall
from kvferry.config import Config
from kvferry.errors import InvalidArgument
from kvferry.sampling import FinishKind
from tests.support.deployment import Deployment, deployment_config, running_deployment
from tests.support.models import EOS_TOKEN_ID, TOOL_TEMPLATES, VOCAB_SIZE, save_scripted_model, save_tiny_model

MARKER_ID = 258
SPACES = {str(token_id): -50 for token_id in (220, 197, 198, 201)}
"""Bias against white space, of which random weights write as much as they may."""
USER: Any = {"role": "user", "content": "Who is there?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "tag": {"enum": ["red", "grün", None]}},
    "required": ["age", "tag"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "person", "description": "Says who.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "nobody"}},
]
PERSON: Any = {"type": "function", "function": {"name": "person"}}
ARGUMENTS = '{"age": 36, "tag": "red"}'
CALL = f'{{"name": "person", "arguments": {ARGUMENTS}}}'


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[Deployment, AsyncOpenAI]]:
    async with running_deployment(config) as deployment:
        url = f"{deployment.router.http_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=90.0) as client:
            yield deployment, client
        await deployment.assert_idle()


def says(folder: Path, tool_format: str, *parts: str | int) -> Config:
    """A scripted model whose every output is these texts and tokens, and then its end."""
    save_scripted_model(folder, tool_format=tool_format)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}))
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    script = [one for part in parts for one in (tokenizer.encode(part) if isinstance(part, str) else [part])]
    config = ScriptConfig(vocab_size=VOCAB_SIZE, mode="script", script=(*script, EOS_TOKEN_ID))
    save_scripted_model(folder, config, tool_format=tool_format)
    return deployment_config(folder, num_blocks=512)


@pytest.fixture(scope="module", params=TOOL_TEMPLATES)
def random_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", tool_format=request.param)


def config_of(folder: Path) -> Config:
    return deployment_config(folder, timeout_s=30.0, block_size=16, num_blocks=1024)


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    """Content and calls of a choice that came in pieces, and why it ended."""
    content: str | None = None
    calls: list[dict[str, str]] = []
    reason = ""
    async for chunk in await client.chat.completions.create(model="", stream=True, **fields):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            if choice.delta.content is not None:
                content = (content or "") + choice.delta.content
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                if piece.function.name is not None:
                    assert piece.index == len(calls) and piece.id and piece.type == "function"
                    calls.append({"name": piece.function.name, "arguments": ""})
                calls[piece.index]["arguments"] += piece.function.arguments or ""
    return {"content": content, "calls": calls}, reason


async def whole(client: AsyncOpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    (choice,) = (await client.chat.completions.create(model="", **fields)).choices
    calls: list[Any] = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    told = [{"name": call.function.name, "arguments": call.function.arguments} for call in calls]
    return {"content": choice.message.content, "calls": told}, choice.finish_reason


def is_right(call: dict[str, str]) -> bool:
    arguments = json.loads(call["arguments"])
    return is_person(arguments) if call["name"] == "person" else arguments == {}


def is_person(value: Any) -> bool:
    """As `SCHEMA` says."""
    has_keys = isinstance(value, dict) and value.keys() == {"age", "tag"}
    return has_keys and type(value["age"]) is int and 0 <= value["age"] <= 150 and value["tag"] in ("red", "grün", None)


@pytest.mark.parametrize(
    ("tool_format", "parts", "content"),
    [
        (
            "hermes",
            ["Let me see.\n", MARKER_ID, f"\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"],
            "Let me see.",
        ),
        ("hermes", [f"<tool_call>{CALL}</tool_call><tool_call>", CALL], None),
        ("llama3_json", [MARKER_ID, f"{CALL};{CALL}"], None),
        ("mistral", [MARKER_ID, f" [{CALL}, {CALL}]"], None),
    ],
)
async def test_what_a_model_says_is_read(
    tmp_path: Path, tool_format: str, parts: list[Any], content: str | None
) -> None:
    """Markers that are special tokens among them, which the text of other requests is without."""
    fields: Any = {"messages": [USER], "tools": TOOLS, "max_tokens": 250}
    async with serving(says(tmp_path, tool_format, *parts)) as (deployment, client):
        told, reason = await whole(client, **fields)
        assert told == {"content": content, "calls": [{"name": "person", "arguments": ARGUMENTS}] * 2}
        assert reason == "tool_calls"
        assert (await streamed(client, **fields)) == (told, reason)
        untold, reason = await whole(client, **{**fields, "tool_choice": "none"})
        assert untold["calls"] == [] and reason == "stop" and CALL in untold["content"]
        assert tool_format == "hermes" or not untold["content"].startswith(("<|python_tag|>", "[TOOL"))
        cut, reason = await whole(client, **{**fields, "max_tokens": 30})
        assert cut["calls"] == [] and reason == "length" and cut["content"]
        assert (await streamed(client, **{**fields, "max_tokens": 30})) == (cut, reason)
        (model,) = deployment.router.models.all
        assert model.tool_format is not None and model.tool_format.name == tool_format


async def test_what_is_no_call_is_content(tmp_path: Path) -> None:
    text = f"<tool_call>{CALL[:-1]}</tool_call> <tool_call>{CALL.replace('person', 'other')}</tool_call>"
    async with serving(says(tmp_path, "hermes", text)) as (_, client):
        fields: Any = {"messages": [USER], "tools": TOOLS, "max_tokens": 250}
        assert await whole(client, **fields) == ({"content": text, "calls": []}, "stop")
        assert (await streamed(client, **fields)) == ({"content": text, "calls": []}, "stop")


async def test_twenty_forced_calls_of_twenty_are_right(random_folder: Path) -> None:
    """By name and required; of random weights."""
    async with serving(config_of(random_folder)) as (_, client):

        async def one(number: int) -> None:
            is_named, is_single = number % 2 == 0, number % 4 != 3
            fields: Any = {
                "messages": [{"role": "user", "content": f"Say {number}"}],
                "tools": TOOLS,
                "tool_choice": PERSON if is_named else "required",
                "parallel_tool_calls": not is_single,
                "seed": number,
                "logit_bias": SPACES,
                "max_tokens": 250,
            }
            told, reason = await whole(client, **fields)
            calls, is_cut = told["calls"], reason == "length"
            assert (told["content"] is None and reason == "tool_calls") or not (is_single or is_named), told
            assert calls and all(map(is_right, calls[:-1] if is_cut else calls))
            assert len(calls) == 1 or not (is_single or is_named)
            assert not is_named or calls[0]["name"] == "person"
            if number < 4:
                again, same_reason = await streamed(client, **fields)
                assert (again, same_reason) == (told, reason)

        await asyncio.gather(*map(one, range(20)))


async def test_a_forced_call_that_is_cut_is_told_as_far_as_it_came(random_folder: Path) -> None:
    async with serving(config_of(random_folder)) as (_, client):
        fields: Any = {
            "messages": [USER],
            "tools": TOOLS,
            "tool_choice": PERSON,
            "logit_bias": SPACES,
            "temperature": 0.0,
        }
        complete, _ = await whole(client, **fields, max_tokens=250)
        told, reason = await whole(client, **fields, max_tokens=40)
        assert reason == "length" and told["content"] is None
        assert told["calls"][0]["name"] == "person" and len(told["calls"][0]["arguments"]) > 3
        assert complete["calls"][0]["arguments"].startswith(told["calls"][0]["arguments"])
        assert (await streamed(client, **fields, max_tokens=40)) == (told, reason)


async def test_a_call_that_a_model_begins_is_made_right_where_it_is_strict(tmp_path: Path) -> None:
    """The marker is made likely, the rest is up to the random weights."""
    folder = save_tiny_model(tmp_path / "llama", "llama", tool_format="hermes")
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    async with serving(config_of(folder)) as (_, client):
        for seed in range(2):
            fields: Any = {"messages": [USER], "seed": seed, "logit_bias": {**SPACES, str(MARKER_ID): 40}}
            for tools in (strict, TOOLS):
                told, reason = await whole(client, **fields, tools=tools, parallel_tool_calls=False, max_tokens=250)
                assert reason == "tool_calls" and len(told["calls"]) == 1 and is_right(told["calls"][0])
            told, reason = await whole(client, **fields, tools=strict, max_tokens=250)
            assert told["calls"] and all(map(is_right, told["calls"][:-1]))
        fields["logit_bias"] = {str(MARKER_ID): -100}
        told, reason = await whole(client, **fields, tools=strict, max_tokens=40)
        assert told["calls"] == [] and told["content"]


async def test_a_conversation_with_tools_goes_on(tmp_path: Path) -> None:
    """With the message as the package gives it, and with the same ids over gRPC, for pins and from transformers."""
    config = says(tmp_path, "hermes", MARKER_ID, f"\n{CALL}\n</tool_call>")
    async with serving(config) as (deployment, client):
        answer = (await client.chat.completions.create(model="", messages=[USER], tools=TOOLS)).choices[0].message
        (call,) = answer.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "Ada is."}
        messages: Any = [USER, answer, result]
        told = await client.chat.completions.create(
            model="", messages=messages, tools=TOOLS, max_tokens=1, extra_body={"return_token_ids": True}
        )
        ids = told.choices[0].model_dump()["prompt_token_ids"]
        as_dicts = [USER, {**answer.model_dump(exclude_none=True), "content": ""}, result]
        as_dicts[1]["tool_calls"][0]["function"]["arguments"] = json.loads(ARGUMENTS)
        theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert ids == theirs.apply_chat_template(as_dicts, tools=TOOLS, add_generation_prompt=True, return_dict=False)

        tools = [Tool("person", "Says who.", json.dumps(SCHEMA)), Tool("nobody")]
        turns = [
            ChatMessage("user", USER["content"]),
            ChatMessage("assistant", "", [ToolCall("person", ARGUMENTS, call.id)]),
            ChatMessage("tool", "Ada is.", tool_call_id=call.id),
        ]
        completion = await deployment.client.complete(GenerateOptions(prompt=turns, tools=tools, max_tokens=1))
        assert completion.usage.prompt_tokens == len(ids)
        assert completion.usage.cached_tokens >= len(ids) - 2 * config.engine.block_size
        pinned = await deployment.client.pin_prefix(PinOptions("here", turns, tools=tools))
        assert pinned.num_tokens == len(ids) - len(theirs.encode("<|bos|>assistant\n"))
        await deployment.client.unpin_prefix("here")


TAG: Any = {
    "structures": [
        {"begin": "<person>", "schema": SCHEMA, "end": "</person>"},
        {"begin": "<number>", "schema": {"type": "integer", "minimum": 1, "maximum": 99}, "end": "."},
    ],
    "triggers": ["<"],
}


def tagged(text: str) -> list[Any]:
    """Values of the tags; nothing else may begin with `<`."""
    values = []
    for part in text.split("<")[1:]:
        if part.startswith("/person>"):
            continue
        name, _, rest = part.partition(">")
        assert name in ("person", "number")
        values.append(json.loads(rest.partition(".")[0] if name == "number" else rest))
        assert name == "number" or is_person(values[-1])
    return values


async def test_structural_tags_bind_what_follows_their_triggers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", "llama")
    async with serving(config_of(folder)) as (deployment, client):
        (start,) = deployment.router.models.all[0].tokenizer.encode("<")
        num_found = 0
        for seed in range(3):
            bias = {start: 9.0, **{int(token_id): value for token_id, value in SPACES.items()}}
            options = GenerateOptions(
                prompt=[1, 2], seed=seed, max_tokens=120, logit_bias=bias, structural_tag=json.dumps(TAG)
            )
            (choice,) = (await deployment.client.complete(options, timeout_s=90.0)).choices
            text = choice.text
            if choice.finish is not None and choice.finish.kind is FinishKind.LENGTH:
                text = text[: max(text.rfind("<person>"), text.rfind("<number>"))]  # cut, perhaps in a tag
            num_found += len(tagged(text))
            fields: Any = {"prompt": [1, 2], "seed": seed, "max_tokens": 120, "logit_bias": bias}
            for form in (
                {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
                {"response_format": {"type": "structural_tag", **TAG}},
            ):
                answer = await client.completions.create(model="", **fields, extra_body=form)
                assert answer.choices[0].text == choice.text
        assert num_found > 3


async def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    plain = save_tiny_model(tmp_path / "plain", "llama")
    base: Any = {"messages": [USER], "tools": TOOLS, "max_tokens": 3}
    strange = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    refused: list[tuple[dict[str, Any], str, str]] = [
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "more than one constraint",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "none of the tools",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "cannot be kept with tool_choice auto"),
        ({"tools": strange, "tool_choice": "required"}, "tools", "Unimplemented keys"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "name of another tool"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "type object",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{**USER, "tool_calls": [PERSON]}]}, "messages[0].tool_calls", "e"),
        ({"functions": [{"name": "f"}]}, "functions", "is not known here"),
        ({"function_call": "auto"}, "function_call", "is not known here"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "e"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "e"),
    ]
    mistral = save_tiny_model(tmp_path / "mistral", "llama", tool_format="mistral")
    async with serving(config_of(mistral)) as (_, client):
        for fields, param, reason in refused:
            with pytest.raises(BadRequestError, match=reason) as caught:
                await client.chat.completions.create(model="", extra_body={**base, **fields}, messages=[USER])
            assert (caught.value.param or "").startswith(param), (fields, caught.value)
    async with serving(config_of(plain)) as (deployment, client):
        with pytest.raises(BadRequestError, match="tools: the model's chat template has no tools"):
            await client.chat.completions.create(model="", **base)
        assert await whole(client, **base, tool_choice="none")
        await _refused_over_grpc(deployment.client)
    unread = config_of(mistral).replace("model", tool_format="none")
    async with serving(unread) as (_, client):
        with pytest.raises(BadRequestError, match=r"tools: .*model\.tool_format"):
            await client.chat.completions.create(model="", **base)


async def _refused_over_grpc(client: AsyncClient) -> None:
    options = GenerateOptions(prompt=[ChatMessage("user", "x")], tools=[Tool("f")])
    with pytest.raises(InvalidArgument, match=r"prompt\.chat\.tools: the model's chat template has no tools"):
        await client.complete(options)
    with pytest.raises(InvalidArgument, match="only for a conversation"):
        await client.complete(GenerateOptions(prompt="x", tools=[Tool("f")]))
