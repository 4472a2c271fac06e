"""Many seeds in a row, on one core or several."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tests.simulation.cluster import Parts, RunResult, run_seed

CHUNK = 50
"""Seeds of one piece of work."""


@dataclass(slots=True)
class SweepResult:
    """What some runs were like, and those that broke an invariant."""

    num_seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[RunResult] = field(default_factory=list)

    def add(self, other: SweepResult) -> None:
        self.num_seeds += other.num_seeds
        self.counts += other.counts
        self.failures += other.failures


def run_seeds(start: int, count: int, parts: Parts | None = None) -> SweepResult:
    """Runs `count` seeds from `start` on."""
    result = SweepResult()
    was_enabled = gc.isenabled()
    gc.disable()  # a run leaves one bundle of cycles; looking for it all the time costs an eighth
    try:
        for seed in range(start, start + count):
            run = run_seed(seed, parts)
            result.num_seeds += 1
            result.counts += run.counts
            if run.violation is not None:
                result.failures.append(run)
            if seed % CHUNK == 0:
                gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return result


def first_failure(limit: int, parts: Parts) -> RunResult | None:
    """The first seed below `limit` that breaks an invariant."""
    return next((run for run in (run_seed(seed, parts) for seed in range(limit)) if run.violation is not None), None)


def run_in_processes(start: int, count: int, jobs: int) -> Iterator[SweepResult]:
    """Runs `count` seeds from `start` on in `jobs` processes; gives the result of each chunk as it is there."""
    chunks = [(first, min(CHUNK, start + count - first)) for first in range(start, start + count, CHUNK)]
    if jobs <= 1:
        yield from (run_seeds(first, size) for first, size in chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_seeds, first, size) for first, size in chunks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
