"""Writes tables of plain values as TOML (the standard library only reads it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hidden:
    """Stands for `count` values that are not to be written; becomes a comment."""

    count: int


@dataclass(frozen=True, slots=True)
class Example:
    """Stands for a list of tables that is empty; becomes a comment with a table as it could be."""

    table: Mapping[str, Any]


def toml_document(values: Mapping[str, Any], docs: Mapping[str, str] | None = None) -> str:
    """`values` as TOML: tables, lists of tables, strings, numbers, booleans, lists of these; None becomes a comment.

    A table may hold lists of tables. `docs` maps `table` and `table.key` to the comment above it; of a list of tables
    the first gets them.
    """
    docs = docs or {}
    plain = _without_sections(values)
    parts = [_lines(plain, docs)] if plain else []
    for key, value in values.items():
        parts += _section(key, value, docs)
    return "\n".join(parts)


def _section(name: str, value: object, docs: Mapping[str, str]) -> list[str]:
    """What has a heading of its own, each part under one; nothing for a plain value."""
    if isinstance(value, Example):
        return [f"{_comment(docs, name)}# There is none. An example:\n{_example(name, value, docs)}"]
    if isinstance(value, Mapping):
        parts = [f"{_comment(docs, name)}[{name}]\n{_lines(_without_sections(value), docs, name)}"]
        for key, below in value.items():
            parts += _section(f"{name}.{key}", below, docs)
        return parts
    if isinstance(value, list) and _is_section(value):
        further = [f"[[{name}]]\n{_lines(item)}" for item in value[1:]]
        return [f"{_comment(docs, name)}[[{name}]]\n{_lines(value[0], docs, name)}", *further]
    return []


def _without_sections(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if not _is_section(value)}


def _is_section(value: object) -> bool:
    return isinstance(value, Mapping | Example) or _is_table_list(value)


def _is_table_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _lines(table: Mapping[str, Any], docs: Mapping[str, str] | None = None, name: str = "") -> str:
    lines = []
    for key, value in table.items():
        lines.append(_comment(docs or {}, f"{name}.{key}" if name else key))
        lines.append(_line(key, value))
    return "".join(lines)


def _example(name: str, example: Example, docs: Mapping[str, str]) -> str:
    """A table of which every line is a comment."""
    text = f"[[{name}]]\n{_lines(example.table, docs, name)}"
    return "".join(f"# {line}\n" for line in text.splitlines())


def _line(key: str, value: object) -> str:
    match value:
        case None:
            return f"# {key} is unset\n"
        case Hidden(count):
            return f"# {key} is hidden: {count}\n"
    return f"{key} = {_value(value)}\n"


def _comment(docs: Mapping[str, str], name: str) -> str:
    """The text as one line of comment; nothing where there is none."""
    text = " ".join(docs.get(name, "").split())
    return f"# {text}\n" if text else ""


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"no TOML form for {type(value).__name__}")
