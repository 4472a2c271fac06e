"""The forms in which models write calls of tools, and which of them a chat template teaches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One of them: JSON objects between texts.

    Attributes:
        name: as in the configuration.
        begin: marker before calls, wherever it stands.
        open, separator, close: what calls stand between, behind `begin`, as in a list; empty where there is none.
            `open` and `separator` are one character.
        is_bare: calls may also begin, without `begin`, with the output.
        opening, joint, closing: how a model is made to write them: before the first, between two, behind the last.
        arguments_key: member of a call that holds its arguments, when a model is made to write it.
        id_chars: length of ids that the model's template takes; 0 for any.
    """

    name: str
    begin: str
    open: str
    separator: str
    close: str
    is_bare: bool
    opening: str
    joint: str
    closing: str
    arguments_key: str = "arguments"
    id_chars: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return tuple(text for text in (self.begin, self.close) if len(text) > 1)

    def without_markers(self) -> Self:
        """For a grammar that cannot ask for the markers: the output is calls from its beginning."""
        opening, joint, closing = (self.open, ", ", self.close) if self.open else ("", "; ", "")
        separator = self.separator or ";"
        return replace(self, is_bare=True, separator=separator, opening=opening, joint=joint, closing=closing)


HERMES = ToolFormat(
    name="hermes",
    begin="<tool_call>",
    open="",
    separator="",
    close="</tool_call>",
    is_bare=False,
    opening="<tool_call>\n",
    joint="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    begin="<|python_tag|>",
    open="",
    separator=";",
    close="",
    is_bare=True,
    opening="",
    joint="; ",
    closing="",
    arguments_key="parameters",
)
MISTRAL = ToolFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    open="[",
    separator=",",
    close="]",
    is_bare=False,
    opening="[TOOL_CALLS] [",
    joint=", ",
    closing="]",
    id_chars=9,
)
FORMATS: Mapping[str, ToolFormat] = MappingProxyType({one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL)})


def detected(template: str) -> ToolFormat | None:
    """The format that a chat template writes; None for another one, or none."""
    if HERMES.begin in template and "arguments" in template and not re.search(r"<function=|<arg_key>", template):
        return HERMES
    if MISTRAL.begin in template and "[ARGS]" not in template:
        return MISTRAL
    if re.search(r'\\?"parameters\\?": ', template) and ("<|python_tag|>" in template or "<|eot_id|>" in template):
        return LLAMA3_JSON
    return None


def tool_format(name: str, template: str) -> ToolFormat | None:
    """By its configured name: `auto` is what the template writes, `none` is none."""
    return detected(template) if name == AUTO else FORMATS.get(name)
