"""docs/api.md names every field of the public protos and of OpenAI's bodies, in its right place, and no other.

A heading names types, its table's first column names their fields. What is checked by number here is said there.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from pydantic import BaseModel

from kvferry import errors
from kvferry.worker import MAX_PROGRESS_TIMEOUT_S, MIN_PROGRESS_TIMEOUT_S
from proto.kvferry.v1 import admin_pb2, cache_pb2, inference_pb2
from router import cache_service, chat, constraint, logit_rules, response_parts, resume, validation
from router.openai import body, exchange, fields, requests
from router.openai.errors import ANSWERS, NEVER_FITS
from router.openai.openapi import OPERATIONS
from tests.architecture.source_tree import ROOT

CODE = re.compile(r"`([^`]+)`")
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    cache_pb2.DESCRIPTOR.services_by_name["CacheService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)


@cache
def sections() -> tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]:
    """Headings, and the cells of the table below each; without heads of tables."""
    found: list[tuple[str, list[tuple[str, ...]]]] = []
    for line in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            found.append((line.lstrip("# "), []))
        elif line.startswith("|") and found:
            found[-1][1].append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return tuple((heading, tuple(rows[2:])) for heading, rows in found)


def rows_of(heading: str) -> tuple[tuple[str, ...], ...]:
    (rows,) = (rows for known, rows in sections() if known == heading)
    return rows


def documented() -> dict[tuple[str, ...], list[str]]:
    """Names in the first column, by the types that the heading names."""
    return {
        tuple(CODE.findall(heading)): [name for row in rows for name in CODE.findall(row[0])]
        for heading, rows in sections()
        if heading.startswith("`")
    }


def messages() -> dict[str, set[str]]:
    """Fields, or values, of every type that a public call takes or gives."""
    found: dict[str, set[str]] = {}

    def add(kind: Descriptor | EnumDescriptor) -> None:
        if kind.name in found:
            return
        if isinstance(kind, EnumDescriptor):
            found[kind.name] = set(kind.values_by_name)
            return
        found[kind.name] = set(kind.fields_by_name)
        for field in kind.fields:
            below = field.message_type or field.enum_type
            if below is not None and not below.full_name.endswith("Entry"):
                add(below)

    for service in SERVICES:
        for method in service.methods:
            add(method.input_type)
            add(method.output_type)
    return found


def _models_in(kind: object) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in typing.get_args(kind):
        yield from _models_in(part)


def bodies() -> dict[str, set[str]]:
    """Fields of every JSON object that a route takes, by their names in JSON."""
    found: dict[str, set[str]] = {}

    def add(kind: type[BaseModel]) -> None:
        if kind.__name__ in found:
            return
        found[kind.__name__] = {field.alias or name for name, field in kind.model_fields.items()}
        for field in kind.model_fields.values():
            for below in _models_in(field.annotation):
                add(below)

    for operation in OPERATIONS:
        if operation.body is not None:
            add(operation.body)
    return found


@pytest.mark.parametrize("public", [messages, bodies])
def test_every_field_is_named_below_its_type_and_no_other(public: Callable[[], dict[str, set[str]]]) -> None:
    known = public()
    assert len(known) > 8
    told = documented()
    named = [name for kinds in told for name in kinds]
    assert len(named) == len(set(named)), "a type has one table"
    assert set(known) - set(named) == set(), "types without a table; name them in a heading"
    for kinds, names in told.items():
        if set(kinds) & set(known):
            wanted = set().union(*(known[kind] for kind in kinds))
            assert (sorted(wanted - set(names)), sorted(set(names) - wanted)) == ([], []), f"missing, unknown: {kinds}"
            assert len(names) == len(set(names)), f"named twice: {kinds}"


def test_every_type_that_is_named_is_there() -> None:
    assert {name for kinds in documented() for name in kinds} == set(messages()) | set(bodies())


def test_every_call_is_named() -> None:
    rows = rows_of("Services and calls")
    named = {name for row in rows for name in CODE.findall(row[0]) + CODE.findall(row[1])}
    wanted = {service.name for service in SERVICES} | {method.name for one in SERVICES for method in one.methods}
    assert wanted <= named
    assert {name for name in named if "." not in name} - wanted == {"Check", "Watch"}
    routes = " ".join(row[0] for row in rows_of("OpenAI's HTTP interface"))
    for operation in OPERATIONS:
        assert operation.path.replace("{name}", "NAME") in routes


def test_every_error_is_named_with_its_status() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvferryError)]
    wanted = {(kind.status.name, kind.reason) for kind in kinds}
    rows = rows_of("Errors of gRPC")
    assert {(row[0], reason) for row in rows for reason in CODE.findall(row[1])} == wanted
    told = {
        (int(row[0]), kind, code)
        for row in rows_of("Errors of HTTP")
        for kind in CODE.findall(row[1])
        for code in CODE.findall(row[2])
        if re.fullmatch("[a-z_]+", code)
    }
    assert told == {(answer.status, answer.kind, answer.code) for answer in (*ANSWERS.values(), NEVER_FITS)}


@pytest.mark.parametrize(
    ("kind", "field", "numbers"),
    [
        ("GenerateRequest", "request_id", [validation.MAX_REQUEST_ID_CHARS]),
        ("GenerateRequest", "session_id", [validation.MAX_SESSION_ID_CHARS]),
        ("GenerateRequest", "progress_timeout_s", [MIN_PROGRESS_TIMEOUT_S, int(MAX_PROGRESS_TIMEOUT_S)]),
        ("SamplingOptions", "n", [validation.MAX_CHOICES]),
        ("SamplingOptions", "best_of", [validation.MAX_CHOICES]),
        ("SamplingOptions", "presence_penalty", [int(logit_rules.MAX_PENALTY)]),
        ("SamplingOptions", "logit_bias", [logit_rules.MAX_BIASED_TOKENS, int(logit_rules.MAX_BIAS)]),
        ("SamplingOptions", "bad_words", [logit_rules.MAX_BAD_WORDS, logit_rules.MAX_BAD_WORD_CHARS]),
        ("StoppingOptions", "stop", [validation.MAX_STOP_STRINGS, validation.MAX_STOP_STRING_CHARS]),
        ("StoppingOptions", "stop_token_ids", [validation.MAX_STOP_TOKEN_IDS]),
        ("ResponseOptions", "logprobs", [response_parts.MAX_LOGPROBS]),
        ("ResponseOptions", "prompt_logprobs", [response_parts.MAX_LOGPROBS]),
        ("ResponseOptions", "logprob_token_ids", [response_parts.MAX_LOGPROB_TOKEN_IDS]),
        ("Chat", "messages", [chat.MAX_CHAT_MESSAGES]),
        ("Chat", "tools", [chat.MAX_TOOLS]),
        ("Chat", "tool_calls", [chat.MAX_TOOL_CALLS]),
        ("Chat", "cache_salt", [validation.MAX_CACHE_SALT_BYTES]),
        ("Chat", "choices", [constraint.MAX_CHOICE_STRINGS]),
        ("Chat", "width", [validation.MAX_BEAM_WIDTH]),
        ("Chat", "length_penalty", [int(validation.MAX_LENGTH_PENALTY)]),
        ("Resume", "server_request_id", [resume.MAX_SERVER_ID_CHARS]),
        ("PinPrefixRequest", "name", [cache_service.MAX_PIN_NAME_CHARS]),
        ("ChatBody", "prompt", [requests.MAX_PROMPTS]),
        ("ChatBody", "max_tokens", [requests.DEFAULT_COMPLETION_TOKENS]),
        ("ChatBody", "user", [fields.MAX_USER_CHARS]),
        ("ChatBody", "stop", [validation.MAX_STOP_STRINGS]),
        ("ChatBody", "top_logprobs", [response_parts.MAX_LOGPROBS]),
    ],
)
def test_limits_are_those_that_are_checked(kind: str, field: str, numbers: list[float]) -> None:
    (rows,) = (rows for heading, rows in sections() if kind in CODE.findall(heading))
    (row,) = (row for row in rows if field in CODE.findall(row[0]))
    for number in numbers:
        assert re.search(rf"(?<![\d.,]){re.escape(f'{number:,}')}(?![\d,]*\d)", " ".join(row[1:])), (row, number)


def test_limits_in_the_text_are_those_that_are_checked() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert f"{body.MAX_KEYS:,}\nkeys" in text
    assert f"after {exchange.BODY_TIMEOUT_S:g} s" in text
