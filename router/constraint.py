"""The constraint of a public request: which field asks for what, and the grammar that says so to the workers.

validate ─► `constraint_of`, cheap checks ─► `checked_grammar`, off the event loop ─► `SamplingParams.grammar`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher, grammar_from

from kvferry.errors import InvalidArgument, UnsupportedField
from kvferry.grammar import MAX_GRAMMAR_BYTES, MAX_REASON_CHARS, GrammarRefused, Grammars
from proto.kvferry.v1 import inference_pb2 as pb
from router.tag_grammar import Tag, tag_grammar

MAX_CHOICE_STRINGS = 1_024
MAX_STRUCTURES = 128
WHITESPACE = r" |\r?\n(\r?\n)?( {0,8}|\t{0,4})"
"""Between two parts of JSON: what models write by habit, on one line or indented, and an end to one that writes nothing
else: indentation is the longest a model can spend, a token a space."""
EXTENSION_KEY = "x-guidance"
LARGEST_NUMBER = 1 << 53
"""The library takes numbers as floats: a larger one might be another."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment"})
"""Keywords that say nothing about the output."""
ADVICE = re.compile(r"\.? Enable '\w+' option.*", re.DOTALL)
"""The library's, which no caller can follow."""

EMBEDDED_SCHEMA = re.compile(r"%json\s*")

JSON_FIELDS = ("json_schema", "json_object", "structural_tag")
"""Constraints that `compact_json` is about."""
CONSTRAINT_FIELDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What the output has to be.

    Attributes:
        field: which field of the request says so; one of `CONSTRAINT_FIELDS`.
        text: its value; a JSON list for `choice`, a JSON schema for `json_object`, too; checked for `structural_tag`.
        is_compact: its JSON has no white space between its parts.
    """

    field: str
    text: str
    is_compact: bool = False


def constraint_of(message: pb.GenerateRequest, *, compact_json: bool = False) -> OutputConstraint | None:
    """None where the request has none; `compact_json` unless it says. Raises InvalidArgument naming field and limit."""
    constraint = _constraint_of(message)
    is_json = constraint is not None and constraint.field in JSON_FIELDS
    if message.compact_json and not is_json:
        raise InvalidArgument("compact_json", f"is only for {', '.join(JSON_FIELDS)}")
    if constraint is None or not is_json:
        return constraint
    return replace(constraint, is_compact=message.compact_json if message.HasField("compact_json") else compact_json)


def _constraint_of(message: pb.GenerateRequest) -> OutputConstraint | None:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return OutputConstraint("json_schema", _schema(_bounded("json_schema", message.json_schema)))
        case "json_object" if message.json_object:
            return OutputConstraint("json_object", '{"type":"object"}')
        case "regex":
            return OutputConstraint("regex", _bounded("regex", message.regex))
        case "choice":
            return OutputConstraint("choice", _bounded("choice", _choices(message.choice.choices)))
        case "grammar":
            grammar = _bounded("grammar", message.grammar)
            _check_embedded_schemas(grammar)
            return OutputConstraint("grammar", grammar)
        case "structural_tag":
            tag = _bounded("structural_tag", message.structural_tag)
            return OutputConstraint("structural_tag", _structural_tag(tag))
    return None


async def checked_grammar(
    constraint: OutputConstraint | None,
    grammars: Grammars,
    eos_token_ids: tuple[int, ...],
    named_ids: Mapping[str, int] | None = None,
) -> str:
    """The grammar for the workers, which has been compiled here; empty for no constraint.

    `named_ids`: tokens whose text is none to the library, by text (`tag_grammar.py`).

    Raises:
        InvalidArgument: the constraint is malformed, too complex, or matches nothing; with the library's reason.
        ResourceExhausted: too many are being compiled.
    """
    if constraint is None:
        return ""
    if not eos_token_ids:
        raise InvalidArgument(constraint.field, "cannot be kept: the model has no end-of-sequence id to end it with")
    try:
        grammar = await grammars.run(lambda: _grammar(constraint, named_ids or {}))
        await grammars.compiled(grammar, eos_token_ids)
    except GrammarRefused as error:
        raise InvalidArgument(constraint.field, ADVICE.sub("", str(error))) from error
    return grammar


def _grammar(constraint: OutputConstraint, named_ids: Mapping[str, int]) -> str:
    match constraint.field:
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text))
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(texts)}")
        case "grammar":
            try:
                return grammar_from("grammar", constraint.text)
            except Exception as error:  # whatever its converter of GBNF raises
                raise GrammarRefused(str(error)[:MAX_REASON_CHARS]) from error
        case "structural_tag":
            return _tag_grammar(json.loads(constraint.text), named_ids, is_compact=constraint.is_compact)
    schema = schema_with_options(json.loads(constraint.text), is_compact=constraint.is_compact)
    return json.dumps({"grammars": [{"json_schema": schema}]})


def schema_with_options(schema: Mapping[str, Any], *, is_compact: bool = False) -> dict[str, Any]:
    """The schema as the library shall read it: exactly, with bounded white space, or none."""
    options: dict[str, Any] = {"whitespace_flexible": not is_compact, "lenient": False, "coerce_one_of": False}
    if not is_compact:
        options["whitespace_pattern"] = WHITESPACE
    return {**schema, EXTENSION_KEY: options}


def _tag_grammar(tag: Mapping[str, Any], named_ids: Mapping[str, int], *, is_compact: bool) -> str:
    tags = [
        Tag(
            trigger=next(trigger for trigger in tag["triggers"] if one["begin"].startswith(trigger)),
            begin=one["begin"],
            schema=schema_with_options(one["schema"], is_compact=is_compact),
            end=one["end"],
        )
        for one in tag["structures"]
    ]
    return tag_grammar(tags, named_ids)


def _bounded(field: str, text: str) -> str:
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(field, f"has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    if not text:
        raise InvalidArgument(field, "is empty")
    return text


def _schema(text: str) -> str:
    schema, normal = _json("json_schema", text)
    return "{}" if _checked_schema("json_schema", schema) == {} else normal


def _json(field: str, text: str) -> tuple[Any, str]:
    """The value, and its shortest text."""
    try:
        value = json.loads(text)
        return value, json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"is not JSON: {error}") from error


def _checked_schema(field: str, schema: object) -> dict[str, Any]:
    if schema is False:
        raise InvalidArgument(field, "is false: no output can match it")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidArgument(field, f"must be an object, got a {type(schema).__name__}")
    if EXTENSION_KEY in schema:
        raise InvalidArgument(field, f"has {EXTENSION_KEY}, which is not supported")
    _check_numbers(field, schema)
    return schema


def _check_numbers(field: str, value: object) -> None:
    """Refuses what the library would round; `value` has been JSON, so its depth is bounded."""
    match value:
        case bool():
            return
        case int() | float():
            if abs(value) > LARGEST_NUMBER:
                raise InvalidArgument(
                    field, f"has the number {value}; beyond ±{LARGEST_NUMBER} numbers cannot be kept exactly"
                )
        case list():
            for part in value:
                _check_numbers(field, part)
        case dict():
            for name, part in value.items():
                if name not in ANNOTATIONS:
                    _check_numbers(field, part)


def _check_embedded_schemas(grammar: str) -> None:
    """Of Lark's `%json`; what is no JSON there is told by the library."""
    for found in EMBEDDED_SCHEMA.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue
        _check_numbers("grammar", schema)


def _structural_tag(text: str) -> str:
    """With schemas that are objects, without what says nothing."""
    tag, _ = _json("structural_tag", text)
    if not isinstance(tag, dict):
        raise InvalidArgument("structural_tag", f"must be an object, got a {type(tag).__name__}")
    for name in tag:
        if name not in ("type", "structures", "triggers"):
            raise UnsupportedField(f"structural_tag.{name}")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidArgument("structural_tag.type", "must be structural_tag")
    triggers = _texts("structural_tag.triggers", tag.get("triggers"))
    structures = tag.get("structures")
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_STRUCTURES:
        raise InvalidArgument("structural_tag.structures", f"must be a list of 1 to {MAX_STRUCTURES} structures")
    checked = [_structure(f"structural_tag.structures[{n}]", one, triggers) for n, one in enumerate(structures)]
    return json.dumps({"structures": checked, "triggers": triggers})


def _structure(field: str, structure: object, triggers: Sequence[str]) -> dict[str, Any]:
    if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
        raise InvalidArgument(field, "must be an object with begin, schema and end, and nothing else")
    begin, end = structure["begin"], structure["end"]
    if not isinstance(begin, str) or not any(begin.startswith(trigger) for trigger in triggers):
        raise InvalidArgument(f"{field}.begin", "must be a text that starts with one of the triggers")
    if not isinstance(end, str):
        raise InvalidArgument(f"{field}.end", "must be a text")
    return {"begin": begin, "schema": _checked_schema(f"{field}.schema", structure["schema"]), "end": end}


def _texts(field: str, texts: object) -> list[str]:
    found = texts if isinstance(texts, list) else []
    if not 1 <= len(found) <= MAX_STRUCTURES or not all(isinstance(text, str) and text for text in found):
        raise InvalidArgument(field, f"must be a list of 1 to {MAX_STRUCTURES} texts, none of them empty")
    return list(dict.fromkeys(found))


def _choices(choices: Sequence[str]) -> str:
    """As a JSON list, without repetitions."""
    if not choices:
        raise InvalidArgument("choice", "has no strings; at least 1 is needed")
    if len(choices) > MAX_CHOICE_STRINGS:
        raise InvalidArgument("choice", f"has {len(choices)} strings; at most {MAX_CHOICE_STRINGS} are allowed")
    return json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)
