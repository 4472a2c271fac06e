"""A table of the report: rows of figures beside the paper's, definitions above, explanations below."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

TEXT_WIDTH = 120

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        name: short, for plots and JSON.
        definition: what the columns mean.
        columns: headings; those that end in "(paper)" hold the paper's figures.
        rows: as many cells as columns; None is printed as a dash.
        notes: why figures differ from the paper's, and what to beware of.
    """

    name: str
    title: str
    definition: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def records(self) -> list[dict[str, Cell]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def text(self) -> str:
        """As Markdown, aligned."""
        body = [[_text(cell) for cell in row] for row in self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(self.columns, *body, strict=True)]
        lines = [_line(list(self.columns), widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
        lines += [_line(row, widths) for row in body]
        head = [f"## {self.title}", "", textwrap.fill(self.definition, TEXT_WIDTH), ""]
        notes = [textwrap.fill(note, TEXT_WIDTH, initial_indent="- ", subsequent_indent="  ") for note in self.notes]
        return "\n".join([*head, *lines, "", *notes, *([""] if notes else [])]) + "\n"


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _line(cells: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def percent(share: float) -> float:
    return round(100 * share, 1)
