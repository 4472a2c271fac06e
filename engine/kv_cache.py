"""The KV memory of one process: a pool of blocks, each one contiguous slab with all layers of its tokens.

The attention function writes and reads the tensor; shipping, receiving and copying use the raw bytes of a block. Who
may use which block is the block manager's business.
"""

from __future__ import annotations

import torch

from kvferry.kv_layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PagedKvCache:
    """Pool tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, zeroed at the start."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        heads = (layout.num_kv_heads, layout.block_size, layout.head_dim)
        shape = (num_blocks, layout.num_layers, 2, *heads)
        self.tensor = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)  # pages come when touched
        self._bytes = self.tensor.view(torch.uint8).view(-1).numpy().data  # through uint8: NumPy has no bfloat16

    def block_view(self, block_id: int) -> memoryview:
        """The slab of a block as writable raw bytes."""
        assert 0 <= block_id < self.num_blocks
        start = block_id * self.layout.block_bytes
        return self._bytes[start : start + self.layout.block_bytes]

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        """A copy of the slab in which the slots from `num_tokens` on are zero, so equal contents have equal bytes."""
        assert 0 <= num_tokens <= self.layout.block_size
        slab = self.tensor[block_id].clone()  # [num_layers, 2, num_kv_heads, block_size, head_dim]
        slab[:, :, :, num_tokens:] = 0
        return slab.view(torch.uint8).numpy().tobytes()
