"""`python -m tests.simulation --seeds 10000 --jobs 2`: many seeds, with progress; failing ones come with a trace."""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.simulation.cluster import RunResult
from tests.simulation.sweep import SweepResult, run_in_processes

MAX_PRINTED_FAILURES = 3
"""More are listed by seed only."""


def main() -> int:
    """Exit status 1 when a seed broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds (default 10000)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    arguments = parser.parse_args()
    console = Console()
    began_s = time.monotonic()
    total = _sweep(console, arguments.start, arguments.seeds, arguments.jobs)
    _summarise(console, total, time.monotonic() - began_s, arguments.jobs)
    for run in total.failures[:MAX_PRINTED_FAILURES]:
        _print_failure(console, run)
    return 1 if total.failures else 0


def _sweep(console: Console, start: int, count: int, jobs: int) -> SweepResult:
    total = SweepResult()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("seeds, {task.fields[failures]} failed"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=count, failures=0)
        for result in run_in_processes(start, count, jobs):
            total.add(result)
            progress.update(task, advance=result.num_seeds, failures=len(total.failures))
    total.failures.sort(key=lambda run: run.seed)
    return total


def _summarise(console: Console, total: SweepResult, took_s: float, jobs: int) -> None:
    table = Table(title=f"{total.num_seeds} seeds, {len(total.failures)} failed", show_header=False)
    for name, count in sorted(total.counts.items()):
        table.add_row(name, f"{count:,}")
    console.print(table)
    rate = total.num_seeds / took_s
    console.print(f"{took_s:.1f} s, {rate:.0f} seeds/s, {rate / max(1, jobs):.0f} a process")
    if len(total.failures) > MAX_PRINTED_FAILURES:
        console.print("failed seeds:", " ".join(str(run.seed) for run in total.failures), highlight=False)


def _print_failure(console: Console, run: RunResult) -> None:
    console.rule(f"seed {run.seed}")
    for line in run.trace:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{run.violation}", style="bold red", markup=False, soft_wrap=True)
    console.print(f"replay: python -m tests.simulation --start {run.seed} --seeds 1", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
