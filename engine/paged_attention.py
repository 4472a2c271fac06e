"""Paged attention as transformers sees it: one attention function, and the tensors of a step that it needs.

`ModelRunner` builds a `PagedBatch` from the step's slices and passes it to the model's forward as the keyword argument
`paged_batch`. Every attention layer hands its keyword arguments on to the attention function, which writes the layer's
keys and values to their slots and attends over the block tables. The mask is None, so causality and window are applied
there. No cache object of transformers takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from engine.forward_batch import SequenceSlice
from kernels.reference import paged_attention, write_kv

ATTENTION_NAME = "kvferry_paged"

Attend = Callable[..., Tensor]
"""`kernels.reference.paged_attention`, or what computes the same."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of the attention function; kept by the dry run at load time."""

    layer: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None
    is_causal: bool
    other_arguments: tuple[str, ...]  # names of arguments that are set and would be ignored


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Tensors of one step. T: its tokens, S: its sequences.

    Attributes:
        cache: the pool, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; None in a dry run.
        input_ids, position_ids: `[1, T]` int64.
        slot_mapping: `[T]` int64, the slot each token's keys and values go to.
        block_tables: `[S, max_blocks]` int64, padded with block 0.
        cu_seqlens_q: `[S + 1]` int64.
        context_lengths: `[S]` int64.
        calls: dry run only: filled with what each layer asked for.
        on_kv_written: called when the last layer's keys and values are in the cache.
        attend: computes attention.
    """

    cache: Tensor | None
    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lengths: Tensor
    calls: list[AttentionCall] = field(default_factory=list)
    on_kv_written: Callable[[], None] | None = None
    attend: Attend = paged_attention


def build_paged_batch(
    slices: Sequence[SequenceSlice],
    block_size: int,
    cache: Tensor | None,
    on_kv_written: Callable[[], None] | None = None,
    attend: Attend = paged_attention,
) -> PagedBatch:
    """Flatten the slices into one row of tokens."""
    lengths = np.array([len(part.token_ids) for part in slices])
    starts = np.array([part.start for part in slices])
    assert lengths.all(), "every slice computes at least one token"
    context_lengths = starts + lengths
    num_blocks = -(-context_lengths // block_size)
    tables = np.zeros((len(slices), num_blocks.max()), dtype=np.int64)
    for row, (part, count) in enumerate(zip(slices, num_blocks.tolist(), strict=True)):
        assert len(part.block_table) >= count, f"{part.seq_id}: block table shorter than its context"
        tables[row, :count] = part.block_table[:count]
    offsets = np.concatenate([[0], lengths.cumsum()])
    rows = np.repeat(np.arange(len(slices)), lengths)  # [T], the sequence of each token
    positions = np.arange(offsets[-1]) + (starts - offsets[:-1])[rows]
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return PagedBatch(
        cache=cache,
        input_ids=torch.tensor([[token for part in slices for token in part.token_ids]]),
        position_ids=torch.from_numpy(positions)[None],
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        cu_seqlens_q=torch.from_numpy(offsets),
        context_lengths=torch.from_numpy(context_lengths),
        on_kv_written=on_kv_written,
        attend=attend,
    )


def register_attention() -> None:
    """Make the attention function known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, KVH, T, D], rotated, not repeated
    value: Tensor,  # [1, KVH, T, D]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_batch: PagedBatch,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function; returns `[1, T, H, D]` and no weights."""
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int)
    if paged_batch.cache is None:
        masked = () if attention_mask is None else ("attention_mask",)
        paged_batch.calls.append(_describe(module, layer, key, value, sliding_window, masked, others))
        return value.transpose(1, 2).repeat_interleave(query.shape[1] // value.shape[1], dim=2), None
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, KVH, D]
    write_kv(paged_batch.cache, layer, keys, values, paged_batch.slot_mapping)
    if paged_batch.on_kv_written is not None and layer == paged_batch.cache.shape[1] - 1:
        paged_batch.on_kv_written()
    mixed = paged_batch.attend(
        query[0].transpose(0, 1),
        paged_batch.cache,
        layer,
        paged_batch.block_tables,
        paged_batch.cu_seqlens_q,
        paged_batch.context_lengths,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return mixed[None], None


HARMLESS_ARGUMENTS = frozenset({"dropout", "position_ids", "position_embeddings", "is_causal", "cache_position"})
"""Arguments that change nothing here: dropout is 0 at inference, positions were applied by the rotation."""


def _describe(
    module: torch.nn.Module,
    layer: int,
    key: Tensor,
    value: Tensor,
    sliding_window: int | None,
    masked: tuple[str, ...],
    others: dict[str, object],
) -> AttentionCall:
    causal = others.get("is_causal")
    asked = {name for name, given in others.items() if given is not None and given is not False}
    ignored = sorted(asked - HARMLESS_ARGUMENTS)
    return AttentionCall(
        layer=layer,
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_head_dim=value.shape[3],
        sliding_window=sliding_window,
        is_causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        other_arguments=(*masked, *ignored),
    )
