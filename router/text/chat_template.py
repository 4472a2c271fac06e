"""Renders chat messages into prompt text with the model's own template.

transformers renders in jinja's immutable sandbox: a template comes with the model and is not trusted. Importing this
module does not load torch. Tools and calls of them reach the template in the form that its authors expect, that of
transformers' `apply_chat_template`: arguments are a mapping, and what is not there has no key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from kvferry.errors import FailedPrecondition, InvalidArgument

FIELD = "prompt.chat"
JsonObject = Mapping[str, Any]
NO_ARGUMENTS: JsonObject = MappingProxyType({})
RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "raise_exception",
        "return_assistant_tokens_mask",
        "strftime_now",
        "tools",
    }
)
"""Names that the renderer sets or takes itself; and so it does with all that end with `_token`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function as the assistant asked for it; no `id` where it is empty."""

    id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: who speaks (`system`, `user`, `assistant`, `tool` … as the template knows them) and what.

    Attributes:
        tool_calls: functions that the assistant asked for.
        tool_call_id: the call that this turn answers; empty for none.
        name: of the function that answers, or of the speaker; empty for none.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """As templates read it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        if self.name:
            turn["name"] = self.name
        return turn


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may ask for; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None

    def for_template(self) -> dict[str, Any]:
        """As templates read it."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in known.items() if value is not None}}


class ChatTemplate:
    """The chat template of one model, or the knowledge that it has none."""

    __slots__ = ("_source", "_tool_source", "_variables")

    def __init__(self, source: str | None, variables: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """`variables`: text of the named special tokens (`bos_token` …), as templates expect them.

        `tool_source`: the template for chats with tools, where they have one of their own.
        """
        self._source = source
        self._tool_source = tool_source or source
        self._variables: dict[str, Any] = dict(variables)

    def writes(self, text: str) -> bool:
        """Whether `text` occurs in the template itself."""
        return any(text in source for source in (self._source, self._tool_source) if source is not None)

    def names_role(self, role: str) -> bool:
        """Whether it tells turns of this role from others."""
        return self.writes(f"'{role}'") or self.writes(f'"{role}"')

    @property
    def tool_source(self) -> str:
        """The template for chats with tools; empty where there is none."""
        return self._tool_source or ""

    @property
    def has_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return _mentions(self._tool_source, "tools")

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        arguments: JsonObject = NO_ARGUMENTS,
        add_generation_prompt: bool = True,
    ) -> str:
        """Prompt text of a conversation.

        Raises InvalidArgument without messages, for a model without a template, for tools, calls and arguments that the
        template would leave out, and where the template refuses the conversation (with its own words);
        FailedPrecondition for a template that cannot be compiled.
        """
        source = self._tool_source if tools else self._source
        if source is None:
            raise InvalidArgument(FIELD, "the model has no chat template; send a text prompt instead")
        if not messages:
            raise InvalidArgument(FIELD, "no messages; at least 1 is needed")
        self._check_tools(source, messages, tools)
        self._check_arguments(source, arguments)
        try:
            rendered = render_jinja_template(
                conversations=[[message.for_template() for message in messages]],
                tools=[tool.for_template() for tool in tools] or None,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
                **arguments,
            )
        except jinja2.TemplateSyntaxError as error:
            raise FailedPrecondition(f"the model's chat template cannot be compiled: {error}") from error
        except Exception as error:  # whatever an untrusted template runs into fails this request only
            raise InvalidArgument(FIELD, f"the chat template refuses the messages: {error}") from error
        return "".join(rendered[0])  # a list with the text of each conversation, though annotated otherwise

    def _check_arguments(self, source: str, arguments: JsonObject) -> None:
        for name in arguments:
            field = f"{FIELD}.template_arguments.{name:.80}"
            if name in RESERVED_ARGUMENTS or name in self._variables or name.endswith("_token"):
                raise InvalidArgument(field, "is set by the server")
            if not name.isidentifier() or not _mentions(source, name):
                raise InvalidArgument(field, "is nothing that the model's chat template has")

    def _check_tools(self, source: str, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> None:
        if tools and not _mentions(source, "tools"):
            raise InvalidArgument(f"{FIELD}.tools", "the model's chat template has no tools")
        if _mentions(source, "tool_calls"):
            return
        for index, message in enumerate(messages):
            if message.tool_calls:
                field = f"{FIELD}.messages[{index}].tool_calls"
                raise InvalidArgument(field, "the model's chat template has no calls of tools")


def json_chars(messages: Sequence[ChatMessage], tools: Sequence[Tool], arguments: JsonObject = NO_ARGUMENTS) -> int:
    """About how long tools, calls and arguments of the template are, as text."""
    calls = [call.arguments for message in messages for call in message.tool_calls]
    rest = [[tool.for_template() for tool in tools], dict(arguments)]
    return len(json.dumps(calls)) + len(json.dumps(rest))


def _mentions(source: str | None, name: str) -> bool:
    return source is not None and re.search(rf"\b{name}\b", source) is not None
