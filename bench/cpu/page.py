"""A part of docs/benchmarks.md that a command writes: what stands between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.paging.tables import Table


def check_part(page: Path, name: str) -> None:
    """Raises ValueError where the page lacks the marks of `name`: before an hour's work, not after it."""
    _around(page, name)


def write_part(page: Path, name: str, text: str) -> None:
    """Puts `text` between the marks of `name`; raises as `check_part`."""
    before, after = _around(page, name)
    page.write_text(f"{before}{text}{after}", encoding="utf-8")


def _around(page: Path, name: str) -> tuple[str, str]:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{page}: there is no {begin.strip()} … {end.strip()}")
    return before + begin, end + after


def below(tables: Iterable[Table]) -> str:
    """Their text, with headings a level lower than their own."""
    return "\n".join("#" + table.text() for table in tables)
