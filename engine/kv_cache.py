"""The KV memory of one process: a pool of blocks, each one contiguous slab with all layers of its tokens.

The attention function writes and reads the tensor; shipping, receiving and copying use the raw bytes of a block. Who
may use which block is the block manager's business.
"""

from __future__ import annotations

import numpy as np
import torch

from kvferry.errors import FailedPrecondition
from kvferry.host_memory import populate
from kvferry.kv_layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALIGNMENT_BYTES = 64
"""Of the pool's first byte: a cache line."""


class PagedKvCache:
    """Pool tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, zeroed at the start.

    Raises FailedPrecondition when there is not the memory for it.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        heads = (layout.num_kv_heads, layout.block_size, layout.head_dim)
        shape = (num_blocks, layout.num_layers, 2, *heads)
        self.tensor = _zeroed(num_blocks * layout.block_bytes).view(TORCH_DTYPES[layout.dtype]).view(shape).to(device)
        self._bytes = self.tensor.view(torch.uint8).view(-1).numpy().data  # through uint8: NumPy has no bfloat16

    def block_view(self, block_id: int) -> memoryview:
        """The slab of a block as writable raw bytes."""
        assert 0 <= block_id < self.num_blocks
        start = block_id * self.layout.block_bytes
        return self._bytes[start : start + self.layout.block_bytes]

    def populate(self) -> None:
        """Brings in the pages, which else come when a block is first written, and make it late."""
        populate(self.tensor.data_ptr(), len(self._bytes))

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        """A copy of the slab in which the slots from `num_tokens` on are zero, so equal contents have equal bytes."""
        assert 0 <= num_tokens <= self.layout.block_size
        slab = self.tensor[block_id].clone()  # [num_layers, 2, num_kv_heads, block_size, head_dim]
        slab[:, :, :, num_tokens:] = 0
        return slab.view(torch.uint8).numpy().tobytes()


def _zeroed(num_bytes: int) -> torch.Tensor:
    """Zero bytes whose pages come when touched; `torch.zeros` touches all of them at once, seconds for a large pool."""
    try:
        memory = np.zeros(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:  # the latter two: more than an address can hold
        raise FailedPrecondition(
            f"there is no memory for a pool of {num_bytes} bytes; lower engine.num_blocks or engine.kv_memory_bytes"
        ) from error
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])
