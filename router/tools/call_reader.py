"""One call of a tool as a model writes it, `{"name": …, "arguments": {…}}`, read as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEAD_CHARS = 1_024
"""Up to the arguments; a longer head is read once it is whole."""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A whole one; `arguments` is the text of an object in JSON, as the model wrote it."""

    name: str
    arguments: str


class CallReader:
    """Takes the text from the opening brace to the closing one.

    Attributes:
        is_whole: the closing brace came.
        live_name: the function's name, once arguments are told as they come; None before, and where they are not.
    """

    def __init__(self, names: Collection[str], *, is_live: bool) -> None:
        """`names`: functions there are; `is_live`: a grammar makes sure of the call, so arguments are told at once."""
        self._names, self._is_live = names, is_live
        self._parts: list[str] = []
        self._num_chars = 0
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._arguments_end: int | None = None  # where the first value within the object ended
        self._new_arguments: list[str] = []
        self.is_whole = False
        self.live_name: str | None = None

    @property
    def text(self) -> str:
        """All that was taken."""
        return "".join(self._parts)

    def push(self, text: str) -> int:
        """Takes more; returns how many characters of it belong to the call."""
        before, num_taken = self._num_chars, self._scan(text)
        taken = text[:num_taken]
        self._parts.append(taken)
        self._num_chars += num_taken
        if self.live_name is not None:
            self._new_arguments.append(self._until_end(taken, before))
        elif self._is_live and before < MAX_HEAD_CHARS:
            self._look_for_head()
        return num_taken

    def take_arguments(self) -> str:
        """What came of the arguments since the last time, where they are told as they come."""
        new = "".join(self._new_arguments)
        self._new_arguments.clear()
        return new

    def read(self) -> ReadCall | None:
        """The whole call; None where it is none, or of a function that there is not."""
        members = _members(self.text)
        if members is None:
            return None
        name = json.loads(members.get("name", "null"))
        arguments = next((members[key] for key in ARGUMENT_KEYS if key in members), "")
        is_known = isinstance(name, str) and name in self._names
        return ReadCall(name, arguments) if is_known and arguments.startswith("{") else None

    def _look_for_head(self) -> None:
        text = self.text
        head = _HEAD.match(text)
        if head is None:
            return
        name = json.loads(head[1], strict=False)
        if name in self._names:
            self.live_name = name
            self._new_arguments.append(self._until_end(text[head.end() :], head.end()))

    def _until_end(self, text: str, start: int) -> str:
        """The part of a text that begins at `start` which is before the arguments' end."""
        return text if self._arguments_end is None else text[: max(0, self._arguments_end - start)]

    def _scan(self, text: str) -> int:
        """How many characters there are up to the closing brace, it included."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            self._take_sign(found[0], self._num_chars + at)
            if self.is_whole:
                return at
        return len(text)

    def _take_sign(self, sign: str, end: int) -> None:
        match sign:
            case '"':
                self._in_string = not self._in_string
            case "\\":
                self._is_escaped = True
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
                if self._depth == 1 and self._arguments_end is None:
                    self._arguments_end = end
                self.is_whole = self._depth == 0


def _members(text: str) -> Mapping[str, str] | None:
    """Text of each member of an object in JSON; None for what is none."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    try:
        if not isinstance(decoder.decode(text), dict):
            return None
        members, at = {}, _skip(text, 1)
        while text[at] != "}":
            key, at = decoder.raw_decode(text, at)
            start = _skip(text, _skip(text, at) + 1)  # behind the colon
            _, end = decoder.raw_decode(text, start)
            members[key] = text[start:end]
            at = _skip(text, end)
            at = _skip(text, at + 1) if text[at] == "," else at
    except (ValueError, RecursionError):
        return None
    return members


def _skip(text: str, at: int) -> int:
    """Where the next character is that is no white space."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
