"""The tables as pictures: PNG files, the paper's figures beside ours where there are any."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.paging.study import Curve
from bench.paging.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plots(tables: Sequence[Table], curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Writes one file for each table that has a picture; returns them."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw, width in _pictures(tables, curves):
        figure = Figure(figsize=(width, 4.2), layout="constrained")
        draw(figure.subplots())
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _pictures(tables: Sequence[Table], curves: Sequence[Curve]) -> list[tuple[str, Callable[[Axes], None], float]]:
    by_name = {table.name: table for table in tables}
    pictures: list[tuple[str, Callable[[Axes], None], float]] = []
    if "utilisation" in by_name:
        pictures.append(("utilisation", lambda axes: _utilisation(axes, by_name["utilisation"]), 9))
    if "held" in by_name:
        pictures.append(("held", lambda axes: _bars(axes, by_name["held"], "held", "held (paper)"), 9))
    if "sharing" in by_name:
        pictures.append(("sharing", lambda axes: _sharing(axes, by_name["sharing"]), 8))
    if "block_size" in by_name:
        pictures.append(("block_size", lambda axes: _block_size(axes, by_name["block_size"]), 7))
    if "swap" in by_name:
        pictures.append(("swap", lambda axes: _swap(axes, by_name["swap"]), 7))
    for key in dict.fromkeys((curve.workload, curve.step_model) for curve in curves):
        chosen = [curve for curve in curves if (curve.workload, curve.step_model) == key]
        name = re.sub(r"[^a-z0-9]+", "_", f"latency {key[0]} {key[1]}".lower())
        pictures.append((name, lambda axes, chosen=chosen: _latency(axes, chosen), 8))  # type: ignore[misc]
    return pictures


def _utilisation(axes: Axes, table: Table) -> None:
    records = table.records()
    labels = [f"{row['workload']}\n{row['system']}" for row in records]
    bottom = [0.0] * len(records)
    for part, colour in {
        "of pool": "#2b6cb0",
        "reserved": "#90cdf4",
        "inside": "#f6ad55",
        "outside": "#cbd5e0",
    }.items():
        heights = [_number(row, part) for row in records]
        axes.bar(labels, heights, bottom=bottom, color=colour, label="tokens" if part == "of pool" else part)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    paper = [(index, _number(row, "of pool (paper)")) for index, row in enumerate(records) if row["of pool (paper)"]]
    axes.plot(*zip(*paper, strict=True), "kD", label="tokens (paper)") if paper else None
    _finish(axes, table, "% of the pool")


def _bars(axes: Axes, table: Table, ours: str, paper: str) -> None:
    records = table.records()
    labels = [f"{row['workload']}\n{row['system']}" for row in records]
    axes.bar([index - 0.2 for index in range(len(records))], [_number(row, ours) for row in records], 0.4, label="here")
    axes.bar(
        [index + 0.2 for index in range(len(records))], [_number(row, paper) for row in records], 0.4, label="paper"
    )
    axes.set_xticks(range(len(records)), labels)
    _finish(axes, table, "sequences")


def _sharing(axes: Axes, table: Table) -> None:
    records = table.records()
    labels = [f"{row['workload']}\n{row['outputs']}" for row in records]
    places = range(len(records))
    for offset, kind in ((-0.2, "parallel"), (0.2, "beam")):
        axes.bar([place + offset for place in places], [_number(row, kind) for row in records], 0.4, label=kind)
    axes.set_xticks(places, labels)
    _finish(axes, table, "% of the blocks saved")


def _block_size(axes: Axes, table: Table) -> None:
    records = table.records()
    for workload in dict.fromkeys(row["workload"] for row in records):
        chosen = [row for row in records if row["workload"] == workload]
        for column in table.columns[-2:]:
            rates = [_number(row, column) for row in chosen]
            shares = [rate / (max(rates) or 1.0) for rate in rates]
            axes.plot([str(row["block size"]) for row in chosen], shares, "o-", label=f"{workload}, {column}")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("block size")
    _finish(axes, table, "requests/s, as a share of the best")


def _swap(axes: Axes, table: Table) -> None:
    records = table.records()
    sizes = [str(row["block size"]) for row in records]
    for column in ("swap ms", "recompute ms"):
        axes.plot(sizes, [_number(row, column) for row in records], "o-", label=column.removesuffix(" ms"))
    axes.set_yscale("log")
    axes.set_xlabel("block size")
    _finish(axes, table, "ms for one sequence")


def _latency(axes: Axes, curves: Sequence[Curve]) -> None:
    for curve in curves:
        axes.plot(*zip(*curve.points, strict=True), "o-", markersize=3, label=curve.system)
    first = curves[0]
    axes.axhline(first.bound_s, color="grey", linestyle=":", label="bound")
    axes.set_ylim(0, 3 * first.bound_s)
    axes.set_xlabel("requests/s")
    axes.set_ylabel("normalised latency, s/token")
    axes.set_title(f"{first.workload}, {first.step_model}")
    axes.legend(fontsize=8)


def _finish(axes: Axes, table: Table, unit: str) -> None:
    axes.set_title(table.title)
    axes.set_ylabel(unit)
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=8)


def _number(row: Mapping[str, object], column: str) -> float:
    value = row[column]
    return float(value) if isinstance(value, int | float) else 0.0
