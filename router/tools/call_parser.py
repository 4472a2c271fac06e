"""A model's output in, content and calls of tools out, as the text comes.

The result is a function of the text, however it is cut. A call that is malformed, or of a function that the request
does not have, is content; no text is lost but markers, separators and white space beside calls. Where a grammar makes
sure of the calls, arguments are told as they come; else a call is told once it is whole, for what was told cannot be
taken back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from router.tools.call_reader import CallReader
from router.tools.formats import ToolFormat

MAX_SPACE = 64
"""White space within and before calls: more of it is no habit of a model, and must not be held back for ever."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a call: `name` is set in its first piece alone; `arguments` joined are its JSON."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallPiece
"""Content, or more of a call."""


class _State(Enum):
    START = auto()  # nothing but white space has come, and calls may begin without their marker
    TEXT = auto()
    OPEN = auto()  # behind the marker or a separator: a call has to come
    CALL = auto()
    AFTER = auto()  # behind a call: a separator, or the end of calls


class CallParser:
    """Reads one choice.

    Attributes:
        num_calls: calls told so far.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, is_live: bool = False) -> None:
        """`names`: functions of the request; `is_live`: a grammar makes sure of the calls."""
        self._form, self._names, self._is_live = form, names, is_live
        self._state = _State.START if form.is_bare else _State.TEXT
        self._rest = ""  # text that is not yet understood
        self._held = ""  # text of calls that begin, content if they do not go on
        self._needs_open = False
        self._is_behind_call = False
        self._reader = self._new_reader()
        self._pieces: list[Piece] = []
        self.num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """Whether a call that was begun to be told is not whole."""
        return self._state is _State.CALL

    def push(self, text: str) -> list[Piece]:
        """Takes the next text; returns what is known by it."""
        self._rest += text
        while self._rest and self._step():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """Ends the output: gives what was held back."""
        match self._state:
            case _State.START | _State.TEXT if not self._is_behind_call:
                self._say(self._rest)
            case _State.OPEN:
                self._say(self._held + self._rest)
            case _State.CALL if self._reader.live_name is None:
                self._say(self._held + self._reader.text)
                self._state = _State.TEXT
        self._rest = ""  # behind a call: white space, or a part of the marker that ends it
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text and self._pieces and isinstance(self._pieces[-1], str):
            self._pieces[-1] += text
        elif text:
            self._pieces.append(text)

    def _step(self) -> bool:
        """Goes on by one part of the text; False where more has to come first."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.TEXT:
                return self._text()
            case _State.OPEN:
                return self._open()
            case _State.CALL:
                return self._call()
            case _State.AFTER:
                return self._after()

    def _start(self) -> bool:
        stripped = self._rest.lstrip()
        num_space = len(self._rest) - len(stripped)
        if num_space <= MAX_SPACE and self._form.begin.startswith(stripped) and stripped != self._form.begin:
            return False
        self._state = _State.TEXT
        if num_space <= MAX_SPACE and stripped.startswith(self._form.open or "{"):
            self._begin(num_space, "")
        return True

    def _text(self) -> bool:
        if self._is_behind_call:
            self._rest = self._rest.lstrip()
            if not self._rest:
                return False
            self._is_behind_call = False
        at = self._rest.find(self._form.begin)
        if at >= 0:
            num_said = _without_space(self._rest, at)
            self._say(self._rest[:num_said])
            self._rest = self._rest[num_said:]
            self._begin(at - num_said, self._form.begin)
            return True
        num_said = _without_space(self._rest, len(self._rest) - _overlap(self._rest, self._form.begin))
        self._say(self._rest[:num_said])
        self._rest = self._rest[num_said:]
        return False

    def _begin(self, num_space: int, marker: str) -> None:
        """Calls come behind white space and marker."""
        self._hold(num_space + len(marker))
        self._needs_open = bool(self._form.open)
        self._state = _State.OPEN

    def _hold(self, num_chars: int) -> None:
        self._held += self._rest[:num_chars]
        self._rest = self._rest[num_chars:]

    def _fail(self) -> None:
        """What was held is content after all."""
        self._say(self._held)
        self._held = ""
        self._state = _State.TEXT

    def _open(self) -> bool:
        stripped = self._rest.lstrip()
        num_space = len(self._rest) - len(stripped)
        if num_space <= MAX_SPACE and not stripped:
            return False
        if num_space > MAX_SPACE or not stripped.startswith(self._form.open if self._needs_open else "{"):
            self._fail()
        elif self._needs_open:
            self._hold(num_space + len(self._form.open))
            self._needs_open = False
        else:
            self._hold(num_space)
            self._reader = self._new_reader()
            self._state = _State.CALL
        return True

    def _new_reader(self) -> CallReader:
        return CallReader(self._names, is_live=self._is_live)

    def _call(self) -> bool:
        reader, was_live = self._reader, self._reader.live_name is not None
        self._rest = self._rest[reader.push(self._rest) :]
        if reader.live_name is not None:
            self._tell(None if was_live else reader.live_name, reader.take_arguments())
            self.num_calls += reader.is_whole
        if not reader.is_whole:
            return False
        if reader.live_name is None:
            call = reader.read()
            if call is None:
                self._held += reader.text
                self._fail()
                return True
            self._tell(call.name, call.arguments)
            self.num_calls += 1
        self._held = ""
        self._state = _State.AFTER
        return True

    def _tell(self, name: str | None, arguments: str) -> None:
        if name is not None or arguments:
            self._pieces.append(CallPiece(self.num_calls, name, arguments))

    def _after(self) -> bool:
        self._rest = self._rest.lstrip()
        form = self._form
        if not self._rest or (form.close.startswith(self._rest) and self._rest != form.close):
            return False
        if form.separator and self._rest.startswith(form.separator):
            self._hold(len(form.separator))
            self._state = _State.OPEN
            return True
        self._state = _State.TEXT
        if form.close and self._rest.startswith(form.close):
            self._rest = self._rest[len(form.close) :]
            self._is_behind_call = True
        return True


def _without_space(text: str, end: int) -> int:
    """Where the white space before `end` begins, as far as it is held back."""
    return max(len(text[:end].rstrip()), end - MAX_SPACE)


def _overlap(text: str, marker: str) -> int:
    """How much of the text's end may be the marker's beginning."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
