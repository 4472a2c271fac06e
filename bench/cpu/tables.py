"""The tables of `bench/engine.py`, from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cpu.attention import BLOCK_SIZES, AttentionTimes
from bench.cpu.cases import SHORT, Case
from bench.cpu.contest import Results
from bench.cpu.demand import Shape
from bench.cpu.limits import InvariancePrice, Limits
from bench.cpu.profile import StepProfile
from bench.cpu.systems import System
from bench.paging.tables import Cell, Table, percent
from bench.report import Spread

WANTED = {"vllm": {1: 1.4, 8: 1.4, 32: 1.25}, "openvino": {1: 1.5, 8: 2.0, 32: 1.8}}
"""Decode ratios to reach, by batch."""
WANTED_PREFILL = {"vllm": 1.1}
SECONDS_AN_HOUR = 3_600


@dataclass(frozen=True, slots=True)
class Measured:
    """All of a run."""

    systems: Sequence[System]
    cases: Sequence[Case]
    results: Results
    shape: Shape
    limits: Limits
    prices: Sequence[InvariancePrice]
    profiles: Sequence[StepProfile]
    attention: Sequence[AttentionTimes]
    threads: int
    price_per_core_hour: float
    gguf_bytes: int


def tables(run: Measured) -> list[Table]:
    made = [_prefill(run), _decode(run), _ratios(run), _limits(run), _shares(run), _profile(run)]
    made += [_attention(run), _invariance(run), _cost(run)]
    return [table for table in made if table.rows]


def _prefill(run: Measured) -> Table:
    definition = (
        "Tokens of the prompts a second: n × tokens ÷ time until each has its first token. Median (quartiles)"
        " of the rounds; of prompts of 2,000 at n = 8 and 32 one round."
    )
    rows = [
        _rates(run, run.results.prefill, case, f"{case.num_sequences} × {case.num_prompt_tokens:,}")
        for case in run.cases
    ]
    return _table("prefill", "Prefill, tokens/s", definition, ("n × tokens", *_names(run)), rows)


def _decode(run: Measured) -> Table:
    definition = (
        "Tokens a second of all sequences together while all of them decode, greedy, end of sequence ignored;"
        " contexts grow from round to round about the one named. Median (quartiles) of the rounds."
    )
    rows = [_rates(run, run.results.decode, case, f"{case.num_sequences}, {case.context:,}") for case in run.cases]
    return _table("decode", "Decode, tokens/s", definition, ("n, context", *_names(run)), rows)


def _rates(run: Measured, rates: dict[tuple[str, Case], list[float]], case: Case, label: str) -> tuple[Cell, ...]:
    found = (rates.get((system.name, case)) for system in run.systems)
    return (label, *(Spread.of(one).text(0) if one else None for one in found))


def _ratios(run: Measured) -> Table:
    pairs = [(own, peer) for peer in run.systems if peer.directory for own in run.systems if _is_rival(own, peer)]
    rows: list[tuple[Cell, ...]] = []
    for own, peer in pairs:
        for case in run.cases:
            wanted = WANTED_PREFILL.get(peer.kind)
            rows += _ratio_row(
                run.results.prefill,
                own,
                peer,
                case,
                f"prefill {case.num_sequences} × {case.num_prompt_tokens:,}",
                wanted,
            )
        for case in run.cases:
            wanted = WANTED[peer.kind].get(case.num_sequences)
            rows += _ratio_row(
                run.results.decode, own, peer, case, f"decode {case.num_sequences}, {case.context:,}", wanted
            )
    definition = "Ours ÷ the peer's, by round (neighbours in time); median (quartiles). *Wanted*: the project's aim."
    columns = ("ours", "peer", "what", "ratio", "wanted")
    return _table("ratios", "Beside the peers", definition, columns, rows)


def _is_rival(own: System, peer: System) -> bool:
    """bfloat16 meets bfloat16, quantised weights meet the GGUF."""
    return own.kind == "ours" and (own.precision == "bf16") == (peer.precision == "bf16")


def _ratio_row(
    rates: dict[tuple[str, Case], list[float]], own: System, peer: System, case: Case, what: str, wanted: float | None
) -> list[tuple[Cell, ...]]:
    pairs = zip(rates.get((own.name, case), []), rates.get((peer.name, case), []), strict=False)
    ratios = [ours / theirs for ours, theirs in pairs]
    return [(own.name, peer.name, what, Spread.of(ratios).text(2), wanted)] if ratios else []


def _limits(run: Measured) -> Table:
    limits = run.limits
    rows: list[tuple[Cell, ...]] = [
        (f"reading, {name}, GB/s", round(rate / 1e9, 1)) for name, rate in limits.read_rates.items()
    ]
    rows += [
        ("products, our kernels, GFLOP/s", round(limits.own_flops / 1e9)),
        ("products, oneDNN, weights packed once, GFLOP/s", round(limits.onednn_flops / 1e9)),
        ("products, oneDNN, weights as torch keeps them, GFLOP/s", round(limits.torch_flops / 1e9)),
    ]
    definition = (
        f"{run.threads} threads. Reading: {run.shape.weight_bytes('bf16') / 1e6:.0f} MB, as the weights in "
        "bfloat16, by torch's operators; the quickest is the limit. Products: all linears of the layers over "
        "512 rows in bfloat16, weights from memory; the quickest is the limit."
    )
    return _table("limits", "What this machine can do", definition, ("limit", "rate"), rows)


def _shares(run: Measured) -> Table:
    rows = []
    for system in run.systems:
        cells = [_decode_share(run, system, case) for case in run.cases if case.num_sequences == 1]
        prefill = [_prefill_share(run, system, case) for case in run.cases]
        rows.append((system.name, *cells, *prefill))
    ones = [f"decode 1, {case.context:,}" for case in run.cases if case.num_sequences == 1]
    fills = [f"prefill {case.num_sequences} × {case.num_prompt_tokens:,}" for case in run.cases]
    definition = (
        "%. Decode: bytes needed a token (weights once, keys and values of the context in bfloat16) × "
        "tokens/s ÷ read rate. Prefill: operations needed (linears, attention to what is seen, one row of the"
        " head a prompt) × prompts/s ÷ rate of products in bfloat16. Weights of OpenVINO: the GGUF's bytes. "
        "Above 100: the keys and values are smaller there, products are quicker in int8, or the weights stay "
        "in the cache."
    )
    return _table("shares", "Share of the limit", definition, ("engine", *ones, *fills), rows)


def _decode_share(run: Measured, system: System, case: Case) -> Cell:
    rates = run.results.decode.get((system.name, case))
    if not rates:
        return None
    weights = run.gguf_bytes if system.precision == "gguf" else run.shape.weight_bytes(system.precision)
    needed = weights + run.shape.kv_bytes(1, case.context)
    return percent(statistics.median(rates) * needed / run.limits.read_bytes_per_s)


def _prefill_share(run: Measured, system: System, case: Case) -> Cell:
    rates = run.results.prefill.get((system.name, case))
    if not rates:
        return None
    operations = run.shape.prefill_operations(case.num_sequences, case.num_prompt_tokens)
    return percent(statistics.median(rates) / case.num_tokens * operations / run.limits.best_flops)


def _profile(run: Measured) -> Table:
    if not run.profiles:
        return _table("profile", "", "", (), [])
    rows: list[tuple[Cell, ...]] = []
    for part in run.profiles[0].parts:
        rows.append((part, *(_of_step(one.parts[part], one.step_ms) for one in run.profiles)))
    rows.append(("step", *(f"{one.step_ms:.2f}" for one in run.profiles)))
    rows.append(("of which host", *(_of_step(one.host_ms, one.step_ms) for one in run.profiles)))
    definition = (
        "ms (share) of a decode step of ours in bfloat16 at a context of 192, medians of 24 steps. Linears "
        "and attention measured alone, so the line below them is a difference. *Host*: all outside the native"
        " calls for layers and head. Streaming is in `python -m bench split`."
    )
    return _table(
        "profile", "A step's time", definition, ("part", *(f"n = {one.num_sequences}" for one in run.profiles)), rows
    )


def _of_step(part_ms: float, step_ms: float) -> str:
    return f"{part_ms:.2f} ({100 * part_ms / step_ms:.1f} %)"


def _attention(run: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = (
        [
            (size, *(round(one.ratios[size], 3) for one in run.attention), percent((size - 1) / 2 / 192))
            for size in BLOCK_SIZES
        ]
        if run.attention
        else []
    )
    notes = [
        f"{one.case.name}: contiguous {1e3 * one.contiguous_s:.2f} ms"
        + (f"; torch's scaled_dot_product_attention, contiguous, {1e3 * one.torch_s:.2f} ms." if one.torch_s else ".")
        for one in run.attention
    ]
    definition = (
        "Time of a step's attention (all layers) over blocks ÷ over contiguous keys and values, the same "
        "kernel; median of the rounds' ratios. The paper's kernel took 1.20 to 1.26 times a contiguous one. "
        "*Unused*: slots of the last block, % of 192 tokens, on average."
    )
    columns = ("block size", *(one.case.name for one in run.attention), "unused")
    return Table("blocks", "Paged against contiguous attention", definition, columns, tuple(rows), tuple(notes))


def _invariance(run: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            price.num_rows,
            round(1e3 * price.ours_s, 2),
            round(1e3 * price.onednn_s, 2),
            round(1e3 * price.torch_s, 2),
            round(price.ours_s / price.onednn_s, 2),
        )
        for price in run.prices
    ]
    definition = (
        "ms of all linears of the layers over M rows in bfloat16, weights from memory, best of 5. Ours "
        "compute a row in one order whatever is beside it; oneDNN chooses a kernel for the number of rows. "
        "*Price*: ours ÷ oneDNN with weights packed once; 1 or less: batch invariance costs nothing."
    )
    columns = ("M", "ours", "oneDNN, packed once", "oneDNN, as torch keeps them", "price")
    return _table("invariance", "The price of batch invariance", definition, columns, rows)


def _cost(run: Measured) -> Table:
    rows = [
        (f"{label} {case.num_sequences}", *(_price(run, rates.get((system.name, case))) for system in run.systems))
        for label, rates in (("prompt, n =", run.results.prefill), ("output, n =", run.results.decode))
        for case in run.cases
        if case.num_prompt_tokens == SHORT
    ]
    definition = (
        f"Price of a million tokens at {run.price_per_core_hour} per core and hour, {run.threads} cores busy "
        "with nothing else: price × cores ÷ (tokens/s × 3,600) × 10⁶. Prompts of 128 tokens; output at a "
        "context of 192."
    )
    return _table("cost", "Cost per million tokens", definition, ("tokens", *_names(run)), rows)


def _price(run: Measured, rates: list[float] | None) -> Cell:
    if not rates:
        return None
    per_hour = statistics.median(rates) * SECONDS_AN_HOUR
    return float(f"{run.price_per_core_hour * run.threads / per_hour * 1e6:.3g}")


def _names(run: Measured) -> list[str]:
    return [system.name for system in run.systems]


def _table(name: str, title: str, definition: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]]) -> Table:
    return Table(name, title, definition, tuple(columns), tuple(rows))
