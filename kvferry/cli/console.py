"""What the commands write: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

PIPE_COLUMNS = 160
"""Width of tables where no terminal sets one."""


def write(text: str) -> None:
    """Text as it is, at once, for a stream of tokens or a pipe."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: object) -> None:
    """One line of JSON."""
    write(json.dumps(value, ensure_ascii=False) + "\n")


def write_table(columns: dict[str, list[str]], title: str | None = None) -> None:
    """A table; keys are headings, values the cells below them."""
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    Console(markup=False, highlight=False, width=width).print(table)


def note(text: str) -> None:
    """One line about what is going on."""
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(text)


def note_dim(text: str) -> None:
    """The same, for what is only of interest beside what was asked for."""
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(text, style="dim")


def write_error(message: str) -> None:
    """The one line that tells why a command failed."""
    note(f"error: {message}")


class Progress:
    """What a long command is doing: notes for people, events where standard error is read by a program."""

    def __init__(self, *, for_people: bool) -> None:
        self._for_people = for_people

    def __call__(self, text: str, event: str, **fields: object) -> None:
        self._say(logging.INFO, text, event, fields)

    def warn(self, text: str, event: str, **fields: object) -> None:
        """What nobody should overlook."""
        self._say(logging.WARNING, f"warning: {text}", event, fields)

    def _say(self, level: int, text: str, event: str, fields: Mapping[str, object]) -> None:
        if self._for_people:
            note(text)
        else:
            log_event(logger, event, level=level, **fields)
