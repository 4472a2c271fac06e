"""The tables of the PagedAttention paper (Kwon et al., SOSP 2023), simulated with our block manager and scheduler.

    lengths by a seeded shape, or from a file ──► our engine in virtual time, and the systems before paging ──► tables

Step times come from a model fitted to measured steps, so that no run takes longer than its Python. The paper's figure
stands beside each of ours, and below each table why they differ.

python -m bench paper --quick                      # two minutes
python -m bench paper --json paper.json --out plots  # ten
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.environment import describe
from bench.paging import beams, step_model
from bench.paging.measure import copy_rate, measure_steps
from bench.paging.study import BLOCK_SIZES, POOL_SLOTS, TABLES, Lengths, Study, paper_workloads, tables
from bench.paging.tables import Table
from bench.paging.workload import resized
from bench.report import Reporter
from kvferry.errors import InvalidArgument, KvferryError
from kvferry.lengths import read_lengths

NUM_TOKENS, NUM_QUICK_TOKENS = 500_000, 100_000
"""Of all requests of a run at saturation: a thousand of ShareGPT's length, six thousand of Alpaca's."""
NUM_PACED_TOKENS, NUM_QUICK_PACED_TOKENS = 1_000_000, 200_000
"""Of a run at a request rate."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    report = Reporter()
    try:
        if options.record_beams:
            beams.store(beams.record(report))
            report(f"stored {beams.STORED.name}")
            return 0
        study = _study(options, report)
        made = tables(study, options.tables)
        _write(options, study, made, report)
    except KvferryError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench paper",
        description="Simulate the PagedAttention paper's experiments with our block manager and scheduler.",
        epilog="example: python -m bench paper --quick --json paper.json --out plots",
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests and block sizes; two minutes, not ten")
    parser.add_argument("--tables", type=_names, default=TABLES, metavar="A,B", help=f"of {', '.join(TABLES)}")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="CSV of prompt_len,output_len instead of the shapes"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals; default 0")
    parser.add_argument("--fit", action="store_true", help="measure step times now; nothing else should run")
    parser.add_argument("--store", action="store_true", help="with --fit: keep them as the default")
    parser.add_argument(
        "--record-beams", action="store_true", help="record real beam searches anew (minutes), no tables"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, without tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plots there, as PNG")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no table {unknown[0]!r}; known: {', '.join(TABLES)}")
    return names


def _study(options: argparse.Namespace, report: Reporter) -> Study:
    num_tokens = NUM_QUICK_TOKENS if options.quick else NUM_TOKENS
    num_paced_tokens = NUM_QUICK_PACED_TOKENS if options.quick else NUM_PACED_TOKENS
    workloads = _workloads(options.lengths, num_tokens, options.seed)
    if options.fit:
        model = measure_steps(report)
        if options.store:
            step_model.store(model)
    else:
        model = step_model.load()
    sizes = BLOCK_SIZES if "swap" in options.tables else ()
    report(f"measuring copies of blocks of {len(sizes)} sizes")
    return Study(
        model=model,
        copy_rates={size: copy_rate(size) for size in sizes},
        beams=beams.load(),
        workloads=workloads,
        paced=_workloads(options.lengths, num_paced_tokens, options.seed),
        num_tokens=num_tokens,
        num_paced_tokens=num_paced_tokens,
        seed=options.seed,
        is_quick=options.quick,
        report=report,
    )


def _workloads(path: Path | None, num_tokens: int, seed: int) -> dict[str, Lengths]:
    if path is None:
        return paper_workloads(num_tokens, seed)
    lengths = read_lengths(path)
    longest = max(length.num_tokens for length in lengths)
    if longest > POOL_SLOTS // 2:
        raise InvalidArgument(
            "lengths", f"{path}: a request of {longest} tokens; at most {POOL_SLOTS // 2} are simulated"
        )
    return {path.stem: resized(lengths, num_tokens, seed)}


def _write(options: argparse.Namespace, study: Study, made: list[Table], report: Reporter) -> None:
    figures = {
        "environment": describe(),
        "step_model": dataclasses.asdict(study.model),
        "beams": study.beams.source,
        "seed": options.seed,
        "num_requests": {name: len(lengths) for name, lengths in study.workloads.items()},
        "tables": [{**dataclasses.asdict(table), "rows": table.records()} for table in made],
        "curves": [dataclasses.asdict(curve) for curve in study.curves],
    }
    if options.json != "-":
        print("".join(table.text() for table in made), end="")
    else:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.out is not None:
        _plot(options.out, study, made, report)


def _plot(folder: Path, study: Study, made: list[Table], report: Reporter) -> None:
    try:
        from bench.paging.plots import write_plots

        written = write_plots(made, study.curves, folder)
    except ImportError:
        raise InvalidArgument("--out", "plots need matplotlib; install kvferry[bench]") from None
    report(f"wrote {', '.join(path.name for path in written)} to {folder}")


if __name__ == "__main__":
    sys.exit(main())
