"""Blocks as raw bytes and as a tensor are the same memory."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache import TORCH_DTYPES, PagedKvCache
from kvferry.errors import FailedPrecondition
from kvferry.kv_layout import KvLayout


def make_cache(dtype: str = "float32") -> PagedKvCache:
    return PagedKvCache(KvLayout(2, 3, 4, 8, dtype, "model"), num_blocks=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_view_is_the_blocks_memory(dtype: str) -> None:
    cache = make_cache(dtype)
    view = cache.block_view(3)
    assert len(view) == cache.layout.block_bytes
    assert not view.readonly
    ones = torch.ones(2, 2, 3, 8, 4, dtype=TORCH_DTYPES[dtype])
    view[:] = ones.view(torch.uint8).numpy().tobytes()
    assert torch.equal(cache.tensor[3], ones)
    assert cache.tensor[2].count_nonzero() == cache.tensor[4].count_nonzero() == 0
    cache.tensor[3, 0, 0, 0, 0, 0] = 0
    assert bytes(view[: ones.element_size()]) == bytes(ones.element_size())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8])
def test_partial_copy_has_zeroed_tail(dtype: str, num_tokens: int) -> None:
    cache = make_cache(dtype)
    cache.tensor[1] = torch.randn(2, 2, 3, 8, 4).to(TORCH_DTYPES[dtype])
    before = bytes(cache.block_view(1))
    copied = cache.copy_partial(1, num_tokens)
    cache.block_view(2)[:] = copied
    assert torch.equal(cache.tensor[2, ..., :num_tokens, :], cache.tensor[1, ..., :num_tokens, :])
    assert cache.tensor[2, ..., num_tokens:, :].count_nonzero() == 0
    assert bytes(cache.block_view(1)) == before


def test_a_block_outside_the_pool_is_our_own_fault() -> None:
    cache = make_cache()
    for block_id in (-1, 5):
        with pytest.raises(AssertionError):
            cache.block_view(block_id)


@pytest.mark.parametrize("num_blocks", [1 << 47, 1 << 80])
def test_a_pool_too_large_for_memory_is_refused_by_name(num_blocks: int) -> None:
    layout = KvLayout(2, 3, 4, 8, "float32", "model")
    words = rf"{num_blocks * layout.block_bytes} bytes; lower engine\.num_blocks or engine\.kv_memory_bytes"
    with pytest.raises(FailedPrecondition, match=words):
        PagedKvCache(layout, num_blocks)
