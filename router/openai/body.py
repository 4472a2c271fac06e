"""JSON bodies: UTF-8, types as they are, known names only and each once, no NaN; what is refused is named by its place.

A list is checked up to its first fault and an object has a bounded number of keys: else a body full of faults would
cost a hundred times its size.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from kvferry.errors import InvalidArgument, UnsupportedField

MAX_KEYS = 4_096
"""Of one object; a fault is kept for each until all are checked."""

MAX_NAME_CHARS = 80
MAX_UNKNOWN_NAMES = 8
"""Told beside the first one."""


class AtFirstFault(FailFast):
    """Checks a sequence up to its first fault; hashable, as alternatives of a type must be."""

    __hash__ = object.__hash__


UInt = Annotated[int, Field(ge=0, lt=1 << 32)]
Ids = Annotated[tuple[UInt, ...], AtFirstFault()]


def _digits(key: object) -> object:
    """Two ways to write one number would be two keys for one id."""
    if not isinstance(key, str):
        return key
    if not re.fullmatch(r"0|[1-9][0-9]{0,19}", key):
        raise PydanticCustomError("token_key", "must be a token id, written in digits and without leading zeros")
    return int(key)


TokenKey = Annotated[UInt, BeforeValidator(_digits)]
Strings = Annotated[tuple[str, ...], AtFirstFault()]


def told(words: str = "", *, default: object = None, least: float | None = None, most: float | None = None) -> Any:
    """A field that may be absent, described: what its default and range come to, which others check."""
    known: dict[str, Any] = {"default": default, "minimum": least, "maximum": most}
    extra = {name: value for name, value in known.items() if value is not None}
    return Field(default=None, description=words or None, json_schema_extra=extra)


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """The fields of a JSON body. Raises InvalidArgument naming the field."""
    constants: list[str] = []  # NaN and Infinity; a field that is a number is named, others are anything
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=constants.append)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"is not JSON: {error}") from error
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        known = [field.alias or name for name, field in kind.model_fields.items()]
        raise _refusal_of(faults, value, known) from error
    if constants:
        raise InvalidArgument("body", f"has {constants[0]}, which is no number of JSON")
    return fields


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values of one key nobody can tell which was meant."""
    if len(pairs) > MAX_KEYS:
        raise InvalidArgument("body", f"has an object of {len(pairs)} keys; at most {MAX_KEYS} are allowed")
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InvalidArgument("body", f"has an object with the key {twice!r:.80} more than once")
    return made


def _refusal_of(faults: Sequence[ErrorDetails], body: object, known: Sequence[str]) -> InvalidArgument:
    """The fault of the first field that has one; of the alternatives of its type, those that came furthest.

    `known`: fields that there are.
    """
    places = [_place(fault, body) for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    place = max(places, key=len)
    found = [fault for fault, at in zip(faults, places, strict=False) if at == place]
    field = _written(place)
    if found[0]["type"] == "extra_forbidden":
        others = [_place(fault, body) for fault in faults if fault["type"] == "extra_forbidden"]
        return UnsupportedField(field, _unknown(place, [one for one in dict.fromkeys(others) if one != place], known))
    messages = dict.fromkeys(fault["msg"][:1].lower() + fault["msg"][1:] for fault in found)
    return InvalidArgument(field or "body", ", or: ".join(messages))


def _written(place: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def _unknown(place: Sequence[int | str], others: Sequence[Sequence[int | str]], known: Sequence[str]) -> str:
    """What to do about a field that is not known, and which others are not."""
    near = difflib.get_close_matches(str(place[0])[:MAX_NAME_CHARS], known, n=1) if len(place) == 1 else []
    advice = f"did you mean {near[0]}?" if near else "leave it out"
    listed = ", ".join(_written(one)[:MAX_NAME_CHARS] for one in others[:MAX_UNKNOWN_NAMES])
    more = f" and {len(others) - MAX_UNKNOWN_NAMES} more" if len(others) > MAX_UNKNOWN_NAMES else ""
    return f"is not known here; {advice}" + (f" (also unknown: {listed}{more})" if others else "")


def _place(fault: ErrorDetails, body: object) -> tuple[int | str, ...]:
    """Where it is, without the names that the checker gives to the alternatives of a type."""
    path: list[int | str] = []
    value: Any = body
    for part in fault["loc"]:
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
        elif fault["type"] != "missing" or part is not fault["loc"][-1]:
            continue
        path.append(part)
    return tuple(path)
