"""What the interface is, as OpenAPI says it (`/openapi.json`), and as a page for people (`/docs`) that loads nothing.

Both come from the classes that check the bodies, so they cannot differ from what is taken. Meaning and limits of the
fields are in `docs/api.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Any

from pydantic.json_schema import models_json_schema

from kvferry import __version__
from router.openai.answers import ChatCompletion, Completion, DetokenizeAnswer, ModelCard, ModelList, TokenizeAnswer
from router.openai.body import Body
from router.openai.errors import ANSWERS
from router.openai.requests import ChatBody, CompletionBody
from router.openai.tokens import DetokenizeBody, TokenizeBody

Json = dict[str, Any]

PATH = "/openapi.json"
PAGE_PATH = "/docs"
EVENTS = "text/event-stream"
SCHEMAS = "#/components/schemas/"


class ErrorContent(Body):
    """`error` of an `ErrorBody`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body):
    """What every status but 200 comes with."""

    error: ErrorContent


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    Attributes:
        name: its `operationId`.
        answer: what it gives.
        body: what it takes; None for nothing.
        streams: whether events may come in the place of one object.
    """

    name: str
    method: str
    path: str
    summary: str
    answer: type[Body]
    body: type[Body] | None = None
    streams: bool = False


OPERATIONS = (
    Operation("listModels", "GET", "/v1/models", "Names and aliases of the models.", ModelList),
    Operation("retrieveModel", "GET", "/v1/models/{name}", "One of them; a name may hold slashes.", ModelCard),
    Operation(
        "createCompletion",
        "POST",
        "/v1/completions",
        "Goes on with a text or token ids.",
        Completion,
        CompletionBody,
        True,
    ),
    Operation(
        "createChatCompletion",
        "POST",
        "/v1/chat/completions",
        "Answers a conversation.",
        ChatCompletion,
        ChatBody,
        True,
    ),
    Operation("tokenize", "POST", "/tokenize", "Token ids of a text or a conversation.", TokenizeAnswer, TokenizeBody),
    Operation("detokenize", "POST", "/detokenize", "Text of token ids.", DetokenizeAnswer, DetokenizeBody),
)


def openapi() -> Json:
    """The document, OpenAPI 3.1."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    answers = [operation.answer for operation in OPERATIONS]
    inputs = [(body, "validation") for body in (*bodies, *answers, ErrorBody)]
    _, schemas = models_json_schema(inputs, ref_template=SCHEMAS + "{model}")  # type: ignore[arg-type]
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": __version__, "description": "OpenAI's interface; see docs/api.md."},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation) -> Json:
    told: Json = {"operationId": operation.name, "summary": operation.summary, "responses": _responses(operation)}
    if "{name}" in operation.path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        content = {"application/json": {"schema": {"$ref": SCHEMAS + operation.body.__name__}}}
        told["requestBody"] = {"required": True, "content": content}
    return told


def _responses(operation: Operation) -> Json:
    content: Json = {"application/json": {"schema": {"$ref": SCHEMAS + operation.answer.__name__}}}
    if operation.streams:
        words = (
            "With `stream`: lines `data: ` and JSON of what is new, an empty line behind each; the last is `[DONE]`."
        )
        content[EVENTS] = {"schema": {"type": "string", "description": words}}
    error = {"application/json": {"schema": {"$ref": SCHEMAS + ErrorBody.__name__}}}
    codes: dict[int, list[str]] = {}
    for answer in ANSWERS.values():
        codes.setdefault(answer.status, []).append(answer.code)
    errors = {
        str(status): {"description": ", ".join(codes[status]), "content": error}
        for status in sorted(codes)
        if status != 405  # no method of this path
    }
    return {"200": {"description": "What was asked for.", "content": content}, **errors}


# --- the page ---

STYLE = "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto}td{padding:0 1em 0 0;vertical-align:top}"
NAMES: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "const": json.dumps,
        "enum": lambda values: " | ".join(map(json.dumps, values)),
        "$ref": lambda path: str(path).removeprefix(SCHEMAS),
    }
)

BOUNDS: Mapping[str, str] = MappingProxyType(
    {"minimum": "≥", "exclusiveMaximum": "<", "minLength": "of length ≥", "maxLength": "of length ≤"}
)


def page(document: Json) -> str:
    """The document in HTML: no script, nothing loaded from anywhere."""
    others = ", ".join(f"<a href=.{path}>{path}</a>" for path in ("/health", "/live", "/metrics"))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvferry</title><style>{STYLE}</style>"
        f"<h1>kvferry {escape(document['info']['version'])}</h1>"
        f"<p>OpenAI's interface, as <a href=.{PATH}>OpenAPI</a> says it; more on fields and errors is in the "
        f"repository's docs/api.md. Besides: {others}.</p>{''.join(_sections(document))}</html>"
    )


def _sections(document: Json) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            takes = f"<p>Takes {escape(_type(body))}.</p>" if body else ""
            answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
            gives = f"<p>Gives {escape(_type(answer))}.</p>"
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>{takes}{gives}"
    for name, schema in document["components"]["schemas"].items():
        rows = (
            f"<tr><td><code>{escape(field)}</code><td>{escape(_type(of))}"
            f"<td>{'needed' if field in schema.get('required', ()) else ''}<td>{escape(_words(of))}"
            for field, of in schema.get("properties", {}).items()
        )
        yield f"<h3>{escape(name)}</h3><table>{''.join(rows)}</table>"


def _words(schema: Json) -> str:
    """Range, default and description of a field."""
    least, most, default = schema.get("minimum"), schema.get("maximum"), schema.get("default")
    bounds = (
        "" if least is None and most is None else f"{'' if least is None else least} … {'' if most is None else most}"
    )
    parts = (bounds.strip(), "" if default is None else f"default {json.dumps(default)}", schema.get("description", ""))
    return "; ".join(part for part in parts if part)


def _type(schema: Json) -> str:
    """Its type in few words, bounds included."""
    for key, name in NAMES.items():
        if key in schema:
            return name(schema[key])
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{words} {schema[key]}" for key, words in BOUNDS.items() if key in schema]
    return " ".join([schema.get("type", "anything"), *bounds])
