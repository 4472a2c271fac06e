"""Errors of ours as OpenAI's clients expect them: one table from class to HTTP status, one JSON shape.

A status that its clients repeat on their own (408, 429, 5xx) is only given where a repeat may help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvferry.errors import (
    Cancelled,
    ContextExceeded,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvferryError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    UnsupportedField,
)

MAX_MESSAGE_CHARS = 1_500
SHORTEST_RETRY_S = 1


class BodyTooLarge(InvalidArgument):
    """More bytes than `router.max_request_bytes`; the rest of them is not read."""

    reason = "REQUEST_TOO_LARGE"


class BodyTooSlow(KvferryError):
    """The body was not there in time."""

    reason = "REQUEST_TIMEOUT"


class BodyNotJson(InvalidArgument):
    """The head says that the body is something else than plain JSON."""

    reason = "UNSUPPORTED_MEDIA_TYPE"


class NoSuchRoute(KvferryError):
    """No such path."""

    reason = "NOT_FOUND"


class NoSuchMethod(KvferryError):
    """The path is there, but not for this method."""

    reason = "METHOD_NOT_ALLOWED"


@dataclass(frozen=True, slots=True)
class Answer:
    """How an error is told.

    Attributes:
        status: of HTTP.
        kind: `error.type`.
        code: `error.code`.
    """

    status: int
    kind: str
    code: str


INVALID = "invalid_request_error"
SERVER = "server_error"

ANSWERS = MappingProxyType(
    {
        BodyTooLarge: Answer(413, INVALID, "request_too_large"),
        BodyTooSlow: Answer(408, INVALID, "request_timeout"),
        BodyNotJson: Answer(415, INVALID, "unsupported_media_type"),
        UnsupportedField: Answer(400, INVALID, "unsupported_field"),
        ContextExceeded: Answer(400, INVALID, "context_length_exceeded"),
        InvalidArgument: Answer(400, INVALID, "invalid_value"),
        Unauthenticated: Answer(401, "authentication_error", "invalid_api_key"),
        PermissionDenied: Answer(403, "permission_error", "permission_denied"),
        NoSuchRoute: Answer(404, INVALID, "unknown_url"),
        NoSuchMethod: Answer(405, INVALID, "method_not_supported"),
        NotFound: Answer(404, "not_found_error", "model_not_found"),
        ResourceExhausted: Answer(429, "rate_limit_error", "rate_limit_exceeded"),
        Cancelled: Answer(499, INVALID, "request_cancelled"),
        Unavailable: Answer(503, SERVER, "service_unavailable"),
        DeadlineExceeded: Answer(504, SERVER, "deadline_exceeded"),
        FailedPrecondition: Answer(422, SERVER, "failed_precondition"),  # the parts do not fit: no repeat helps
        DataLoss: Answer(500, SERVER, "data_loss"),
        Internal: Answer(500, SERVER, "internal_error"),
    }
)
"""By class; a class that is not here is told as the nearest one above it."""

NEVER_FITS = Answer(400, INVALID, "request_too_demanding")
"""ResourceExhausted for ever: a repeat would not help."""

FIELD_NAMES = MappingProxyType(
    {
        "prompt.chat.messages": "messages",
        "prompt.chat.tools": "tools",
        "prompt.chat.template_arguments": "chat_template_kwargs",
        "prompt.chat": "messages",
        "prompt.text": "prompt",
        "prompt.token_ids": "prompt",
        "tier": "service_tier",
        "beam_search.width": "n",
        "compact_json": "structured_outputs.disable_any_whitespace",
        "response.prompt_logprobs": "logprobs",
    }
)
"""Fields of GenerateRequest that have another name here; of others the group (`sampling.`) is left out."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})
CALL_PART = re.compile(r"(prompt\.chat\.(?:tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\]))\.(?!id\b)")
"""What gRPC has in a tool, or a call of one, and HTTP in its `function`."""
MENTIONS = re.compile(
    r"(?<![\w.])(?:beam_search(?:\.width)?|response\.(?:logprobs|text))\b|(?<=cannot be combined with )\w+"
)
"""Fields of gRPC in the text of an error about another."""
GROUPS = ("sampling.", "stopping.", "response.", "cache.", "beam_search.")


def answer_of(error: KvferryError) -> Answer:
    """Status, type and code."""
    if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
        return NEVER_FITS
    return next((ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS), ANSWERS[Internal])


def error_json(error: KvferryError) -> dict[str, Any]:
    """The body that tells it."""
    answer, param, message = answer_of(error), None, error.message
    if error.field is not None:
        param = public_field(error.field)
        message = message.replace(f"{error.field}:", f"{param}:", 1)
    content = {"message": message[:MAX_MESSAGE_CHARS], "type": answer.kind, "param": param, "code": answer.code}
    return {"error": content}


def error_headers(error: KvferryError) -> dict[str, str]:
    """When to come again, where that is known; which scheme a key is sent by, where it is missing."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if answer_of(error).status not in (429, 503):
        return {}
    return {"retry-after": str(max(SHORTEST_RETRY_S, math.ceil(error.retry_after_s or 0)))}


def in_headers(text: str) -> str:
    """What is said of a call's key, to a caller who sends headers."""
    return (
        text.replace("the metadata", "the header").removesuffix(" (`--api-key`)").replace("header has", "request has")
    )


@contextmanager
def told_in_http(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of a GenerateRequest leave the block with its name in HTTP, which `names` knows better."""
    try:
        yield
    except InvalidArgument as error:
        if error.field is None:
            raise
        text = error.message.removeprefix(f"{error.field}: ")
        told = MENTIONS.sub(lambda found: _mentioned(found[0], names), text)
        raise type(error)(public_field(error.field, names), told) from error


def _mentioned(field: str, names: Mapping[str, str]) -> str:
    return "use_beam_search" if field == "beam_search" else public_field(field, names)


def public_field(field: str, names: Mapping[str, str] = NO_NAMES) -> str:
    """What the field of a GenerateRequest is called in HTTP; `names` are those that a body has of its own."""
    field = CALL_PART.sub(r"\1.function.", field)
    known = {**FIELD_NAMES, **names}
    for name in sorted(known, key=len, reverse=True):
        if field == name or field.startswith((f"{name}[", f"{name}.")):
            return known[name] + field.removeprefix(name)
    group = next((group for group in GROUPS if field.startswith(group)), "")
    return field.removeprefix(group)
