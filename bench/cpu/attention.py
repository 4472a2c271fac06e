"""Attention over blocks against attention over contiguous keys and values, with the kernels of the engine.

Contiguous: each sequence's keys and values of a head lie in one piece, as before paging; here a block as long as the
context. All layers of a step, each with keys and values of its own, blocks in random order; every round measures all
block sizes in turn, so that ratios are of neighbours.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cpu.demand import Shape
from kernels.decoder import NativeKernels

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = 16
ALIGNMENT = 32
VALUE = 0.5


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences whose last `num_queries` of `context` tokens are computed."""

    name: str
    num_sequences: int
    num_queries: int
    context: int


CASES = (
    AttentionCase("decode, 32 × 192", 32, 1, 192),
    AttentionCase("decode, 8 × 2,000", 8, 1, 2_000),
    AttentionCase("prefill, 512 of 2,000", 1, 512, 2_000),
)


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Of one case.

    Attributes:
        contiguous_s: median.
        torch_s: `scaled_dot_product_attention` over contiguous keys and values, median; of decode only.
        ratios: to contiguous, by block size, medians over the rounds.
    """

    case: AttentionCase
    contiguous_s: float
    torch_s: float | None
    ratios: dict[int, float]


def measure_attention(shape: Shape, kernels: NativeKernels, rounds: int) -> list[AttentionTimes]:
    """All cases."""
    return [_measure(case, shape, kernels, rounds) for case in CASES]


def paged_s(shape: Shape, kernels: NativeKernels, num_sequences: int, context: int) -> float:
    """A decode step's attention with blocks of the usual size, the shortest of five times."""
    work = _paged(AttentionCase("", num_sequences, 1, context), shape, kernels, DEFAULT_BLOCK_SIZE)
    return min(_seconds(work) for _ in range(6))


def _measure(case: AttentionCase, shape: Shape, kernels: NativeKernels, rounds: int) -> AttentionTimes:
    contiguous = -(-case.context // ALIGNMENT) * ALIGNMENT
    works = {size: _paged(case, shape, kernels, size) for size in (*BLOCK_SIZES, contiguous)}
    plain = _torch(case, shape) if case.num_queries == 1 else None
    times: dict[int, list[float]] = {size: [] for size in works}
    plain_s: list[float] = []
    for number in range(rounds + 1):
        for size, work in works.items():
            took_s = _seconds(work)
            if number:
                times[size].append(took_s)
        if plain is not None:
            plain_s.append(_seconds(plain))
    ratios = {
        size: statistics.median(own / flat for own, flat in zip(times[size], times[contiguous], strict=True))
        for size in BLOCK_SIZES
    }
    torch_s = statistics.median(plain_s[1:]) if plain_s else None
    return AttentionTimes(case, statistics.median(times[contiguous]), torch_s, ratios)


def _seconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def _paged(case: AttentionCase, shape: Shape, kernels: NativeKernels, block_size: int) -> Callable[[], object]:
    per_sequence = -(-case.context // block_size)
    num_blocks = case.num_sequences * per_sequence
    sizes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
    cache = torch.full(sizes, VALUE, dtype=torch.bfloat16)
    order = random.Random(0).sample(range(num_blocks), num_blocks)
    tables = torch.tensor(order).view(case.num_sequences, per_sequence)
    query = _query(case, shape)
    first_rows = torch.arange(case.num_sequences + 1) * case.num_queries
    contexts = torch.full((case.num_sequences,), case.context)
    scaling = shape.head_dim**-0.5

    def run() -> None:
        for layer in range(shape.num_layers):
            kernels.paged_attention(query, cache, layer, tables, first_rows, contexts, scaling=scaling)

    return run


def _torch(case: AttentionCase, shape: Shape) -> Callable[[], object]:
    sizes = (case.num_sequences, shape.num_kv_heads, case.context, shape.head_dim)
    layers: Sequence[tuple[Tensor, Tensor]] = [
        (torch.full(sizes, VALUE, dtype=torch.bfloat16), torch.full(sizes, VALUE, dtype=torch.bfloat16))
        for _ in range(shape.num_layers)
    ]
    query = _query(case, shape)[:, :, None]  # [n, H, 1, D]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(query, keys, values, enable_gqa=True) for keys, values in layers]


def _query(case: AttentionCase, shape: Shape) -> Tensor:
    return torch.randn(case.num_sequences * case.num_queries, shape.num_heads, shape.head_dim).bfloat16()
