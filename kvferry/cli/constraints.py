"""Options that constrain the output, and how they become a request's one constraint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.errors import InvalidArgument

JSON_SCHEMA = "--json-schema"
GRAMMAR = "--grammar"
STRUCTURAL_TAG = "--structural-tag"

JsonSchemaOption = Annotated[
    str | None,
    typer.Option(JSON_SCHEMA, metavar="FILE|JSON", help="The output is JSON that satisfies this schema."),
]
JsonObjectOption = Annotated[bool, typer.Option("--json-object", help="The output is any JSON object.")]
RegexOption = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="The whole output matches this regular expression.")
]
ChoiceOption = Annotated[
    list[str] | None, typer.Option("--choice", metavar="TEXT", help="The output is one of these; repeatable.")
]
GrammarOption = Annotated[
    str | None,
    typer.Option(GRAMMAR, metavar="FILE|TEXT", help="The output matches this grammar, in Lark's form or GBNF."),
]
StructuralTagOption = Annotated[
    str | None,
    typer.Option(
        STRUCTURAL_TAG,
        metavar="FILE|JSON",
        help='Free text, but what follows a trigger is a structure: {"structures": [{"begin", "schema", "end"}], '
        '"triggers": []}.',
    ),
]


def constraint_of(
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
    structural_tag: str | None,
) -> dict[str, Any]:
    """The field of `GenerateOptions` that is set, if one is.

    Raises InvalidArgument for two of them, for what is no JSON, and for a file that cannot be read.
    """
    given: dict[str, Any] = {
        JSON_SCHEMA: json_schema,
        "--json-object": json_object or None,
        "--regex": regex,
        "--choice": choice or None,
        GRAMMAR: grammar,
        STRUCTURAL_TAG: structural_tag,
    }
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidArgument(named[1], f"cannot be combined with {named[0]}")
    if json_schema is not None:
        return {"json_schema": _json_of(JSON_SCHEMA, json_schema)}
    if structural_tag is not None:
        return {"structural_tag": _json_of(STRUCTURAL_TAG, structural_tag)}
    if grammar is not None:
        return {"grammar": _grammar(grammar)}
    return {option.removeprefix("--").replace("-", "_"): given[option] for option in named}


def _json_of(option: str, value: str) -> str:
    """The JSON: `value` itself where it looks like JSON, else that of the file."""
    is_text = value.lstrip().startswith("{") or value.strip() in ("true", "false")
    text = value if is_text else _read(option, Path(value))
    try:
        json.loads(text)
    except ValueError as error:
        where = "" if is_text else f"{value} "
        raise InvalidArgument(option, f"{where}is not JSON: {error}") from error
    return text


def _grammar(value: str) -> str:
    """The grammar's text: that of the file of this name, else `value` where it has a rule."""
    if ":" in value and not _is_file(value):
        return value
    return _read(GRAMMAR, Path(value))


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # too long for a name, or none at all
        return False


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgument(option, f"{str(path)[:200]} cannot be read: {reason}") from error
