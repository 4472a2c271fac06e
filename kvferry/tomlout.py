"""Writes tables of plain values as TOML (the standard library only reads it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_document(values: Mapping[str, Any]) -> str:
    """`values` as TOML: tables, lists of tables, strings, numbers, booleans, lists of these; None becomes a comment."""
    plain = {key: value for key, value in values.items() if not _is_table(value) and not _is_table_list(value)}
    parts = [_lines(plain)] if plain else []
    for key, value in values.items():
        if _is_table(value):
            parts.append(f"[{key}]\n{_lines(value)}")
        elif _is_table_list(value):
            parts.extend(f"[[{key}]]\n{_lines(item)}" for item in value)
    return "\n".join(parts)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_table_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(
        f"# {key} is unset\n" if value is None else f"{key} = {_value(value)}\n" for key, value in table.items()
    )


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
