"""The reference attention and the native one against plain attention over each sequence's own keys and values."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.paged_attention import Attend
from kernels import reference
from kernels.decoder import NativeKernels
from kernels.native import open_native
from kernels.reference import paged_attention, write_kv
from kvferry.config import Config

NUM_LAYERS, NUM_BLOCKS, LAYER = 2, 40, 1


@dataclass(frozen=True, slots=True)
class Sequences:
    """Queries, keys and values of sequences of `contexts` tokens, of which the last `num_queries` are computed."""

    num_queries: list[int]
    contexts: list[int]
    queries: list[Tensor]  # [q, H, D]
    keys: list[Tensor]  # [context, KVH, D]
    values: list[Tensor]


def make_sequences(
    num_queries: list[int], contexts: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Sequences:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, num_heads: int) -> Tensor:
        return torch.randn(count, num_heads, head_dim, generator=generator).to(dtype)

    return Sequences(
        num_queries,
        contexts,
        [draw(count, heads) for count in num_queries],
        [draw(count, kv_heads) for count in contexts],
        [draw(count, kv_heads) for count in contexts],
    )


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """Token by token and head by head, in float64."""
    num_queries, num_heads, _ = query.shape
    context, num_kv_heads, _ = keys.shape
    output = torch.empty(query.shape, dtype=torch.float64)
    for row in range(num_queries):
        position = context - num_queries + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            seen_keys = keys[first : position + 1, kv_head].double()
            scores = seen_keys @ query[row, head].double() * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            output[row, head] = torch.softmax(scores, 0) @ values[first : position + 1, kv_head].double()
    return output


@pytest.fixture(params=["reference", "native"])
def attend(request: pytest.FixtureRequest) -> Attend:
    if request.param == "reference":
        return paged_attention
    return NativeKernels(open_native(Config().model.kernels_path), num_threads=2).paged_attention


def paged(
    attend: Attend,
    sequences: Sequences,
    block_size: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    fill: float,
) -> Tensor:
    """The same through a pool whose other slots hold `fill`, over scattered blocks."""
    _, kv_heads, head_dim = sequences.keys[0].shape
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, kv_heads, block_size, head_dim)
    cache = torch.full(shape, fill, dtype=sequences.keys[0].dtype)
    free = random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = torch.zeros(len(sequences.contexts), max(-(-c // block_size) for c in sequences.contexts)).long()
    for row, context in enumerate(sequences.contexts):
        for column in range(-(-context // block_size)):
            tables[row, column] = free.pop()
        positions = torch.arange(context)
        slots = tables[row, positions // block_size] * block_size + positions % block_size
        write_kv(cache, LAYER, sequences.keys[row], sequences.values[row], slots)
    cu_seqlens = torch.tensor([0, *sequences.num_queries]).cumsum(0)
    return attend(
        torch.cat(sequences.queries),
        cache,
        LAYER,
        tables,
        cu_seqlens,
        torch.tensor(sequences.contexts),
        scaling=scaling,
        sliding_window=window,
        softcap=softcap,
    )


def expected(sequences: Sequences, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    rows = zip(sequences.queries, sequences.keys, sequences.values, strict=True)
    return torch.cat([plain_attention(query, keys, values, scaling, window, softcap) for query, keys, values in rows])


MIXED_QUERIES = [1, 1, 7, 1, 16, 1, 1]
MIXED_CONTEXTS = [1, 33, 7, 8, 40, 16, 64]


@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 24), (9, 3, 64), (4, 1, 80), (2, 1, 8)])
@pytest.mark.parametrize("block_size", [8, 16])
def test_mixed_batch(
    attend: Attend, window: int | None, softcap: float | None, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    sequences = make_sequences(MIXED_QUERIES, MIXED_CONTEXTS, heads, kv_heads, head_dim, torch.float32)
    ours = paged(attend, sequences, block_size, head_dim**-0.5, window, softcap, fill=0.0)
    right = expected(sequences, head_dim**-0.5, window, softcap)
    torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", range(1, 34))
def test_every_small_length_alone(attend: Attend, length: int) -> None:
    for num_queries in {1, length}:
        sequences = make_sequences([num_queries], [length], 4, 2, 16, torch.float32)
        ours = paged(attend, sequences, 16, 0.25, None, None, fill=0.0)
        torch.testing.assert_close(ours.double(), expected(sequences, 0.25, None, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 10])
def test_slots_of_others_cannot_spoil_a_row(attend: Attend, fill: float, window: int | None) -> None:
    sequences = make_sequences(MIXED_QUERIES, MIXED_CONTEXTS, 4, 2, 16, torch.float32)
    ours = paged(attend, sequences, 16, 0.25, window, None, fill=fill)
    torch.testing.assert_close(ours.double(), expected(sequences, 0.25, window, None), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_summed_in_float32(attend: Attend) -> None:
    """What is added up is float32; weights are rounded to bfloat16 before they meet values, and so is the output."""
    sequences = make_sequences(MIXED_QUERIES, MIXED_CONTEXTS, 4, 2, 64, torch.bfloat16)
    ours = paged(attend, sequences, 16, 0.125, None, None, fill=0.0)
    assert ours.dtype == torch.bfloat16
    right = expected(sequences, 0.125, None, None)
    torch.testing.assert_close(ours.double(), right, rtol=2**-7, atol=2e-3)


def test_long_chunks_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_sequences([40, 1], [60, 9], 4, 2, 16, torch.float32)
    whole = paged(paged_attention, sequences, 16, 0.25, None, None, fill=0.0)
    monkeypatch.setattr(reference, "MOST_SCORES", 4 * 64 * 7)  # seven query rows a piece
    pieces = paged(paged_attention, sequences, 16, 0.25, None, None, fill=0.0)
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-6)


def test_write_touches_only_its_layer_and_slots() -> None:
    cache = torch.zeros(3, NUM_LAYERS, 2, 2, 4, 8)
    key, value = torch.ones(2, 2, 8), torch.full((2, 2, 8), 2.0)
    write_kv(cache, LAYER, key, value, torch.tensor([4, 11]))
    assert torch.equal(cache[1, LAYER, 0, :, 0], key[0])
    assert torch.equal(cache[2, LAYER, 1, :, 3], value[1])
    assert cache.count_nonzero() == 4 * 2 * 8
