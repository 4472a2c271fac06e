"""How long a step takes in the simulations: time = base + per token + per context token.

*Tokens* are those a step computes, of prompts and of decoding sequences alike; *context tokens* are the tokens of KV
its sequences hold once it is done. The coefficients of `bench/data/step_model.json` are used unless `--fit` measures.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STORED = Path(__file__).parents[1] / "data" / "step_model.json"


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in seconds, and where they come from."""

    name: str
    base_s: float
    token_s: float
    context_token_s: float
    source: str

    def step_s(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens + self.context_token_s * num_context_tokens

    def prefill_s(self, num_tokens: int, max_batched_tokens: int) -> float:
        """A prompt computed alone, in steps of at most `max_batched_tokens`."""
        ends = [*range(max_batched_tokens, num_tokens, max_batched_tokens), num_tokens]
        starts = [0, *ends[:-1]]
        return sum(self.step_s(end - start, end) for start, end in zip(starts, ends, strict=True))


def _paper_hardware() -> StepModel:
    """OPT-13B on one A100-40GB from data sheets: what bounds a step, at the efficiency usual in practice."""
    weight_bytes, bytes_per_s, flop_per_s, memory_efficiency, compute_efficiency = 26e9, 1.555e12, 312e12, 0.6, 0.5
    return StepModel(
        name="OPT-13B on A100, roofline",
        base_s=weight_bytes / bytes_per_s / memory_efficiency,
        token_s=weight_bytes / flop_per_s / compute_efficiency,
        context_token_s=819_200 / bytes_per_s / memory_efficiency,
        source="arithmetic, not measured: 26 GB of weights and 800 KiB of KV a token at 60 % of 1,555 GB/s, "
        "26 GFLOP a token at 50 % of 312 TFLOP/s",
    )


PAPER_HARDWARE = _paper_hardware()


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    num_tokens: int
    num_context_tokens: int
    step_s: float


def fit(name: str, source: str, samples: Sequence[StepSample]) -> StepModel:
    """Least squares of the relative error, with no coefficient below zero.

    Every subset of coefficients is tried; among those whose solution has no negative one, the best fits.
    """
    design = np.array([(1.0, sample.num_tokens, sample.num_context_tokens) for sample in samples])
    times = np.array([sample.step_s for sample in samples])
    weighted = design / times[:, None]
    best, best_error = np.zeros(3), np.inf
    for mask in range(1, 8):
        columns = [index for index in range(3) if mask >> index & 1]
        solution, *_ = np.linalg.lstsq(weighted[:, columns], np.ones(len(times)), rcond=None)
        error = float(np.linalg.norm(weighted[:, columns] @ solution - 1.0))
        if (solution >= 0).all() and error < best_error:
            best, best_error = np.zeros(3), error
            best[columns] = solution
    base_s, token_s, context_token_s = (float(value) for value in best)
    return StepModel(name, base_s, token_s, context_token_s, source)


def worst_relative_error(model: StepModel, samples: Sequence[StepSample]) -> float:
    return max(abs(model.step_s(one.num_tokens, one.num_context_tokens) / one.step_s - 1) for one in samples)


def load(path: Path = STORED) -> StepModel:
    return StepModel(**json.loads(path.read_text(encoding="utf-8")))


def store(model: StepModel, path: Path = STORED) -> None:
    path.write_text(json.dumps(dataclasses.asdict(model), indent=2) + "\n", encoding="utf-8")
