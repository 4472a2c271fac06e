"""Conversations with tools: what is taken, and what is refused by field and limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.chat import MAX_JSON_LEVELS, MAX_TOOL_BYTES, MAX_TOOL_CALLS, MAX_TOOLS, chat_prompt
from router.text.chat_template import ChatMessage, Tool, ToolCall

USER = {"role": "user", "content": "x"}
DEEP = '{"a":' * MAX_JSON_LEVELS + "{}" + "}" * MAX_JSON_LEVELS


def test_a_whole_conversation_with_tools() -> None:
    call = {"id": "1", "name": "f", "arguments": ' {"a": [1, 2.5, null]} '}
    answer = {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"}
    turns = [USER, {"role": "assistant", "tool_calls": [call, {"name": "g.h-i_J"}]}, answer]
    tools = [{"name": "f", "description": "", "parameters": '{"type":"object"}'}, {"name": "g.h-i_J"}]
    prompt = chat_prompt(pb.Chat(messages=turns, tools=tools))  # type: ignore[arg-type]
    assert prompt.tools == (Tool("f", "", {"type": "object"}), Tool("g.h-i_J"))
    assert prompt.messages[1].tool_calls == (ToolCall("1", "f", {"a": [1, 2.5, None]}), ToolCall("", "g.h-i_J", {}))
    assert prompt.messages[2] == ChatMessage("tool", "4", (), "1", "f")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"name": ""}]}, r"tools\[0\]\.name: must be 1 to 64"),
    ({"tools": [{"name": "a b"}]}, r"tools\[0\]\.name: must be 1 to 64"),
    ({"tools": [{"name": "a" * 65}]}, r"tools\[0\]\.name: must be 1 to 64"),
    ({"tools": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}, r"tools\[2\]\.name: is the name of another"),
    ({"tools": [{"name": f"f{n}"} for n in range(MAX_TOOLS + 1)]}, r"tools: has 129 tools; at most 128"),
    ({"tools": [{"name": "a", "parameters": "{"}]}, r"tools\[0\]\.parameters: is not JSON"),
    ({"tools": [{"name": "a", "parameters": "[]"}]}, r"tools\[0\]\.parameters: must be an object in JSON, is a list"),
    ({"tools": [{"name": "a", "parameters": '{"a":NaN}'}]}, r"tools\[0\]\.parameters: is not JSON: NaN"),
    ({"tools": [{"name": "a", "parameters": '{"a":"\\ud800"}'}]}, r"tools\[0\]\.parameters: is not JSON"),
    ({"tools": [{"name": "a", "parameters": '{"a":' * 9000}]}, r"tools\[0\]\.parameters: is not JSON"),
    ({"tools": [{"name": "a", "parameters": DEEP}]}, r"tools\[0\]\.parameters: is nested deeper than 64"),
    (
        {"tools": [{"name": "a", "parameters": json.dumps({"a": "x" * MAX_TOOL_BYTES})}]},
        r"tools\[0\]\.parameters: has 65545 bytes; at most 65536",
    ),
    ({"template_arguments": "{"}, "template_arguments: is not JSON"),
    ({"template_arguments": "[]"}, "template_arguments: must be an object in JSON, is a list"),
    ({"template_arguments": '{"a":Infinity}'}, "template_arguments: is not JSON"),
    ({"template_arguments": DEEP}, "template_arguments: is nested deeper than 64"),
    (
        {"template_arguments": json.dumps({"a": "x" * MAX_TOOL_BYTES})},
        "template_arguments: has 65545 bytes; at most 65536",
    ),
    ({"messages": [{"role": "a", "tool_calls": [{"name": "a b"}]}]}, r"messages\[0\]\.tool_calls\[0\]\.name"),
    (
        {"messages": [USER, {"role": "a", "tool_calls": [{"name": "a", "arguments": "1"}]}]},
        r"messages\[1\]\.tool_calls\[0\]\.arguments: must be an object",
    ),
    (
        {"messages": [{"role": "a", "tool_calls": [{"name": "a"}] * (MAX_TOOL_CALLS + 1)}]},
        r"messages\[0\]\.tool_calls: has 129 calls; at most 128",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), BAD)
def test_what_is_not_right_is_refused_by_field(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"prompt\.chat\.{reason}"):
        chat_prompt(pb.Chat(**{"messages": [USER], **fields}))


def test_the_deepest_json_is_taken() -> None:
    fits = DEEP.removeprefix('{"a":').removesuffix("}")
    assert chat_prompt(
        pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(name="a", parameters=fits)])
    ).tools
