"""The conversation of a public request, checked: its turns, the tools it offers, calls of them.

JSON of the caller is parsed here once, so that control text is looked for in what it says and not in how it is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.response_parts import is_on
from router.text.chat_template import FIELD, ChatMessage, JsonObject, Tool, ToolCall

MAX_CHAT_MESSAGES = 2_048
"""Every message costs work in Python while others wait; no conversation within a context has more."""
MAX_TOOLS = 128
"""OpenAI's limit; each costs prompt tokens and work in the template."""
MAX_TOOL_CALLS = 128
MAX_TOOL_BYTES = 64 << 10
"""Of a tool's JSON schema, as of any other schema."""
MAX_ARGUMENT_BYTES = 64 << 10
"""Of all arguments of the template."""
MAX_JSON_LEVELS = 64
"""Of nesting: templates and the JSON writer recurse."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered with the model's template; `arguments`: variables of it that the caller sets."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool
    tools: tuple[Tool, ...] = ()
    arguments: JsonObject = field(default_factory=dict)


def chat_prompt(chat: pb.Chat) -> ChatPrompt:
    """Raises InvalidArgument naming the field and the limit."""
    if not chat.messages:
        raise InvalidArgument(f"{FIELD}.messages", "is empty; at least one message is needed")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidArgument(
            f"{FIELD}.messages", f"has {len(chat.messages)} messages; at most {MAX_CHAT_MESSAGES} are allowed"
        )
    messages = tuple(_message(f"{FIELD}.messages[{index}]", one) for index, one in enumerate(chat.messages))
    arguments = _arguments(f"{FIELD}.template_arguments", chat.template_arguments)
    return ChatPrompt(messages, is_on(chat, "add_generation_prompt"), _tools(chat.tools), arguments)


def _arguments(path: str, text: str) -> JsonObject:
    num_bytes = len(text.encode())
    if num_bytes > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(path, f"has {num_bytes} bytes; at most {MAX_ARGUMENT_BYTES} are allowed")
    return _object(path, text) if text else {}


def _message(path: str, message: pb.ChatMessage) -> ChatMessage:
    if not message.role:
        raise InvalidArgument(f"{path}.role", "is empty")
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        number = len(message.tool_calls)
        raise InvalidArgument(f"{path}.tool_calls", f"has {number} calls; at most {MAX_TOOL_CALLS} are allowed")
    calls = tuple(_call(f"{path}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls))
    return ChatMessage(message.role, message.content, calls, message.tool_call_id, message.name)


def _call(path: str, call: pb.ToolCall) -> ToolCall:
    return ToolCall(call.id, _name(f"{path}.name", call.name), _object(f"{path}.arguments", call.arguments or "{}"))


def _tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    path = f"{FIELD}.tools"
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument(path, f"has {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    checked = tuple(_tool(f"{path}[{index}]", tool) for index, tool in enumerate(tools))
    names = [tool.name for tool in checked]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidArgument(f"{path}[{index}].name", f"is the name of another tool, too: {name!r}")
    return checked


def _tool(path: str, tool: pb.Tool) -> Tool:
    num_bytes = len(tool.parameters.encode())
    if num_bytes > MAX_TOOL_BYTES:
        raise InvalidArgument(f"{path}.parameters", f"has {num_bytes} bytes; at most {MAX_TOOL_BYTES} are allowed")
    return Tool(
        name=_name(f"{path}.name", tool.name),
        description=tool.description if tool.HasField("description") else None,
        parameters=_object(f"{path}.parameters", tool.parameters) if tool.parameters else None,
    )


def _name(field: str, name: str) -> str:
    if TOOL_NAME.fullmatch(name) is None:
        raise InvalidArgument(field, "must be 1 to 64 letters, digits, '_', '-' and '.'")
    return name


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(field, f"must be an object in JSON, is a {type(value).__name__}")
    if _levels(value, MAX_JSON_LEVELS) > MAX_JSON_LEVELS:
        raise InvalidArgument(field, f"is nested deeper than {MAX_JSON_LEVELS} levels")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _levels(value: object, most: int) -> int:
    """Levels of nesting; not counted beyond `most` + 1."""
    if not isinstance(value, dict | list) or most < 0:
        return 0
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max((_levels(part, most - 1) for part in parts), default=0)
