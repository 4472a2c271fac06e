"""What the benchmarks with options of their own share: progress on standard error, tables, JSON, plots."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.environment import describe
from bench.paging.tables import Table


class Reporter:
    """Progress on standard error, with the time since the start."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start_s:5.0f} s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of repeated measurements, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} – {self.high:.{digits}f})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 … 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def at_least_one(text: str) -> int:
    """Type of an option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, without tables")


def write(json_file: str | None, name: str, tables: Sequence[Table], figures: Mapping[str, object]) -> None:
    """Tables on standard output and figures to `json_file`; with "-" the figures on standard output."""
    text = json.dumps({"environment": describe(), name: figures}, indent=2, ensure_ascii=False)
    if json_file == "-":
        print(text)
        return
    print("\n".join(table.text() for table in tables), end="")
    if json_file is not None:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
