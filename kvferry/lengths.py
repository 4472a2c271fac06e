"""Lengths of real requests, read from a file: what capacity planning and the paper's benchmark are fed with.

One request a line, `prompt_len,output_len` in tokens; a first line of names is allowed, empty lines are skipped.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import InvalidArgument, NotFound

MAX_TOKENS = 1 << 24
"""Longest prompt or output that is believed; beyond any model's context, and a sign of a wrong column."""


@dataclass(frozen=True, slots=True)
class RequestLength:
    """Tokens of one request; both at least 1."""

    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def read_lengths(path: Path) -> list[RequestLength]:
    """The requests of `path`, in order.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: a line is not two whole numbers of at least 1 (it is named), or there is no request at all.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file", field="lengths") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument("lengths", f"{path} cannot be read as CSV ({error})") from error
    lines = [(number, cells) for number, cells in lines if any(cells)]
    if lines and _is_header(lines[0][1]):
        del lines[0]
    if not lines:
        raise InvalidArgument("lengths", f"{path} holds no request; each line is prompt_len,output_len")
    return [_request(path, number, cells) for number, cells in lines]


def _is_header(cells: list[str]) -> bool:
    """Names, not numbers: no cell holds a digit."""
    return not any(character.isdigit() for cell in cells for character in cell)


def _request(path: Path, number: int, cells: list[str]) -> RequestLength:
    place = f"{path} line {number}"
    if len(cells) != 2:
        raise InvalidArgument("lengths", f"{place}: {len(cells)} cells; a line is prompt_len,output_len")
    return RequestLength(_tokens(place, "prompt_len", cells[0]), _tokens(place, "output_len", cells[1]))


def _tokens(place: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MAX_TOKENS:
        raise InvalidArgument(
            "lengths", f"{place}: {name} must be a whole number from 1 to {MAX_TOKENS}, got {text[:40]!r}"
        )
    return int(text)
