"""Errors name fields as HTTP has them, wherever the validation of a GenerateRequest found them; and say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.config import TenantConfig
from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.openai.errors import public_field
from router.openai.requests import ChatBody, CompletionBody, fit_roles
from router.text.chat_template import ChatTemplate
from tests.unit.router.openai_gateway.conftest import Gateway, StartGateway

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "AB", "max_tokens": 2}
ONE_OF = {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}
NOT_REACHED = {"tenant", "adapter", "resume", "progress_timeout_s", "bypass_prefix_cache", "shared_salt"}
MADE_HERE = {"text", "token_ids", "prompt_token_ids", "kept_special_token_ids"}
"""Of `response`, which the gateway fills in itself."""
CONSTRAINTS = {"json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"}
"""Named by the body that has them, below."""


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(name: str, arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


OF_BOTH: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"n": 65}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"presence_penalty": 1e9}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"0": 1e9}}, "logit_bias"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids[0]"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"time_limit_s": 0}, "time_limit_s"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"cache_salt": "a" * 300}, "cache_salt"),
    ({"service_tier": "none"}, "service_tier"),
    ({"session_id": "a" * 300}, "session_id"),
    ({"prompt_cache_key": "a" * 300}, "prompt_cache_key"),
    ({"logprob_token_ids": [100_000]}, "logprob_token_ids"),
    ({"use_beam_search": True, "n": 17}, "n"),
    ({"use_beam_search": True, "best_of": 17}, "best_of"),
    ({"use_beam_search": True, "length_penalty": 99}, "length_penalty"),
    ({"use_beam_search": True, "top_k": 3}, "top_k"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema_format(ONE_OF)}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"x-guidance": {}})}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["a"]}},
        "response_format.structures[0]",
    ),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
)
OF_CHATS = (
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": None, "max_completion_tokens": 9999}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "a b " * 300}]}, "messages"),
    ({"messages": called("no name", "{}")}, "messages[0].tool_calls[0].function.name"),
    ({"messages": called("f", "[")}, "messages[0].tool_calls[0].function.arguments"),
)
OF_COMPLETIONS = (
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [1, 100_000]}, "prompt[1]"),
    ({"prompt": ["A", ""]}, "prompt[1]"),
    ({"prompt": [[1], [1, 100_000]]}, "prompt[1][1]"),
)


async def refused(gateway: Gateway, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status, (body, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        ("/v1/completions", COMPLETION, OF_BOTH + OF_COMPLETIONS),
        ("/v1/chat/completions", CHAT, OF_BOTH + OF_CHATS),
    ],
)
async def test_every_field_is_named_as_the_caller_wrote_it(
    start_gateway: StartGateway, path: str, body: dict[str, Any], table: tuple[tuple[dict[str, Any], str], ...]
) -> None:
    wrong = []
    async with start_gateway() as gateway:
        for fields, param in table:
            error = await refused(gateway, path, {**body, **fields})
            text = error["message"]
            clean = not any(
                name in text for name in ("sampling.", "stopping.", "response.", "beam_search.", "' option")
            )
            if error["param"] != param or not text.startswith(f"{param}: ") or not clean:
                wrong.append((fields, error))
    assert not wrong, json.dumps(wrong, indent=1)


def test_a_tool_is_named_at_its_function() -> None:
    assert public_field("prompt.chat.tools[2].parameters") == "tools[2].function.parameters"
    assert public_field("prompt.chat.messages[0].tool_calls[1].name") == "messages[0].tool_calls[1].function.name"
    assert public_field("prompt.chat.messages[0].content") == "messages[0].content"


def test_every_field_of_grpc_has_a_name_here() -> None:
    """A field that is added to gRPC must be told by a name that a body has, or be listed as out of reach."""
    here = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    names = {public_field(path).partition("[")[0].partition(".")[0] for path in _paths(pb.GenerateRequest.DESCRIPTOR)}
    assert names - here == NOT_REACHED | MADE_HERE | CONSTRAINTS


def _paths(message: Any, prefix: str = "") -> Iterator[str]:
    for field in message.fields:
        path = prefix + field.name
        if path in ("sampling", "stopping", "response", "cache", "beam_search"):
            yield from _paths(field.message_type, f"{path}.")
        elif field.containing_oneof is not None and field.containing_oneof.name == "prompt":
            yield f"prompt.{field.name}"
        else:
            yield path


# --- texts ---


async def test_unknown_fields_are_all_named_with_the_nearest_known_one(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        error = await refused(gateway, "/v1/completions", {**COMPLETION, "max_token": 2})
        assert error["message"] == "max_token: is not known here; did you mean max_tokens?"
        many = {f"zzz{number}": 1 for number in range(12)}
        error = await refused(gateway, "/v1/completions", {**COMPLETION, **many})
        assert error["param"] == "zzz0" and "leave it out (also unknown: zzz1, zzz2," in error["message"]
        assert "zzz8 and 3 more)" in error["message"] and "zzz9" not in error["message"]


async def test_a_missing_schema_and_a_library_without_advice(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        error = await refused(gateway, "/v1/completions", {**COMPLETION, "response_format": {"type": "json_schema"}})
        assert error["message"] == "response_format.json_schema: is missing; the type json_schema needs it"
        body = {**COMPLETION, "response_format": schema_format(ONE_OF)}
        told = (await refused(gateway, "/v1/completions", body))["message"]
        assert "oneOf constraints are not supported" in told and "coerce" not in told
        error = await refused(gateway, "/v1/completions", {**COMPLETION, "use_beam_search": True, "stop": "a"})
        assert error["message"].startswith("stop: cannot be combined with use_beam_search")


async def test_a_missing_key_is_asked_for_as_a_header(start_gateway: StartGateway) -> None:
    tenants = (TenantConfig.model_validate({"name": "search", "api_keys": ["good-key-1"]}),)
    async with start_gateway(tenants=tenants) as gateway:
        error = await refused(gateway, "/v1/completions", COMPLETION, 401)
        assert error["message"] == "an API key is needed: send the header `authorization: Bearer KEY`"


def test_a_role_that_the_template_names_is_left_as_it_is() -> None:
    template = ChatTemplate("{% if m.role == 'developer' or m.role == \"ipython\" %}nobody{% endif %}", {})
    roles = ["developer", "ipython", "user"]
    chat = pb.Chat(messages=[pb.ChatMessage(role=role, content="a") for role in roles])
    fit_roles(chat, template)
    assert [turn.role for turn in chat.messages] == roles
    with pytest.raises(InvalidArgument, match=r"messages\[0\]\.role"):
        fit_roles(pb.Chat(messages=[pb.ChatMessage(role="nobody")]), template)
