"""The runner: turns the slices of one step into sampled tokens. This module is torch-free.

The step loop holds a `Runner` and knows nothing else about models. `open_runner` looks into a model folder and opens
either the scripted runner (`engine/scripted.py`, no weights, no torch) or the one for transformers models
(`engine/model_runner.py`, which is imported, with torch, only then).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.scripted import SCRIPT_FILE, open_scripted_runner
from kvferry.config import KernelChoice, Quantization
from kvferry.errors import InvalidArgument
from kvferry.kv_layout import DTYPE_BYTES, KvLayout


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What a worker's configuration says about its runner.

    Attributes:
        num_blocks: blocks in the pool, or a function that is asked with the bytes of one block.
        block_size: tokens in a block.
        dtype: "float32" or "bfloat16", of weights and KV.
        device: only "cpu" so far.
        num_threads: torch threads of this process.
        max_context: upper limit on a sequence's tokens; None: what the model's configuration allows.
        quantization: "none", or how linears hold their weights (`load_model`).
        kernels: "native", "reference", or "auto": native where they can be built.
        kernels_folder: where the native ones are kept once they are built, and weights packed for them.
    """

    num_blocks: int | Callable[[int], int]
    block_size: int = 16
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1
    max_context: int | None = None
    quantization: Quantization = "none"
    kernels: KernelChoice = "reference"
    kernels_folder: Path = Path()

    def __post_init__(self) -> None:
        for name in ("block_size", "num_threads"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, f"{getattr(self, name)} is below the least value, 1")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument("dtype", f"{self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.device != "cpu":
            raise InvalidArgument("device", f"{self.device!r}: only 'cpu' is supported")
        if self.max_context is not None and self.max_context < 1:
            raise InvalidArgument("max_context", f"{self.max_context} is below the least value, 1")

    def pool_blocks(self, layout: KvLayout) -> int:
        """Blocks in the pool for blocks of `layout`; InvalidArgument when there are none."""
        num_blocks = self.num_blocks if isinstance(self.num_blocks, int) else self.num_blocks(layout.block_bytes)
        if num_blocks < 1:
            raise InvalidArgument("num_blocks", f"{num_blocks} is below the least value, 1")
        return num_blocks


class Runner(Protocol):
    """One model with its paged KV memory; used by one thread at a time."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def max_context(self) -> int:
        """Most tokens one sequence may have, prompt and output together."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def window(self) -> int | None:
        """Tokens the widest layer attends to, the present one counted; None where a layer attends to all."""

    @property
    def suits_drafts(self) -> bool:
        """Whether a token comes out the same with a draft behind it, and a row of one costs less than a step."""

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        """Compute one step: one entry a slice, None where the slice asked for nothing.

        `on_kv_written` may be left uncalled where the runner cannot know before the step's end.
        """

    def block_view(self, block_id: int) -> memoryview:
        """The block's slab, all layers, as writable raw bytes (`layout.block_bytes` of them)."""

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        """A copy of the block's slab with the slots from `num_tokens` on zeroed."""

    def populate(self) -> None:
        """Brings in the pages of the pool's memory; for a thread of its own, while others use the pool."""


def open_runner(folder: Path, config: RunnerConfig) -> Runner:
    """Open the model in `folder`.

    Raises:
        FailedPrecondition: the folder does not hold a model that can be served exactly; the message names the file,
            the tensor or the property.
    """
    if (folder / SCRIPT_FILE).is_file():
        return open_scripted_runner(folder, num_blocks=config.pool_blocks, block_size=config.block_size)
    from engine.model_runner import ModelRunner  # here, not above: torch must not load for scripted runners

    return ModelRunner(folder, config)
