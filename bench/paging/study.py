"""The simulated experiments behind the tables of `bench/paper.py`; each method makes one table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.paging.beams import WIDTHS, BeamRecordings
from bench.paging.contiguous import ContiguousSystem, Reservation, run_static_batches
from bench.paging.figures import RunFigures
from bench.paging.measure import CopyRate
from bench.paging.ours import PagedSystem
from bench.paging.step_model import PAPER_HARDWARE, StepModel
from bench.paging.tables import Cell, Table, percent
from bench.paging.workload import (
    ALPACA,
    MAX_TOTAL_TOKENS,
    SHAREGPT,
    TRANSLATION,
    Arrival,
    all_at_once,
    poisson,
    with_beams,
)
from kvferry.lengths import RequestLength

POOL_SLOTS = 12 * 2**30 // 819_200
"""KV memory of the paper's OPT-13B on one A100-40GB, in tokens: 12 GB at 800 KB each."""
MAX_BATCHED_TOKENS = 512
MAX_RUNNING = 512
LATENCY_BOUND = 10
"""The mean normalised latency may be so many times a step of one sequence."""
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
QUICK_BLOCK_SIZES = (8, 16, 64, 256)
WATERMARKS = (0.01, 0.03, 0.06, 0.1)
SEARCHED, SEARCH_STEPS = (0.3, 1.6), 6
"""Rates that are searched, as multiples of what the system serves at saturation; the steps end within 3 %."""
RATE_OF_ALL_AT_ONCE = 1e9
PREFIXES = {80: 1.67, 341: 3.58}
SWAPPED_TOKENS = 512
OURS, STATIC = "kvferry", "static batch"
CONTIGUOUS = {reservation.value: reservation for reservation in reversed(Reservation)}

PAPER_USED = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, OURS: 96.3}
PAPER_HELD = {
    "ShareGPT": {"Orca (Max)": 7.0, "Orca (Oracle)": 13.62, OURS: 30.42},
    "Alpaca": {"Orca (Max)": 7.0, "Orca (Oracle)": 72.75, OURS: 132.44},
}
PAPER_RATIO = {"Orca (Oracle)": "1.7 – 2.7", "Orca (Max)": "2.7 – 8", STATIC: "up to 22"}
PAPER_SAVED = {
    "parallel": {"ShareGPT": "16.2 – 30.5", "Alpaca": "6.1 – 9.8"},
    "beam": {"ShareGPT": "44.3 – 66.3", "Alpaca": "37.6 – 55.2"},
}

Lengths = Sequence[RequestLength]
Run = Callable[[Sequence[Arrival], int], RunFigures]


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean normalised latency of one system at the request rates that were tried, in order of rate."""

    workload: str
    step_model: str
    system: str
    bound_s: float
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class Study:
    """Settings, and what earlier tables found out that later ones use.

    Attributes:
        workloads: requests of a run at saturation, by name: the paper's two, or the user's. Other runs take a part.
        paced: requests of the runs at a request rate, more of them: a queue takes time to build up.
        num_tokens, num_paced_tokens: about so many tokens have the requests of a workload.
        report: is told what is going on.
    """

    model: StepModel
    copy_rates: Mapping[int, CopyRate]
    beams: BeamRecordings
    workloads: Mapping[str, Lengths]
    paced: Mapping[str, Lengths]
    num_tokens: int
    num_paced_tokens: int
    seed: int
    is_quick: bool
    report: Callable[[str], None]
    curves: list[Curve] = field(default_factory=list)
    _saturated: dict[tuple[str, str, str], RunFigures] = field(default_factory=dict)
    _sustained: dict[tuple[str, str, str], float] = field(default_factory=dict)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return QUICK_BLOCK_SIZES if self.is_quick else BLOCK_SIZES

    @property
    def max_tokens(self) -> int:
        """What a maximal reservation has room for."""
        longest = (length.num_tokens for lengths in self.workloads.values() for length in lengths)
        return max(MAX_TOTAL_TOKENS, *longest)

    # -- systems --------------------------------------------------------------------------------------------------

    def ours(self, model: StepModel) -> PagedSystem:
        return PagedSystem(POOL_SLOTS, model, MAX_BATCHED_TOKENS, MAX_RUNNING)

    def system(self, name: str, model: StepModel) -> Run:
        """A system by its name in the tables, fresh for every run."""
        if name == OURS:
            return self.ours(model).run
        if name == STATIC:
            return lambda arrivals, _: run_static_batches(
                arrivals, POOL_SLOTS, self.max_tokens, model, MAX_BATCHED_TOKENS
            )
        return lambda arrivals, num_warm_up: ContiguousSystem(
            CONTIGUOUS[name], POOL_SLOTS, self.max_tokens, model, MAX_BATCHED_TOKENS, MAX_RUNNING
        ).run(arrivals, num_warm_up)

    def saturated(self, name: str, workload: str, model: StepModel) -> RunFigures:
        """The system with all requests waiting from the beginning; each is run once."""
        key = (name, workload, model.name)
        if key not in self._saturated:
            self.report(f"saturation: {name}, {workload}, {model.name}")
            self._saturated[key] = self._saturate(self.system(name, model), self.workloads[workload])
        return self._saturated[key]

    def _saturate(self, run: Run, lengths: Lengths) -> RunFigures:
        return run(all_at_once(lengths), len(lengths) // 10)

    # -- memory ---------------------------------------------------------------------------------------------------

    def utilisation(self) -> Table:
        rows = []
        for workload, name in itertools.product(self.workloads, [*CONTIGUOUS, OURS]):
            figures = self.saturated(name, workload, self.model)
            shares = [figures.reserved_of_pool, figures.internal_of_pool, figures.external_of_pool]
            rows.append(
                (
                    workload,
                    name,
                    percent(figures.used_of_allocated),
                    percent(figures.used_of_pool),
                    *map(percent, shares),
                    PAPER_USED[name] if workload == "ShareGPT" else None,
                )
            )
        return Table(
            "utilisation",
            "KV memory at saturation",
            f"Percent, averaged over virtual time while requests wait; pool of {POOL_SLOTS:,} token slots, blocks of "
            "16. *Of owned*: slots that hold the KV of a token ÷ slots that sequences own. *Of pool*: ÷ all slots; the "
            "rest of the pool is *reserved* for tokens to come, lost *inside* what sequences own (too long a "
            "reservation, the tail of the last block), or *outside* (rounding to powers of two, holes, watermark).",
            ("workload", "system", "of owned", "of pool", "reserved", "inside", "outside", "of pool (paper)"),
            tuple(rows),
            (
                "The paper's share is of the pool too. Ours is bounded by the watermark (1 % of the blocks) and by the "
                "tail: half a block a sequence, so a percent or two of sequences of 500 tokens, ten of Alpaca's 80.",
                "The contiguous systems land somewhat above the paper's on ShareGPT: the spread of the lengths is "
                "assumed (next table), and the wider it is, the more weigh long outputs, which fill what Max and Pow2 "
                "reserve best.",
            ),
        )

    def shape(self) -> Table:
        """How much the assumed spread of the output lengths matters."""
        rows = []
        for sigma in (0.6, 0.9, 1.2):
            num_requests = int(self.num_tokens / SHAREGPT.mean_tokens / 2)
            lengths = dataclasses.replace(SHAREGPT, output_sigma=sigma).sample(num_requests, self.seed)
            used = []
            for name in [*CONTIGUOUS, OURS]:
                self.report(f"spread {sigma}: {name}")
                used.append(percent(self._saturate(self.system(name, self.model), lengths).used_of_pool))
            rows.append((sigma, *used))
        return Table(
            "shape",
            "The assumed spread",
            "Percent of the pool that holds tokens, on ShareGPT's means with other sigmas of the output length (0.9 is "
            "used everywhere else).",
            ("sigma", *CONTIGUOUS, OURS),
            tuple(rows),
        )

    def held(self) -> Table:
        rows = []
        for workload in self.workloads:
            ours = self.saturated(OURS, workload, self.model).num_held
            for name in [*CONTIGUOUS, OURS]:
                held = self.saturated(name, workload, self.model).num_held
                paper = PAPER_HELD.get(workload, {})
                paper_ratio = paper[OURS] / paper[name] if name in paper else None
                ratio = round(paper_ratio, 1) if paper_ratio else None
                rows.append((workload, name, round(held, 1), paper.get(name), round(ours / held, 1), ratio))
        return Table(
            "held",
            "Sequences held at once",
            "Mean number of sequences that hold KV memory at saturation, and ours ÷ the system's.",
            ("workload", "system", "held", "held (paper)", "ratio", "ratio (paper)"),
            tuple(rows),
            (
                "The paper counts at 2 requests/s (ShareGPT) and 30 requests/s (Alpaca). The first saturates its "
                "memory, so the figures agree; the second does not saturate paged memory, so ours holds more.",
            ),
        )

    # -- throughput -----------------------------------------------------------------------------------------------

    def throughput(self) -> Table:
        rows = []
        for model, workload in itertools.product((self.model, PAPER_HARDWARE), self.workloads):
            rates = {name: self.sustained(name, workload, model) for name in [STATIC, *CONTIGUOUS, OURS]}
            for name, rate in rates.items():
                ratio = rates[OURS] / rate
                paper = PAPER_RATIO.get(name) if workload == "ShareGPT" else None
                rows.append((model.name, workload, name, float(f"{rate:.3g}"), round(ratio, 1), paper))
        return Table(
            "throughput",
            "Request rate at equal normalised latency",
            "*Requests/s*: the highest Poisson rate at which the mean of (last token − arrival) ÷ output tokens, over "
            f"the later half of the requests, stays within {LATENCY_BOUND} steps of a lone sequence. *Ratio*: ours ÷ "
            "the system's. All but the "
            f"static batch schedule by iteration within {MAX_BATCHED_TOKENS} tokens a step.",
            ("step times", "workload", "system", "requests/s", "ratio", "ratio (paper)"),
            tuple(rows),
            (
                f"{self.model.name}: {self.model.source}. Here every further sequence makes a step longer, so holding "
                "more of them pays less than on the paper's hardware, where a step is bound by reading the weights.",
                f"{PAPER_HARDWARE.name}: {PAPER_HARDWARE.source}. The same simulation with steps like the paper's.",
                "Preemption costs ours what the table on the watermark shows; the paper's figure has that cost in it.",
                "FasterTransformer in the paper also lacks the others' kernels for mixed batches and pads; the static "
                "batch here pads as well, but its steps are as quick as everybody's.",
            ),
        )

    def sustained(self, name: str, workload: str, model: StepModel) -> float:
        """Requests a second within the bound."""
        key = (name, workload, model.name)
        if key not in self._sustained:
            capacity = self.saturated(name, workload, model).request_rate_per_s
            lengths = self.paced[workload]
            self.report(f"request rate: {name}, {workload}, {model.name}")
            self._sustained[key] = self._highest_rate(self.system(name, model), lengths, capacity, key)
        return self._sustained[key]

    def _highest_rate(
        self, run: Run, lengths: Lengths, capacity: float, key: tuple[str, str, str], num_prefix_tokens: int = 0
    ) -> float:
        """Bisection on a logarithmic scale around `capacity`; every point goes into the curve."""
        name, workload, model_name = key
        model = self.model if model_name == self.model.name else PAPER_HARDWARE
        bound_s = LATENCY_BOUND * model.step_s(1, 0)
        low, high = SEARCHED[0] * capacity, SEARCHED[1] * capacity
        points: dict[float, float] = {}
        for _ in range(SEARCH_STEPS):
            rate = math.sqrt(low * high)
            arrivals = poisson(lengths, rate, self.seed, num_prefix_tokens)
            points[rate] = run(arrivals, 0).late_latency_s
            low, high = (rate, high) if points[rate] <= bound_s else (low, rate)
        self.curves.append(Curve(workload, model_name, name, bound_s, tuple(sorted(points.items()))))
        return low

    def prefix(self) -> Table:
        lengths = TRANSLATION.sample(int(self.num_paced_tokens / TRANSLATION.mean_tokens / 4), self.seed)
        rows: list[tuple[Cell, ...]] = []
        for model, (num_prefix, paper) in itertools.product((self.model, PAPER_HARDWARE), PREFIXES.items()):
            rates: dict[str, float] = {}
            caching = dataclasses.replace(self.ours(model), prefix_caching=True)
            oracle = self.system(Reservation.ORACLE.value, model)
            for name, run in {Reservation.ORACLE.value: oracle, OURS: caching.run}.items():
                workload = f"prefix {num_prefix}"
                self.report(f"request rate: {name}, {workload}, {model.name}")
                waiting = poisson(lengths, RATE_OF_ALL_AT_ONCE, self.seed, num_prefix)
                capacity = run(waiting, len(waiting) // 10).overall_rate_per_s
                rates[name] = self._highest_rate(run, lengths, capacity, (name, workload, model.name), num_prefix)
            ratio = round(rates[OURS] / rates[Reservation.ORACLE.value], 2)
            cells = [float(f"{rate:.3g}") for rate in rates.values()]
            rows.append((model.name, num_prefix, *cells, ratio, paper))
        return Table(
            "prefix",
            "Shared prefix",
            "Translation: every prompt begins with the same 80 or 341 tokens, then "
            f"{TRANSLATION.mean_prompt_tokens:.0f} of its own and {TRANSLATION.mean_output_tokens:.0f} of output on "
            "average (assumed). Requests/s within the bound as above; ours computes and stores the prefix once, Orca "
            "(Oracle) for each.",
            ("step times", "prefix tokens", "Orca (Oracle)", OURS, "ratio", "ratio (paper)"),
            tuple(rows),
            (
                "The prefix saves memory and computing. Where computing a token costs much, as on a CPU, the second "
                "dominates and the gain is larger than the paper's; only whole blocks are shared (80 is five of 16, "
                "of 341 the last 5 tokens are computed again). The sentences' lengths are assumed: longer ones mean a "
                "smaller gain.",
            ),
        )

    # -- sharing --------------------------------------------------------------------------------------------------

    def sharing(self) -> Table:
        rows = []
        for workload, width in itertools.product(self.workloads, WIDTHS):
            lengths = part(self.workloads[workload], 0.3)
            arrivals = {
                "parallel": all_at_once(lengths, num_choices=width),
                "beam": with_beams(lengths, self.beams.of_width(width)),
            }
            saved = {}
            for kind, waiting in arrivals.items():
                self.report(f"sharing: {kind} {width}, {workload}")
                system = dataclasses.replace(self.ours(self.model), prefix_caching=True)
                saved[kind] = percent(system.run(waiting, is_whole_run=True).saved_by_sharing)
            paper = {kind: PAPER_SAVED[kind].get(workload) if width == WIDTHS[0] else None for kind in saved}
            rows.append((workload, width, saved["parallel"], paper["parallel"], saved["beam"], paper["beam"]))
        return Table(
            "sharing",
            "Blocks saved by sharing",
            "Percent: 1 − blocks held ÷ blocks held if every choice or beam had its own, averaged over time. The paper "
            "gives the range over 2, 4 and 6.",
            ("workload", "outputs", "parallel", "parallel (paper)", "beam", "beam (paper)"),
            tuple(rows),
            (
                "Parallel sampling shares the full blocks of the prompt: at most (n − 1)/n of prompt ÷ (prompt + "
                "output so far). Choices are preempted one by one here, as a group in the paper.",
                f"Beams extend one another as in real searches ({self.beams.source}), repeated where an output is "
                "longer; 50, 75 and 83 % would be everything. The paper's range is from another model and its data "
                "sets' prompts: how soon beams come from one ancestor is the model's doing.",
            ),
        )

    # -- settings -------------------------------------------------------------------------------------------------

    def block_size(self) -> Table:
        rows: list[tuple[Cell, ...]] = []
        for workload, size in itertools.product(self.workloads, self.block_sizes):
            figures = []
            for model in (self.model, PAPER_HARDWARE):
                self.report(f"block size {size}: {workload}, {model.name}")
                system = dataclasses.replace(self.ours(model), block_size=size)
                figures.append(self._saturate(system.run, part(self.workloads[workload], 0.5)))
            rates = [float(f"{one.request_rate_per_s:.3g}") for one in figures]
            rows.append((workload, size, percent(figures[0].used_of_allocated), round(figures[0].num_held, 1), *rates))
        return Table(
            "block_size",
            "Block size",
            "At saturation: use of owned memory, sequences held, and requests a second with either step times.",
            ("workload", "block size", "of owned %", "held", self.model.name, PAPER_HARDWARE.name),
            tuple(rows),
            (
                "Paper, by latency: ShareGPT is best from 16 to 128, Alpaca at 16 and 32; larger blocks are not filled "
                "by the sequences. That side is the same here. Its smallest blocks are slow too, because of its "
                "kernel; step times here do not depend on the block size.",
            ),
        )

    def watermark(self) -> Table:
        rows = []
        workload = next(iter(self.workloads))
        for watermark, model in itertools.product(WATERMARKS, (self.model, PAPER_HARDWARE)):
            self.report(f"watermark {watermark}: {model.name}")
            system = dataclasses.replace(self.ours(model), watermark=watermark)
            figures = self._saturate(system.run, self.workloads[workload])
            preempted = 100 * figures.num_preemptions / len(self.workloads[workload])
            rate = float(f"{figures.request_rate_per_s:.3g}")
            rows.append((watermark, model.name, round(preempted), percent(figures.used_of_pool), rate))
        return Table(
            "watermark",
            "Watermark",
            f"{workload} at saturation, preemption by recompute. *Preempted*: preemptions in 100 requests.",
            ("watermark", "step times", "preempted", "of pool %", "requests/s"),
            tuple(rows),
            (
                "Blocks left idle at admission are room to grow: a higher watermark trades a few percent of memory for "
                "prompts that are not computed twice. `kvferry plan` chooses by the same simulation.",
            ),
        )

    def swap(self) -> Table:
        rows = []
        workload = next(iter(self.workloads))
        recompute_s = self.model.prefill_s(SWAPPED_TOKENS, MAX_BATCHED_TOKENS)
        for size in self.block_sizes:
            rate = self.copy_rates[size]
            copy_s = 2 * rate.block_copy_s * SWAPPED_TOKENS / size
            served = []
            for swap_slots in (0, POOL_SLOTS):
                self.report(f"swap: block size {size}, {'swap' if swap_slots else 'recompute'}")
                system = dataclasses.replace(
                    self.ours(self.model), block_size=size, swap_slots=swap_slots, block_copy_s=rate.block_copy_s
                )
                figures = self._saturate(system.run, part(self.workloads[workload], 0.5))
                served.append(float(f"{figures.request_rate_per_s:.3g}"))
            gigabytes = round(rate.block_bytes / rate.block_copy_s / 1e9, 1)
            rows.append((size, gigabytes, round(1e3 * copy_s, 2), round(1e3 * recompute_s, 1), *served))
        return Table(
            "swap",
            "Swap against recompute",
            f"A sequence of {SWAPPED_TOKENS} tokens: *swap* copies its blocks (SmolLM2-135M, bfloat16) to the host "
            "pool and back one by one, at the bandwidth measured in this run; *recompute* prefills it, by the step "
            f"times. Requests/s: {workload} at saturation with either.",
            ("block size", "copy GB/s", "swap ms", "recompute ms", "requests/s recompute", "requests/s swap"),
            tuple(rows),
            (
                "Paper: recompute does not depend on the block size and costs never more than 20 % above swap, swap "
                "suffers from small blocks, and the two are comparable from 16 to 64. Its pool is a GPU's, "
                "behind PCIe; here both pools are main memory and computing is slow, so swap wins at every size, and "
                "copying a block of 8 tokens, 184 KB, is a long memcpy already.",
            ),
        )


def part(lengths: Lengths, share: float) -> Lengths:
    """That share of the requests, in their order: every so many-th by length of the output, so that it is alike."""
    number = max(1, int(share * len(lengths)))
    by_output = sorted(range(len(lengths)), key=lambda index: lengths[index].num_output_tokens)
    chosen = sorted(by_output[(2 * place + 1) * len(lengths) // (2 * number)] for place in range(number))
    return [lengths[index] for index in chosen]


def paper_workloads(num_tokens: int, seed: int) -> dict[str, Lengths]:
    """The two shapes, each with about `num_tokens` tokens."""
    return {shape.name: shape.sample(int(num_tokens / shape.mean_tokens), seed) for shape in (SHAREGPT, ALPACA)}


def tables(study: Study, names: Iterable[str]) -> list[Table]:
    return [getattr(study, name)() for name in names]


TABLES = ("utilisation", "shape", "held", "throughput", "sharing", "prefix", "block_size", "watermark", "swap")
