"""Grammars that make a model call tools, or make sure of the calls it chooses to write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.constraint import schema_with_options
from router.tag_grammar import Tag, lark_json, lark_text, tag_grammar
from router.text.chat_template import Tool
from router.tools.formats import ToolFormat

MAX_CALLS = 32
"""In one output that a grammar made: an end to a model that would call for ever."""


def required_calls(
    form: ToolFormat,
    tools: Sequence[Tool],
    named_ids: Mapping[str, int],
    *,
    num_calls: int = MAX_CALLS,
    is_compact: bool = False,
) -> str:
    """At least one call, at most `num_calls`, and nothing else; arguments without white space where `is_compact`."""
    return "\n".join([f"start: {_calls(form, named_ids, num_calls)}", *_call_rules(form, tools, is_compact)])


def sure_calls(
    form: ToolFormat,
    tools: Sequence[Tool],
    named_ids: Mapping[str, int],
    *,
    num_calls: int = MAX_CALLS,
    is_compact: bool = False,
) -> str:
    """Free text, in which every call is right; where `num_calls` is 1 nothing comes behind the first."""
    if not form.is_bare:
        tags = [
            Tag(form.begin, form.opening + _head(form, tool), _arguments(tool, is_compact), "}" + form.closing)
            for tool in tools
        ]
        return tag_grammar(tags, named_ids, at_most_one=num_calls == 1)
    rules = [
        "%llguidance {}",
        "start: calls | TEXT | trigger calls",
        rf"TEXT: /([^{re.escape(form.open or '{')} \t\r\n](.|\n)*)?/",
        f"trigger[lazy]: TEXT {json.dumps(form.begin)}",
        f"calls: {_calls(form, named_ids, num_calls)}",
    ]
    return "\n".join([*rules, *_call_rules(form, tools, is_compact)])


def _calls(form: ToolFormat, named_ids: Mapping[str, int], num_calls: int) -> str:
    opening, joint, closing = (lark_text(text, named_ids) for text in (form.opening, form.joint, form.closing))
    further = f"({joint} call){{0,{num_calls - 1}}}" if num_calls > 1 else ""
    return f"{opening} call {further} {closing}"


def _call_rules(form: ToolFormat, tools: Sequence[Tool], is_compact: bool) -> list[str]:
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        rules.append(f'call_{number}: {json.dumps(_head(form, tool))} {lark_json(_arguments(tool, is_compact))} "}}"')
    return rules


def _head(form: ToolFormat, tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name)}, {json.dumps(form.arguments_key)}: '


def _arguments(tool: Tool, is_compact: bool) -> dict[str, Any]:
    """Those of a function without parameters are none."""
    parameters = {"additionalProperties": False} if tool.parameters is None else tool.parameters
    return schema_with_options({"type": "object", **parameters}, is_compact=is_compact)
