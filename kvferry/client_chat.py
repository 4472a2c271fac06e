"""Conversations, as clients put them: messages, the calls of tools in them, and the tools.

Each is a class of ours or a dict as OpenAI's interface has it; a key that we do not know is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.client_fields import check_list, json_text, set_field
from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant asked for in a message; `arguments` is an object, or its JSON."""

    name: str
    arguments: str | Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model is told of; `parameters` is a JSON schema, as text or as a dict."""

    name: str
    description: str | None = None
    parameters: str | Mapping[str, Any] = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        tool_calls: what the assistant asked for in it.
        tool_call_id: the call that it answers.
        name: of the function that answers, or of the speaker.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall | Mapping[str, Any]] = ()
    tool_call_id: str = ""
    name: str = ""


def message_to_pb(message: ChatMessage | Mapping[str, Any], path: str) -> inference_pb2.ChatMessage:
    """The message, which errors call `path`; raises InvalidArgument for what is none, or holds what it cannot."""
    if isinstance(message, Mapping):
        keys = {"role", "content", "tool_calls", "tool_call_id", "name"}
        values = _known(message, path, keys, {"role"})
        if "content" not in values and not values.get("tool_calls"):
            raise InvalidArgument(f"{path}.content", "is missing")
        message = ChatMessage(**{"content": "", **values})
    if not isinstance(message, ChatMessage):
        raise InvalidArgument(path, f"must be a message, got {message!r:.80}")
    if not isinstance(message.content, str):
        raise InvalidArgument(f"{path}.content", f"must be text, got {message.content!r:.80}")
    made = inference_pb2.ChatMessage()
    for name in ("role", "content", "tool_call_id", "name"):
        set_field(made, f"{path}.{name}", getattr(message, name))
    check_list(f"{path}.tool_calls", message.tool_calls)
    made.tool_calls.extend(
        _call_to_pb(call, f"{path}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)
    )
    return made


def tool_to_pb(tool: Tool | Mapping[str, Any], path: str) -> inference_pb2.Tool:
    """The tool, which errors call `path`; raises InvalidArgument for what is none, or holds what it cannot."""
    if isinstance(tool, Mapping):
        tool = Tool(**_known(_function_of(tool, path), path, {"name", "description", "parameters"}, {"name"}))
    if not isinstance(tool, Tool):
        raise InvalidArgument(path, f"must be a tool, got {tool!r:.80}")
    made = inference_pb2.Tool()
    set_field(made, f"{path}.name", tool.name)
    set_field(made, f"{path}.description", tool.description)
    set_field(made, f"{path}.parameters", json_text(f"{path}.parameters", tool.parameters))
    return made


def _call_to_pb(call: ToolCall | Mapping[str, Any], path: str) -> inference_pb2.ToolCall:
    if isinstance(call, Mapping):
        function = _known(_function_of(call, path, "id"), path, {"name", "arguments"}, {"name", "arguments"})
        call = ToolCall(**function, id=call.get("id") or "")
    if not isinstance(call, ToolCall):
        raise InvalidArgument(path, f"must be a call of a tool, got {call!r:.80}")
    made = inference_pb2.ToolCall()
    set_field(made, f"{path}.id", call.id)
    set_field(made, f"{path}.name", call.name)
    set_field(made, f"{path}.arguments", json_text(f"{path}.arguments", call.arguments))
    return made


def _function_of(value: Mapping[str, Any], path: str, *others: str) -> Mapping[str, Any]:
    """What is below "function", beside the type and `others`."""
    outer = _known(value, path, {"type", "function", *others}, {"function"})
    if outer.get("type", "function") != "function" or not isinstance(outer["function"], Mapping):
        raise InvalidArgument(path, f'must be {{"type": "function", "function": {{…}}}}, got {dict(value)!r:.80}')
    return outer["function"]


def _known(value: Mapping[str, Any], path: str, keys: set[str], needed: set[str]) -> dict[str, Any]:
    """What is not None of `value`; raises InvalidArgument for a key that is not in `keys`, or missing."""
    unknown = [key for key in value if key not in keys]
    if unknown:
        raise InvalidArgument(f"{path}.{unknown[0]!s:.80}", f"is unknown; known: {', '.join(sorted(keys))}")
    found = {key: item for key, item in value.items() if item is not None}
    for key in sorted(needed - set(found)):
        raise InvalidArgument(f"{path}.{key}", "is missing")
    return found
