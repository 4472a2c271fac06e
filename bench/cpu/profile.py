"""Where a decode step's time goes: the engine's own step, its parts timed by wrapping the functions they are.

Linears and attention, which are one native call with the rest of the layers, are measured alone beside it (products of
the same shapes, attention over as many tokens); what remains of the call is norms, rotation, writing and waiting.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine.model_runner
from bench.cpu.attention import paged_s
from bench.cpu.cases import Case
from bench.cpu.demand import Shape
from bench.cpu.products import Products
from bench.engine_worker import Batch, open_engine, parser
from engine.core import EngineCore
from engine.lean_decoder import LeanDecoder
from engine.model_runner import ModelRunner
from kernels.decoder import NativeDecoder, NativeKernels
from kernels.native import open_native
from kvferry.config import Config, child_environment

BATCHES = (1, 8, 32)
CONTEXT, NUM_STEPS = 192, 24
PROFILE_TIMEOUT_S = 300.0
PARTS: dict[str, tuple[Any, str]] = {
    "step": (EngineCore, "step"),
    "run": (ModelRunner, "run"),
    "batch": (engine.model_runner, "build_paged_batch"),
    "forward": (LeanDecoder, "logits"),
    "layers": (NativeDecoder, "layers"),
    "head": (NativeDecoder, "head"),
    "sampling": (engine.model_runner, "sample_rows"),
}


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Milliseconds of a decode step, medians over steps.

    Attributes:
        parts: in order; their sum is about `step_ms`.
        host_ms: all but the two native calls (layers and head).
    """

    num_sequences: int
    step_ms: float
    parts: dict[str, float]
    host_ms: float


def measure_profile(folder: Path, threads: int) -> list[StepProfile]:
    """Of our engine in bfloat16, by batch; in a process with a worker's environment."""
    command = [sys.executable, "-m", "bench.cpu.profile", str(folder), "--threads", str(threads)]
    done = subprocess.run(
        command, env=child_environment(threads), stdout=subprocess.PIPE, check=True, timeout=PROFILE_TIMEOUT_S
    )
    return [StepProfile(**one) for one in json.loads(done.stdout)]


def main() -> None:
    """Entry point, with the options of `bench/engine_worker.py`: profiles as JSON."""
    options = parser().parse_args()
    core = open_engine(options)
    kernels = NativeKernels(open_native(Config().model.kernels_path), options.threads)
    shape = Shape.of(json.loads((Path(options.folder) / "config.json").read_text()))
    products = Products(shape, kernels)  # meanwhile the pool's pages come
    profiles = []
    for num_sequences in BATCHES:
        linears_s = products.ours_s(num_sequences)
        attention_s = paged_s(shape, kernels, num_sequences, CONTEXT)
        profiles.append(dataclasses.asdict(_profile(core, num_sequences, linears_s, attention_s)))
    print(json.dumps(profiles))


def _profile(core: EngineCore, num_sequences: int, linears_s: float, attention_s: float) -> StepProfile:
    case = Case(num_sequences, CONTEXT - NUM_STEPS // 2, True, NUM_STEPS, CONTEXT)
    batch = Batch(core, case.prompts(0), NUM_STEPS + 8)
    batch.prefill()
    batch.decode(2)
    steps: list[dict[str, float]] = []
    with _timed() as spent:
        for _ in range(NUM_STEPS):
            spent.update(dict.fromkeys(PARTS, 0.0))
            batch.decode(1)
            steps.append(dict(spent))
    batch.end()
    step_ms = _median_ms(steps, "step")
    linears_ms, attention_ms = 1e3 * linears_s, 1e3 * attention_s
    parts = {
        "linears of the layers": linears_ms,
        "attention": attention_ms,
        "norms, rotation, writing, waiting": _median_ms(steps, "layers") - linears_ms - attention_ms,
        "head": _median_ms(steps, "head"),
        "embedding, rotary angles": _median_ms(steps, "forward", "layers", "head"),
        "sampling": _median_ms(steps, "sampling"),
        "building the batch": _median_ms(steps, "batch"),
        "scheduler, books, outputs": _median_ms(steps, "step", "batch", "forward", "sampling"),
    }
    return StepProfile(num_sequences, step_ms, parts, _median_ms(steps, "step", "layers", "head"))


def _median_ms(steps: list[dict[str, float]], name: str, *without: str) -> float:
    """Of a part less parts of it."""
    return 1e3 * statistics.median(step[name] - sum(step[part] for part in without) for step in steps)


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Seconds spent in each part, added up."""
    spent = dict.fromkeys(PARTS, 0.0)
    with ExitStack() as stack:
        for name, (owner, attribute) in PARTS.items():
            stack.enter_context(patch.object(owner, attribute, _wrapped(getattr(owner, attribute), name, spent)))
        yield spent


def _wrapped(original: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - begin_s

    return call


if __name__ == "__main__":
    main()
