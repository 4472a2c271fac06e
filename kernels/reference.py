"""Paged attention, and products with weights that are codes, in plain PyTorch: the truth that every faster version is
compared with.

The pool is one tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, keys at 0 and values at 1 of
the third axis. A step's tokens are flattened: the queries of sequence i are rows `cu_seqlens_q[i]` to
`cu_seqlens_q[i + 1]`, the last of its `context_lengths[i]` tokens. Decode rows and prefill chunks over a cached prefix
may be mixed. The keys and values of the step's own tokens are written with `write_kv` before `paged_attention` reads.

Nothing outside a sequence's own context reaches its result, not even as 0 · NaN: slots of others are zeroed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_SCORES = 512 * 1024
"""Most attention scores held at once: 2 MiB of float32, about a second-level cache; longer chunks go in pieces."""


def write_kv(cache: Tensor, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write the step's keys and values to their slots.

    Args:
        cache: the pool, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        layer: index of the layer.
        key, value: `[num_tokens, num_kv_heads, head_dim]`.
        slot_mapping: `[num_tokens]` int64, block id · block_size + offset.
    """
    block_size = cache.shape[4]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    cache[:, layer, 0][blocks, :, offsets] = key.to(cache.dtype)
    cache[:, layer, 1][blocks, :, offsets] = value.to(cache.dtype)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    layer: int,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lengths: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of every query row over its sequence's blocks, computed in float32.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; num_heads is a multiple of num_kv_heads (grouped queries).
        cache: the pool, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        layer: index of the layer.
        block_tables: `[num_seqs, max_blocks]` int64; columns past a sequence's context may hold any valid block id.
        cu_seqlens_q: `[num_seqs + 1]` int64, first query row of each sequence and the end.
        context_lengths: `[num_seqs]` int64, tokens of each sequence including this step's.
        scaling: factor on the scores.
        sliding_window: a token sees this many tokens, itself included; None: all.
        softcap: scores become `softcap · tanh(score / softcap)`; None: unchanged.

    Returns:
        `[num_tokens, num_heads, head_dim]` in the query's dtype.
    """
    output = torch.empty_like(query)
    block_size = cache.shape[4]
    for group in _groups(cu_seqlens_q.tolist(), context_lengths.tolist(), block_size, sliding_window):
        tables = block_tables[group.sequences, group.first_block : group.last_block]  # [n, blocks]
        keys = _gather(cache[:, layer, 0], tables)  # [KVH, n, slots, D]
        values = _gather(cache[:, layer, 1], tables)
        group_query = query[group.rows].view(len(group.sequences), group.num_queries, *query.shape[1:])  # [n, T, H, D]
        mixed = _attend_in_pieces(group_query, keys, values, group, block_size, scaling, sliding_window, softcap)
        output[group.rows] = mixed.flatten(0, 1).to(query.dtype)
    return output


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences computed together: `num_queries` queries each, over columns first_block … last_block of the table."""

    sequences: list[int]
    rows: list[int]
    context_lengths: list[int]
    num_queries: int
    first_block: int
    last_block: int


def _groups(
    cu_seqlens_q: list[int], context_lengths: list[int], block_size: int, sliding_window: int | None
) -> Iterator[_Group]:
    """Each prefill chunk alone; decode rows together where their block counts lie in the same power of two."""
    together: dict[tuple[int, int], list[int]] = {}
    for sequence, context in enumerate(context_lengths):
        num_queries = cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence]
        if num_queries == 1:
            together.setdefault((1, (context // block_size).bit_length()), []).append(sequence)
        elif num_queries > 1:
            together[(num_queries, -1 - sequence)] = [sequence]
    for (num_queries, _), sequences in together.items():
        contexts = [context_lengths[sequence] for sequence in sequences]
        first_visible = 0 if sliding_window is None else max(0, min(contexts) - num_queries - sliding_window + 1)
        yield _Group(
            sequences=sequences,
            rows=[row for seq in sequences for row in range(cu_seqlens_q[seq], cu_seqlens_q[seq + 1])],
            context_lengths=contexts,
            num_queries=num_queries,
            first_block=first_visible // block_size,
            last_block=-(-max(contexts) // block_size),
        )


def _gather(layer_cache: Tensor, tables: Tensor) -> Tensor:
    """`[num_blocks, KVH, B, D]` and `[n, blocks]` → `[KVH, n, blocks · B, D]`, in float32."""
    gathered = layer_cache.transpose(0, 1)[:, tables]  # [KVH, n, blocks, B, D]
    return gathered.flatten(2, 3).float()


def _attend_in_pieces(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: _Group,
    block_size: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """`query` `[n, T, H, D]`, keys and values `[KVH, n, slots, D]` → `[n, T, H, D]`, at most MOST_SCORES at a time."""
    num_seqs, num_queries, num_heads, _ = query.shape
    first_slot = group.first_block * block_size
    ends = torch.tensor(group.context_lengths)  # [n]
    positions = torch.arange(first_slot, first_slot + keys.shape[2])  # [slots]
    for sequence, end in enumerate(group.context_lengths):
        values[:, sequence, end - first_slot :] = 0.0  # slots of nobody, or of others
    rows_a_time = max(1, MOST_SCORES // (num_seqs * num_heads * keys.shape[2]))
    pieces = []
    for start in range(0, num_queries, rows_a_time):
        piece = query[:, start : start + rows_a_time]
        offsets = torch.arange(start, start + piece.shape[1])
        query_positions = (ends - num_queries)[:, None] + offsets  # [n, T']
        visible = positions <= query_positions[..., None]  # [n, T', slots]
        if sliding_window is not None:
            visible &= positions > query_positions[..., None] - sliding_window
        pieces.append(_attend(piece, keys, values, visible, scaling, softcap))
    return torch.cat(pieces, dim=1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """`query` `[n, T, H, D]`, keys and values `[KVH, n, slots, D]`, `visible` `[n, T, slots]` → `[n, T, H, D]`."""
    num_kv_heads, num_seqs, num_slots, head_dim = keys.shape
    num_queries, num_groups = query.shape[1], query.shape[2] // num_kv_heads
    grouped = query.float().view(num_seqs, num_queries, num_kv_heads, num_groups, head_dim)
    packed = grouped.permute(2, 0, 3, 1, 4).reshape(num_kv_heads, num_seqs, num_groups * num_queries, head_dim)
    scores = packed @ keys.transpose(2, 3) * scaling  # [KVH, n, G · T, slots]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(num_kv_heads, num_seqs, num_groups, num_queries, num_slots)
    weights = torch.softmax(scores.masked_fill_(~visible[:, None], -torch.inf), dim=-1)
    mixed = weights.flatten(2, 3) @ values  # [KVH, n, G · T, D]
    unpacked = mixed.view(num_kv_heads, num_seqs, num_groups, num_queries, head_dim).permute(1, 3, 0, 2, 4)
    return unpacked.flatten(2, 3)  # [n, T, H, D]


def linear_of_codes(rows: Tensor, codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Products of rows that are rounded to bytes with weights scale · code + minimum.

    Args:
        rows: `[num_rows, num_inputs]` float32; every 32 values are rounded to 255 steps around 0, up to their largest.
        codes: `[num_outputs, groups, 32]` uint8.
        scales, minimums: `[num_outputs, groups]` float32.

    Returns:
        `[num_rows, num_outputs]` float32; sums of a group's codes and bytes are exact, groups are added in order.
    """
    groups = rows.view(len(rows), -1, codes.shape[2])
    row_scales = groups.abs().amax(dim=2) / 127.0  # [rows, groups]
    steps = groups * torch.where(row_scales == 0.0, 0.0, 1.0 / row_scales)[..., None]
    in_bytes = steps.round().double()
    whole = torch.einsum("rgi,ogi->rog", in_bytes, codes.double()).float()  # below 2 to the power of 24
    values = whole * scales + in_bytes.sum(dim=2).float()[:, None] * minimums
    output = torch.zeros(len(rows), len(codes))
    for group in range(codes.shape[1]):
        output += values[:, :, group] * row_scales[:, None, group]
    return output
