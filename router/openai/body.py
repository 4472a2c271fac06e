"""JSON bodies: UTF-8, types as they are, known names only and each once, no NaN; what is refused is named by its place.

A list is checked up to its first fault and an object has a bounded number of keys: else a body full of faults would
cost a hundred times its size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails

from kvferry.errors import InvalidArgument, UnsupportedField

MAX_KEYS = 4_096
"""Of one object; a fault is kept for each until all are checked."""


class AtFirstFault(FailFast):
    """Checks a sequence up to its first fault; hashable, as alternatives of a type must be."""

    __hash__ = object.__hash__


UInt = Annotated[int, Field(ge=0, lt=1 << 32)]
Ids = Annotated[tuple[UInt, ...], AtFirstFault()]
Strings = Annotated[tuple[str, ...], AtFirstFault()]


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
        raise _refusal_of(faults, value) from error
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


def _refusal_of(faults: Sequence[ErrorDetails], body: object) -> InvalidArgument:
    """The fault of the first field that has one; of the alternatives of its type, those that came furthest."""
    places = [_place(fault, body) for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    place = max(places, key=len)
    found = [fault for fault, at in zip(faults, places, strict=False) if at == place]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if found[0]["type"] == "extra_forbidden":
        return UnsupportedField(field, "is not known here; leave it out")
    messages = dict.fromkeys(fault["msg"][:1].lower() + fault["msg"][1:] for fault in found)
    return InvalidArgument(field or "body", ", or: ".join(messages))


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
