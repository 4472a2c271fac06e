"""Tools of a chat as clients send them, and what becomes of them: prompt, constraint, and how the output is read.

| `tool_choice` | prompt | constraint |
|---|---|---|
| `none` | without tools | none |
| `auto` | tools | none, unless a function is strict or only one call may come: then every call that comes is right |
| `required` | tools | calls and nothing else |
| a function | tools | one call of it |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.chat import ChatPrompt, chat_prompt
from router.models import Model
from router.openai.body import AtFirstFault, Body
from router.text.chat_template import Tool
from router.tools.call_parser import CallParser
from router.tools.formats import ToolFormat
from router.tools.grammar import MAX_CALLS, required_calls, sure_calls


class CalledFunction(Body):
    """Of a call in a conversation: its arguments are JSON in a text."""

    name: str
    arguments: str


class BodyToolCall(Body):
    """A call that the assistant asked for earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionBody(Body):
    """A function; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A function is all that a tool can be."""

    type: Literal["function"]
    function: FunctionBody

    def to_pb(self) -> pb.Tool:
        """As gRPC's clients send it."""
        of = self.function
        parameters = "" if of.parameters is None else json.dumps(of.parameters, ensure_ascii=False)
        return pb.Tool(name=of.name, description=of.description, parameters=parameters)


Tools = Annotated[tuple[ToolBody, ...], AtFirstFault()]


class ChosenName(Body):
    """Of the function to call."""

    name: str


class ChosenFunction(Body):
    """A choice of one function."""

    type: Literal["function"]
    function: ChosenName


class ToolFields(Body):
    """Of a chat."""

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> Sequence[ToolBody]:
        """Tools that the model is told of. Raises InvalidArgument for a choice among none."""
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice", "needs tools, and there are none")
        return () if self.tool_choice == "none" else self.tools or ()

    def calling(self, message: pb.GenerateRequest, model: Model) -> Calling | None:
        """Prepares the request for calls; None where there are no tools. Raises InvalidArgument."""
        if not self.offered:
            return None
        if not model.tokenizer.chat_template.has_tools:
            raise InvalidArgument("tools", "the model's chat template has no tools")
        if model.tool_format is None:
            raise InvalidArgument(
                "tools", "how this model writes calls is not known here; see model.tool_format of the configuration"
            )
        offered = chat_prompt(message.chat)
        calling = self._calling(offered, model, model.tool_format)
        if calling.grammar:
            if message.WhichOneof("constraint") is not None:
                raise InvalidArgument("tool_choice", "more than one constraint on the output is set")
            message.grammar = calling.grammar
        markers = (model.tokenizer.special_id(text) for text in calling.form.markers)
        message.response.kept_special_token_ids.extend(one for one in markers if one is not None)
        return calling

    def _calling(self, prompt: ChatPrompt, model: Model, form: ToolFormat) -> Calling:
        has_special = any(model.tokenizer.special_id(text) is not None for text in form.markers)
        tools, ids = prompt.tools, model.tokenizer.named_ids
        num_calls = 1 if self.parallel_tool_calls is False else MAX_CALLS
        if isinstance(self.tool_choice, ChosenFunction):
            tools, num_calls = self._chosen(tools, self.tool_choice.function.name), 1
        names = frozenset(tool.name for tool in tools)
        for index, tool in enumerate(prompt.tools):
            if (tool.parameters or {}).get("type", "object") != "object":
                raise InvalidArgument(f"tools[{index}].function.parameters", "must be a schema of type object")
        is_compact = model.compact_json
        if self.tool_choice not in (None, "auto"):
            form = form.without_markers() if has_special else form
            grammar = required_calls(form, tools, ids, num_calls=num_calls, is_compact=is_compact)
            return Calling(form, names, grammar)
        cannot_ask = has_special and not form.is_bare
        if num_calls == 1 and cannot_ask:
            raise InvalidArgument("parallel_tool_calls", "cannot be kept with tool_choice auto for this model")
        if cannot_ask or not (num_calls == 1 or any(one.function.strict for one in self.offered)):
            return Calling(form, names)
        return Calling(form, names, sure_calls(form, tools, ids, num_calls=num_calls, is_compact=is_compact))

    @staticmethod
    def _chosen(tools: Sequence[Tool], name: str) -> tuple[Tool, ...]:
        chosen = tuple(tool for tool in tools if tool.name == name)
        if not chosen:
            raise InvalidArgument("tool_choice.function.name", f"is none of the tools: {name!r:.80}")
        return chosen


@dataclass(frozen=True, slots=True)
class Calling:
    """How the output of one HTTP call is read.

    Attributes:
        names: functions that may be called.
        grammar: the constraint that makes sure of calls; empty for none.
    """

    form: ToolFormat
    names: frozenset[str]
    grammar: str = ""

    def new_parser(self) -> CallParser:
        """A choice's."""
        return CallParser(self.form, self.names, is_live=bool(self.grammar))
