"""What a simulated run yields, and the meter that averages over its virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slots:
    """Token slots of KV memory at one moment.

    Attributes:
        used: hold the KV of a token.
        reserved: belong to a sequence and will hold a token before it ends; only a contiguous system has these.
        internal: belong to a sequence and never will (an over-long reservation, the tail of the last block).
        allocated: all that sequences own, whatever it is rounded up to; a shared block counts once.
        unshared: what they would own if nothing was shared.
    """

    used: int
    reserved: int
    internal: int
    allocated: int
    unshared: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of one simulated run. Shares are averages over the saturated time, weighted by duration.

    Attributes:
        used_of_allocated: slots holding tokens ÷ slots sequences own.
        used_of_pool: slots holding tokens ÷ all slots; `reserved`, `internal` likewise, `external` the rest.
        saved_by_sharing: 1 − slots sequences own ÷ slots they would own if nothing was shared.
        num_held: sequences that hold memory; every choice and beam is one.
        request_rate_per_s: finished requests ÷ time, while saturated.
        overall_rate_per_s: all requests ÷ the time of the last end.
        normalised_latency_s: mean over requests of (last token − arrival) ÷ output tokens.
        late_latency_s: the same over the half of the requests that arrived last, when the system was full.
        num_preemptions: over the whole run.
    """

    used_of_allocated: float
    used_of_pool: float
    reserved_of_pool: float
    internal_of_pool: float
    external_of_pool: float
    saved_by_sharing: float
    num_held: float
    request_rate_per_s: float
    overall_rate_per_s: float
    normalised_latency_s: float
    late_latency_s: float
    num_preemptions: int = 0


@dataclass(slots=True)
class Meter:
    """Averages over the time in which requests wait, after `num_warm_up` have finished; or over the whole run."""

    num_slots: int
    num_warm_up: int = 0
    is_whole_run: bool = False
    _latencies: list[tuple[float, float]] = field(default_factory=list)  # (arrival, normalised latency)
    _last_s: float = 0.0
    _span_s: float = 0.0
    _num_finished: int = 0
    _used: float = 0.0
    _reserved: float = 0.0
    _internal: float = 0.0
    _allocated: float = 0.0
    _unshared: float = 0.0
    _held: float = 0.0

    def finish(self, arrival_s: float, now_s: float, num_output_tokens: int) -> None:
        self._latencies.append((arrival_s, (now_s - arrival_s) / num_output_tokens))
        self._last_s = now_s

    def step(self, duration_s: float, slots: Slots, num_held: int, num_finished: int, *, is_saturated: bool) -> None:
        """Accounts for one step: what was held during it, and whether anything waited meanwhile."""
        if not self.is_whole_run and (not is_saturated or len(self._latencies) < self.num_warm_up):
            return
        self._span_s += duration_s
        self._num_finished += num_finished
        self._used += duration_s * slots.used
        self._reserved += duration_s * slots.reserved
        self._internal += duration_s * slots.internal
        self._allocated += duration_s * slots.allocated
        self._unshared += duration_s * slots.unshared
        self._held += duration_s * num_held

    def figures(self, num_preemptions: int = 0) -> RunFigures:
        """Zero shares where the run was never saturated."""
        latencies_s = [latency_s for _, latency_s in sorted(self._latencies)]
        span, whole = self._span_s or 1.0, (self._span_s or 1.0) * self.num_slots
        return RunFigures(
            used_of_allocated=self._used / (self._allocated or 1.0),
            used_of_pool=self._used / whole,
            reserved_of_pool=self._reserved / whole,
            internal_of_pool=self._internal / whole,
            external_of_pool=1.0 - (self._used + self._reserved + self._internal) / whole,
            saved_by_sharing=1.0 - self._allocated / self._unshared if self._unshared else 0.0,
            num_held=self._held / span,
            request_rate_per_s=self._num_finished / span,
            overall_rate_per_s=len(self._latencies) / self._last_s,
            normalised_latency_s=mean(latencies_s),
            late_latency_s=mean(latencies_s[len(latencies_s) // 2 :]),
            num_preemptions=num_preemptions,
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
