"""The tensors of a step, and the attention function as transformers calls it."""

from __future__ import annotations

import pytest
import torch

from engine.forward_batch import SequenceSlice
from engine.paged_attention import ATTENTION_NAME, build_paged_batch, paged_attention_forward, register_attention


class Layer(torch.nn.Module):
    """What the attention function looks at."""

    def __init__(self, layer_idx: int, *, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_causal = is_causal


def test_slices_become_one_row_of_tokens() -> None:
    slices = [
        SequenceSlice("a", [7, 8, 9], 3, [5, 2], None),  # positions 3, 4, 5 in blocks of 4
        SequenceSlice("b", [1], 0, [6, 9, 9], None),  # its table is longer than it needs
    ]
    batch = build_paged_batch(slices, 4, None)
    assert batch.input_ids.tolist() == [[7, 8, 9, 1]]
    assert batch.position_ids.tolist() == [[3, 4, 5, 0]]
    assert batch.slot_mapping.tolist() == [23, 8, 9, 24]
    assert batch.block_tables.tolist() == [[5, 2], [6, 0]]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.context_lengths.tolist() == [6, 1]


def test_a_block_table_that_is_too_short_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="block table"):
        build_paged_batch([SequenceSlice("a", [1, 2], 3, [5], None)], 4, None)


def test_the_function_writes_its_layer_and_returns_rows_first() -> None:
    cache = torch.zeros(2, 3, 2, 1, 4, 8)
    batch = build_paged_batch([SequenceSlice("a", [1, 2], 0, [1], None)], 4, cache)
    query, key, value = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    mixed, weights = paged_attention_forward(Layer(2), query, key, value, None, scaling=1.0, paged_batch=batch)
    assert weights is None
    assert mixed.shape == (1, 2, 2, 8)
    torch.testing.assert_close(mixed[0, 0], value[0, :, 0].expand(2, 8))  # the first token sees only itself
    assert torch.equal(cache[1, 2, 0, 0, :2], key[0, 0])
    assert torch.equal(cache[1, 2, 1, 0, :2], value[0, 0])
    assert cache[:, :2].count_nonzero() == 0


def test_a_dry_run_notes_what_would_be_ignored() -> None:
    batch = build_paged_batch([SequenceSlice("a", [1], 0, [0], None)], 4, None)
    tensor = torch.zeros(1, 2, 1, 8)
    mixed, _ = paged_attention_forward(
        Layer(1, is_causal=False), torch.zeros(1, 4, 1, 8), tensor, tensor, None,
        scaling=1.0, sliding_window=3, paged_batch=batch, s_aux=torch.ones(4), position_bias=None, dropout=0.0,
    )  # fmt: skip
    assert mixed.shape == (1, 1, 4, 8)
    (call,) = batch.calls
    assert (call.layer, call.num_kv_heads, call.head_dim, call.value_head_dim) == (1, 2, 8, 8)
    assert call.sliding_window == 3
    assert not call.is_causal
    assert call.other_arguments == ("s_aux",)


def test_registering_twice_is_fine() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register_attention()
    register_attention()
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is paged_attention_forward
