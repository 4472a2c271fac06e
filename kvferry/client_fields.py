"""How values of Python get into the fields of a request: exactly, or refused by the name the server would use.

Python takes a text for a list of its letters, bytes for a list of numbers and a mapping for a list of its keys. None of
them is what was meant where a list belongs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvferry.errors import InvalidArgument


def set_field(message: Any, path: str, value: object) -> None:
    """Sets the last part of `path`, which is the field's name in errors, as the server's are; None leaves it unset."""
    if value is None:
        return
    name = path.rpartition(".")[2]
    if isinstance(value, bool) and not isinstance(getattr(message, name), bool):
        raise InvalidArgument(path, f"cannot be {value}")
    try:
        setattr(message, name, value)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"cannot be {value!r:.80}: {error}") from error


def set_list(target: Any, path: str, values: Iterable[object] | None) -> None:
    """Appends them to the repeated field `target`, which errors call `path`; None are none."""
    if values is None:
        return
    check_list(path, values)
    try:
        target.extend(values)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"holds a value it cannot: {error}") from error


def set_mapping(target: Any, path: str, values: Mapping[int, float] | None) -> None:
    """Puts them into the map `target`, which errors call `path`; None are none."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise InvalidArgument(path, f"must be a mapping, got {_kind_of(values)}")
    try:
        target.update(values)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"holds a value it cannot: {error}") from error


def check_list(path: str, values: object, wanted: str = "a list") -> None:
    """Refuses what Python would take for a list, though it is none, and what can be read once only."""
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or not isinstance(values, Iterable):
        raise InvalidArgument(path, f"must be {wanted}, got {_kind_of(values)}")
    if isinstance(values, Iterator):  # options may be sent twice; the second time it would be empty
        raise InvalidArgument(path, f"must be {wanted}, got {_kind_of(values)}, which can be read once only")


def json_text(path: str, value: object) -> object:
    """A mapping as JSON; all else as it is, for the field to take or refuse."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(path, f"cannot be written as JSON: {error}") from error


def _kind_of(value: object) -> str:
    return f"{type(value).__name__} {value!r:.80}"
