"""What the simulations take from this machine: step times of the real runner, and the rate of copying blocks."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.paging.step_model import StepModel, StepSample, fit, worst_relative_error
from engine.forward_batch import SampleRequest, SequenceSlice
from engine.runner import Runner, RunnerConfig, open_runner
from kvferry.config import load_config
from kvferry.kv_layout import KvLayout
from kvferry.model_store import ModelStore
from kvferry.sampling import SamplingParams

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16", model_fingerprint="-")
"""KV of SmolLM2-135M."""
COPIED_BYTES = 256 << 20
BLOCK_SIZE, MAX_SEQUENCES, MAX_CONTEXT = 16, 32, 512
DECODES = tuple((number, context) for number in (1, 4, 8, 16, 32) for context in (64, 192, 448))
CHUNKS = tuple((size, start) for size in (16, 64, 128, 256) for start in (0, 256))
REPEATS = 3
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Copying one block between two pools in memory."""

    block_bytes: int
    block_copy_s: float


def copy_rate(block_size: int) -> CopyRate:
    """Median over passes through pools larger than the caches, block by block in a scattered order."""
    block_bytes = LAYOUT.bytes_per_token * block_size
    num_blocks = max(4, COPIED_BYTES // block_bytes)
    pools = [memoryview(np.ones(num_blocks * block_bytes, dtype=np.uint8).data) for _ in range(2)]
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    passes = []
    for _ in range(REPEATS + 1):
        start_s = time.perf_counter()
        for block in order:
            begin = block * block_bytes
            pools[1][begin : begin + block_bytes] = pools[0][begin : begin + block_bytes]
        passes.append((time.perf_counter() - start_s) / num_blocks)
    return CopyRate(block_bytes, statistics.median(passes[1:]))


def measure_steps(report: Callable[[str], None]) -> StepModel:
    """Fits the step model to steps of the default model on all cores; some ten seconds."""
    name, num_threads = "smollm2-135m-instruct", len(os.sched_getaffinity(0))
    folder = ModelStore(load_config().model.cache_path).prepare(name)
    num_blocks = MAX_SEQUENCES * MAX_CONTEXT // BLOCK_SIZE
    config = RunnerConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype="bfloat16", num_threads=num_threads)
    runner = open_runner(folder, config)
    samples = []
    for shape in [*(("decode", *pair) for pair in DECODES), *(("prefill", *pair) for pair in CHUNKS)]:
        samples.append(_sample(runner, *shape))
        report(f"measured {shape[0]} {shape[1]} at {shape[2]}: {1e3 * samples[-1].step_s:.1f} ms")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    model = fit("", "", samples)
    worst = worst_relative_error(model, samples)
    source = f"{today}, least squares over {len(samples)} measured steps of our runner, worst deviation {worst:.0%}"
    name = f"{name} bfloat16, {num_threads} threads"
    return StepModel(name, model.base_s, model.token_s, model.context_token_s, source)


def _sample(runner: Runner, kind: str, number: int, start: int) -> StepSample:
    """`number` sequences that decode at `start` tokens of context, or one chunk of `number` tokens from `start` on."""
    is_decode = kind == "decode"
    slices = [_slice(index, start, 1) for index in range(number)] if is_decode else [_slice(0, start, number)]
    passes = []
    for _ in range(REPEATS + 1):
        start_s = time.perf_counter()
        runner.run(slices)
        passes.append(time.perf_counter() - start_s)
    num_context_tokens = sum(part.context_length for part in slices)
    return StepSample(sum(len(part.token_ids) for part in slices), num_context_tokens, min(passes[1:]))


def _slice(index: int, start: int, num_tokens: int) -> SequenceSlice:
    blocks_each = MAX_CONTEXT // BLOCK_SIZE
    table = range(index * blocks_each, index * blocks_each + -(-(start + num_tokens) // BLOCK_SIZE))
    tokens = [1_000 + (index * 31 + position) % 20_000 for position in range(num_tokens)]
    return SequenceSlice(str(index), tokens, start, list(table), SampleRequest(GREEDY, start + num_tokens, 0))
