"""The constraint of a public request: which field asks for what, and the grammar that says so to the workers.

validate ─► `constraint_of`, cheap checks ─► `checked_grammar`, off the event loop ─► `SamplingParams.grammar`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, grammar_from

from kvferry.errors import InvalidArgument
from kvferry.grammar import MAX_GRAMMAR_BYTES, MAX_REASON_CHARS, GrammarRefused, Grammars
from proto.kvferry.v1 import inference_pb2 as pb

MAX_CHOICE_STRINGS = 1_024
WHITESPACE = r"[ \t\r\n]{1,32}"
"""Between two parts of JSON: whatever a model writes by habit, and an end to a model that writes nothing else."""
EXTENSION_KEY = "x-guidance"

CONSTRAINT_FIELDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What the output has to be.

    Attributes:
        field: which field of the request says so; one of `CONSTRAINT_FIELDS`.
        text: its value; a JSON list for `choice`, a JSON schema for `json_object`, too.
    """

    field: str
    text: str


def constraint_of(message: pb.GenerateRequest) -> OutputConstraint | None:
    """None where the request has none. Raises InvalidArgument naming the field and the limit."""
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
            return OutputConstraint("grammar", _bounded("grammar", message.grammar))
    return None


async def checked_grammar(
    constraint: OutputConstraint | None, grammars: Grammars, eos_token_ids: tuple[int, ...]
) -> str:
    """The grammar for the workers, which has been compiled here; empty for no constraint.

    Raises:
        InvalidArgument: the constraint is malformed, too complex, or matches nothing; with the library's reason.
        ResourceExhausted: too many are being compiled.
    """
    if constraint is None:
        return ""
    if not eos_token_ids:
        raise InvalidArgument(constraint.field, "cannot be kept: the model has no end-of-sequence id to end it with")
    try:
        grammar = await grammars.run(lambda: _grammar(constraint))
        await grammars.compiled(grammar, eos_token_ids)
    except GrammarRefused as error:
        raise InvalidArgument(constraint.field, str(error)) from error
    return grammar


def _grammar(constraint: OutputConstraint) -> str:
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
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    return json.dumps({"grammars": [{"json_schema": {**json.loads(constraint.text), EXTENSION_KEY: options}}]})


def _bounded(field: str, text: str) -> str:
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(field, f"has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    if not text:
        raise InvalidArgument(field, "is empty")
    return text


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
        normal = json.dumps({} if schema is True else schema, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("json_schema", f"is not JSON: {error}") from error
    if schema is False:
        raise InvalidArgument("json_schema", "is false: no output can match it")
    if schema is not True and not isinstance(schema, dict):
        raise InvalidArgument("json_schema", f"must be an object, got a {type(schema).__name__}")
    if isinstance(schema, dict) and EXTENSION_KEY in schema:
        raise InvalidArgument("json_schema", f"has {EXTENSION_KEY}, which is not supported")
    return normal


def _choices(choices: Sequence[str]) -> str:
    """As a JSON list, without repetitions."""
    if not choices:
        raise InvalidArgument("choice", "has no strings; at least 1 is needed")
    if len(choices) > MAX_CHOICE_STRINGS:
        raise InvalidArgument("choice", f"has {len(choices)} strings; at most {MAX_CHOICE_STRINGS} are allowed")
    return json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)
