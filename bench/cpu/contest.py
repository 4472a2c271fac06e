"""Rounds in which every engine has its turn with the same question, so that a machine's moods meet all of them.

    open ─► for each case: [start … end] in rounds (prefill), then [decode] in rounds over the last batch ─► Results

The first round of each kind is not kept: caches fill and compilers run in it. An engine that fails, or takes too long,
is left out from there on and named.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.cpu.cases import SPARE_STEPS, Case
from bench.cpu.child import Child, ChildFailed
from bench.cpu.systems import Machine, System
from kvferry.model_store import Report

REST_S = 0.05
"""Before each turn: the others' threads have stopped spinning."""
SLOWEST_TOKENS_PER_S = 100.0
TIMEOUT_S = 90.0
"""Of one answer, and what is prefilled at the slowest rate; a peer compiles in its first steps."""


@dataclass(slots=True)
class Results:
    """Tokens a second, by system and case, one a round."""

    prefill: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    decode: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class Contest:
    """One run; `deadline_s` (of `time.monotonic`) ends it: what is not measured by then is left out."""

    def __init__(self, systems: Sequence[System], rounds: int, deadline_s: float, report: Report) -> None:
        self.results = Results()
        self._systems, self._rounds, self._report = systems, rounds, report
        self._deadline_s = deadline_s
        self._children: list[tuple[System, Child]] = []

    def run(self, cases: Sequence[Case], on: Machine) -> Results:
        """One engine after the other starts, and stays."""
        with ExitStack() as stack:
            for system in self._systems:
                begin_s = time.monotonic()
                child = system.open(on)
                stack.callback(child.close)
                self._children.append((system, child))
                self._turn(system, child, child.wait_ready)
                self._report(f"{system.name}: ready after {time.monotonic() - begin_s:.0f} s")
            for case in cases:
                if time.monotonic() + self._expected_s(case) > self._deadline_s:
                    self._report(f"{case.num_sequences} × {case.num_prompt_tokens}: left out, time is up")
                    continue
                self._prefill(case)
                self._decode(case)
        return self.results

    def _prefill(self, case: Case) -> None:
        timeout_s = TIMEOUT_S + case.num_tokens / SLOWEST_TOKENS_PER_S
        last = self._rounds if case.refills else 0
        for number in range(last + 1):

            def fill(child: Child, number: int = number) -> float:
                room = 1 if number < last else 1 + (self._rounds + 1) * case.num_steps + SPARE_STEPS
                seconds = child.start(case.prompts(number), room, timeout_s)
                if number < last:
                    child.end_batch(timeout_s)
                return case.num_tokens / seconds

            self._round(case, fill, self.results.prefill, keeps=number > 0 or not case.refills)
        self._report(f"{case.num_sequences} × {case.num_prompt_tokens}: prefilled")

    def _decode(self, case: Case) -> None:
        for number in range(self._rounds + 1):
            if number > 1 and self._is_late():
                self._report(f"time is up after {number - 1} rounds")
                break
            self._round(
                case, lambda child: child.decode(case.num_steps, TIMEOUT_S), self.results.decode, keeps=number > 0
            )
        for system, child in self._taking(case):
            self._turn(system, child, lambda child=child: child.end_batch(TIMEOUT_S))  # type: ignore[misc]
        self._report(f"{case.num_sequences} × {case.num_prompt_tokens}: decoded")

    def _round(
        self, case: Case, ask: Callable[[Child], float], into: dict[tuple[str, Case], list[float]], *, keeps: bool
    ) -> None:
        for system, child in self._taking(case):
            time.sleep(REST_S)
            rate = self._turn(system, child, lambda child=child: ask(child))  # type: ignore[misc]
            if rate is not None and keeps:
                into.setdefault((system.name, case), []).append(rate)

    def _taking(self, case: Case) -> list[tuple[System, Child]]:
        return [(system, child) for system, child in self._children if system.takes(case)]

    def _turn(self, system: System, child: Child, ask: Callable[[], float | None]) -> float | None:
        try:
            return ask()
        except ChildFailed as error:
            self._report(f"left out: {error}")
            self.results.failures[system.name] = str(error)
            self._children.remove((system, child))
            child.close()
            return None

    def _expected_s(self, case: Case) -> float:
        """Time of its prefill at the rates of the case before; 0 for the first."""
        num_tokens = case.num_tokens * (self._rounds + 1 if case.refills else 1)
        latest = {name: statistics.median(rates) for (name, _), rates in self.results.prefill.items()}
        return sum(num_tokens / latest[system.name] for system, _ in self._taking(case) if system.name in latest)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline_s
