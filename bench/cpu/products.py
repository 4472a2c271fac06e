"""Products of rows with all the linears of a model, one after the other so that weights come from memory: ours, and
torch's oneDNN with its own packed weights and with weights as torch keeps them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cpu.demand import Shape
from kernels.decoder import NativeKernels, pack, padded
from kernels.native import Linear

TIMES = 5


def best_s(work: Callable[[], object], times: int = TIMES, *, at_most_s: float = 3.0) -> float:
    """The shortest of several times after one that is not kept; of at least one."""
    work()
    took_s: list[float] = []
    while len(took_s) < times and sum(took_s) < at_most_s:
        begin_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - begin_s)
    return min(took_s)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear's weights, three times."""

    plain: Tensor
    for_onednn: Tensor
    for_ours: Tensor
    linear: Linear


class Products:
    """The layers' linears of a model with random weights in bfloat16, of all layers."""

    def __init__(self, shape: Shape, kernels: NativeKernels) -> None:
        self._kernels, self._shape = kernels, shape
        first = {name: torch.randn(outputs, inputs).bfloat16() for name, (inputs, outputs) in shape.linears.items()}
        self._matrices = [_matrix(weight.clone()) for _ in range(shape.num_layers) for weight in first.values()]

    def operations(self, num_rows: int) -> int:
        return 2 * self._shape.num_layer_weights * num_rows

    def ours_s(self, num_rows: int) -> float:
        """All linears once, in calls of their own."""
        native, team = self._kernels.native, self._kernels.team
        rows = self._rows(num_rows)
        output = torch.empty(num_rows, padded(max(len(one.plain) for one in self._matrices)))

        def run() -> None:
            for one in self._matrices:
                width = one.plain.shape[1]
                given = rows[width].data_ptr(), width, num_rows
                native.linear(team, 1, 0, *given, ctypes.byref(one.linear), output.data_ptr())

        return best_s(run)

    def onednn_s(self, num_rows: int) -> float:
        """With weights that oneDNN packed once."""
        rows = self._rows(num_rows)
        product = torch.ops.mkldnn._linear_pointwise
        return best_s(
            lambda: [product(rows[one.plain.shape[1]], one.for_onednn, None, "none", [], "") for one in self._matrices]
        )

    def torch_s(self, num_rows: int) -> float:
        """`torch.nn.functional.linear`."""
        rows = self._rows(num_rows)
        return best_s(
            lambda: [torch.nn.functional.linear(rows[one.plain.shape[1]], one.plain) for one in self._matrices]
        )

    def _rows(self, num_rows: int) -> dict[int, Tensor]:
        """By number of inputs."""
        return {inputs: torch.randn(num_rows, inputs).bfloat16() for inputs, _ in self._shape.linears.values()}


def _matrix(weight: Tensor) -> Matrix:
    outputs, inputs = weight.shape
    packed = pack(weight, torch.bfloat16).values
    linear = Linear(packed=packed.data_ptr(), num_inputs=inputs, num_outputs=outputs)
    return Matrix(weight, torch.ops.mkldnn._reorder_linear_weight(weight), packed, linear)
