"""The run as pictures: rates beside each other, a step's time, block sizes. SVG files."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cpu.attention import BLOCK_SIZES
from bench.cpu.cases import Case
from bench.cpu.tables import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_plots(run: Measured, folder: Path) -> list[Path]:
    """Writes them and returns the files."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "kvferry"  # the same file for the same figures
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Axes], None]] = {
        "engine_decode": lambda axes: _rates(axes, run, run.results.decode, "decode"),
        "engine_prefill": lambda axes: _rates(axes, run, run.results.prefill, "prefill"),
        "engine_step": lambda axes: _step(axes, run),
        "engine_blocks": lambda axes: _blocks(axes, run),
    }
    written = []
    for name, draw in pictures.items():
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        draw(figure.subplots())
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written


def _rates(axes: Axes, run: Measured, rates: dict[tuple[str, Case], list[float]], what: str) -> None:
    width = 0.8 / len(run.systems)
    for number, system in enumerate(run.systems):
        medians = [statistics.median(rates.get((system.name, case)) or [0.0]) for case in run.cases]
        axes.bar(
            [place + (number + 0.5) * width - 0.4 for place in range(len(medians))], medians, width, label=system.name
        )
    labels = [
        f"n = {case.num_sequences}\n{case.context if what == 'decode' else case.num_prompt_tokens:,} tokens"
        for case in run.cases
    ]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("tokens/s")
    axes.set_title(f"{what}, {run.threads} cores, median of the rounds")
    axes.legend(fontsize=8)


def _step(axes: Axes, run: Measured) -> None:
    labels = [f"n = {one.num_sequences}" for one in run.profiles]
    bottom = [0.0] * len(labels)
    for part in run.profiles[0].parts:
        heights = [max(0.0, one.parts[part]) for one in run.profiles]
        axes.bar(labels, heights, bottom=bottom, label=part)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_ylabel("ms")
    axes.set_title("a decode step in bfloat16, context 192")
    axes.legend(fontsize=8)


def _blocks(axes: Axes, run: Measured) -> None:
    for one in run.attention:
        axes.plot(
            [str(size) for size in BLOCK_SIZES], [one.ratios[size] for size in BLOCK_SIZES], "o-", label=one.case.name
        )
    axes.axhline(1.0, color="grey", linestyle=":", label="contiguous")
    axes.axhspan(1.20, 1.26, color="#cbd5e0", alpha=0.5, label="paper, 20 – 26 %")
    axes.set_xlabel("block size")
    axes.set_ylabel("time ÷ contiguous")
    axes.set_title("attention over blocks")
    axes.legend(fontsize=8)
