"""Lengths of real requests, read from a file: what capacity planning and the paper's benchmark are fed with.

One request a line, `prompt_len,output_len` in tokens; a first line of names is allowed, empty lines are skipped.
Whatever a line holds is refused by its number, not believed: limits are stated here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry.errors import InvalidArgument, NotFound

MAX_TOKENS = 1 << 20
"""Longest prompt or output where no context is known; beyond it, the column is likely a wrong one."""
MAX_REQUESTS = 500_000
"""All of them are held in memory, and read within a second or two."""


@dataclass(frozen=True, slots=True)
class RequestLength:
    """Tokens of one request; both at least 1."""

    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class _CsvReader(Protocol):
    """What `csv.reader` returns, as far as it is used here."""

    @property
    def line_num(self) -> int: ...

    def __iter__(self) -> Iterator[list[str]]: ...


def read_lengths(path: Path, max_context: int | None = None) -> list[RequestLength]:
    """The requests of `path`, in order.

    Args:
        max_context: most tokens of prompt and output together; None: not known, only `MAX_TOKENS` bounds each.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: a line is not two whole numbers within the limits (it is named), there are more than
            `MAX_REQUESTS`, or there is no request at all.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            requests = list(_requests(path, csv.reader(file), max_context))
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file", field="lengths") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument("lengths", f"{path} cannot be read as CSV ({error})") from error
    if not requests:
        raise InvalidArgument("lengths", f"{path} holds no request; each line is prompt_len,output_len")
    return requests


def _requests(path: Path, lines: _CsvReader, max_context: int | None) -> Iterator[RequestLength]:
    """The lines that hold something, from the second on if the first is a header."""
    filled = ([cell.strip() for cell in cells] for cells in lines if "".join(cells).strip())
    num_requests = 0
    for index, cells in enumerate(filled):
        if index == 0 and _is_header(cells):
            continue
        num_requests += 1
        if num_requests > MAX_REQUESTS:
            raise InvalidArgument(
                "lengths", f"{path} line {lines.line_num}: at most {MAX_REQUESTS} requests are read; a part will do"
            )
        yield _request(f"{path} line {lines.line_num}", cells, max_context)


def _is_header(cells: list[str]) -> bool:
    """Names, not numbers: no cell holds a digit."""
    return not any(character.isdigit() for cell in cells for character in cell)


def _request(place: str, cells: list[str], max_context: int | None) -> RequestLength:
    if len(cells) != 2:
        raise InvalidArgument("lengths", f"{place}: {len(cells)} cells; a line is prompt_len,output_len")
    limit = MAX_TOKENS if max_context is None else max_context
    length = RequestLength(_tokens(place, "prompt_len", cells[0], limit), _tokens(place, "output_len", cells[1], limit))
    if max_context is not None and length.num_tokens > max_context:
        raise InvalidArgument(
            "lengths",
            f"{place}: prompt_len + output_len are {length.num_tokens} tokens; the model's context is {max_context}",
        )
    return length


def _tokens(place: str, name: str, text: str, limit: int) -> int:
    """`text` as a number; digits are counted before they are read, for Python reads no number of thousands of them."""
    digits = text.lstrip("0")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(limit))
    if not is_number or int(digits) > limit:
        raise InvalidArgument("lengths", f"{place}: {name} must be a whole number from 1 to {limit}, got {text[:40]!r}")
    return int(digits)
