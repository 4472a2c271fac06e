"""Calls of tools in the response of one choice, as OpenAI's clients read them."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from router.openai.tools import Calling
from router.tools.call_parser import CallParser, CallPiece, Piece

ID_LETTERS = string.ascii_letters + string.digits
ID_CHARS = 24


@dataclass(slots=True)
class Calls:
    """What was read of them and not told."""

    calling: Calling
    _parser: CallParser = field(init=False)
    _pieces: list[CallPiece] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._parser = self.calling.new_parser()

    def push(self, text: str) -> str:
        """Takes the next text of the output; returns what of it is content."""
        return self._sorted(self._parser.push(text))

    def finish(self) -> str:
        """The output has ended; returns content that was held back."""
        return self._sorted(self._parser.finish())

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._pieces)

    @property
    def are_whole(self) -> bool:
        """Whether there are calls, and none that was cut."""
        return self._parser.num_calls > 0 and not self._parser.is_in_call

    def take_pieces(self) -> list[dict[str, Any]]:
        """For a chunk of a stream: pieces with the index of their call."""
        pieces, self._pieces = self._pieces, []
        return [{"index": piece.index, **self._told(piece)} for piece in pieces]

    def take_whole(self) -> list[dict[str, Any]]:
        """All calls, joined."""
        arguments: dict[int, list[str]] = {}
        for piece in self._pieces:
            arguments.setdefault(piece.index, []).append(piece.arguments)
        named = [piece for piece in self._pieces if piece.name is not None]
        self._pieces = []
        return [self._told(CallPiece(piece.index, piece.name, "".join(arguments[piece.index]))) for piece in named]

    def _told(self, piece: CallPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": _new_id(self.calling.form.id_chars), "type": "function", "function": function}

    def _sorted(self, pieces: list[Piece]) -> str:
        self._pieces.extend(piece for piece in pieces if isinstance(piece, CallPiece))
        return "".join(piece for piece in pieces if isinstance(piece, str))


def _new_id(num_chars: int) -> str:
    """Random; as long as the model's template takes, where it is particular."""
    letters = "".join(secrets.choice(ID_LETTERS) for _ in range(num_chars or ID_CHARS))
    return letters if num_chars else f"call_{letters}"
