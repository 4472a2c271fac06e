"""Lark for outputs of which only tagged parts are bound, and for texts that hold tokens of their own.

The library takes added tokens that look like `<tool_call>` for no text (`kvferry/grammar.py`): where a text holds one,
a grammar has to ask for it by its id, or the model could only spell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tag:
    """A part that has to come once its trigger came.

    Attributes:
        trigger: the beginning of `begin`.
        schema: of the JSON between `begin` and `end`, as the library shall read it.
    """

    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


def lark_text(text: str, named_ids: Mapping[str, int]) -> str:
    """The text as a part of a rule; empty for none. `named_ids`: tokens that only their ids ask for, by text."""
    names = "|".join(re.escape(name) for name in sorted(named_ids, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{named_ids[part]}]>" if part in named_ids else json.dumps(part) for part in parts if part)


def lark_json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema as a part of a rule."""
    return f"%json {json.dumps(schema)}"


def tag_grammar(tags: Sequence[Tag], named_ids: Mapping[str, int], *, at_most_one: bool = False) -> str:
    """Text, free but for its tags; nothing comes behind the only one of `at_most_one`."""
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    start = f"{names} | TEXT" if at_most_one else f"({names})* TEXT"
    rules = ["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/"]
    for number, tag in enumerate(tags):
        rules.append(f"trigger_{number}[lazy]: TEXT {json.dumps(tag.trigger)}")
        begin = f"trigger_{number} {lark_text(tag.begin.removeprefix(tag.trigger), named_ids)}"
        if tag.begin.startswith(tuple(named_ids)):
            begin = f"({begin} | TEXT {lark_text(tag.begin, named_ids)})"
        rules.append(f"tag_{number}: {begin} {lark_json(tag.schema)} {lark_text(tag.end, named_ids)}")
    return "\n".join(rules)
