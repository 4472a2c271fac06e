"""What this machine can do: bytes read a second, and operations a second in products of the model's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cpu.demand import Shape
from bench.cpu.products import Products, best_s

TIMES = 15
PREFILL_ROWS = 512
INVARIANCE_ROWS = (1, 8, 32, 512)


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of all threads together.

    Attributes:
        read_bytes_per_s: reading a buffer as large as the weights in bfloat16, the quickest of `read_rates`.
        read_rates: by torch's operator.
        own_flops, onednn_flops, torch_flops: of all linears of the model over 512 rows.
    """

    read_bytes_per_s: float
    read_rates: dict[str, float]
    own_flops: float
    onednn_flops: float
    torch_flops: float

    @property
    def best_flops(self) -> float:
        return max(self.own_flops, self.onednn_flops, self.torch_flops)


@dataclass(frozen=True, slots=True)
class InvariancePrice:
    """All linears of the model once, over so many rows."""

    num_rows: int
    ours_s: float
    onednn_s: float
    torch_s: float


def measure_prices(products: Products) -> list[InvariancePrice]:
    return [
        InvariancePrice(rows, products.ours_s(rows), products.onednn_s(rows), products.torch_s(rows))
        for rows in INVARIANCE_ROWS
    ]


def measure_limits(prices: list[InvariancePrice], products: Products, shape: Shape) -> Limits:
    """`prices` have the products over 512 rows already."""
    rates = _read_rates(int(shape.weight_bytes("bf16")))
    long = next(price for price in prices if price.num_rows == PREFILL_ROWS)
    operations = products.operations(PREFILL_ROWS)
    return Limits(
        read_bytes_per_s=max(rates.values()),
        read_rates=rates,
        own_flops=operations / long.ours_s,
        onednn_flops=operations / long.onednn_s,
        torch_flops=operations / long.torch_s,
    )


def _read_rates(num_bytes: int) -> dict[str, float]:
    memory = torch.ones(num_bytes // 4)
    halves = memory.view(torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {
        "sum of float32": memory.sum,
        "largest of float32": memory.max,
        "sum of bfloat16": halves.sum,
    }
    return {name: num_bytes / best_s(way, TIMES) for name, way in ways.items()}
