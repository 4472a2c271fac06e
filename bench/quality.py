"""What precision costs: perplexity and agreement with float32 over fixed texts, for every way to hold the weights.

    .venv/bin/python -m bench quality --json -

Perplexity: e to the mean negative log-likelihood of each next token. Agreement: share of places where the most likely
token is float32's. Deviation: median over the places of |logits - float32's| / |float32's|.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.forward_batch import SequenceSlice
from engine.kv_cache import PagedKvCache
from engine.loader import LoadedModel, load_model
from engine.paged_attention import build_paged_batch
from kernels.decoder import NativeKernels
from kernels.native import open_native
from kvferry.config import Config
from kvferry.model_store import ModelStore

TEXT = Path(__file__).parent / "texts" / "prose.txt"
NUM_TOKENS, CHUNK, BLOCK_SIZE = 4_096, 256, 16
VARIANTS = (("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"), ("float32", "int4"), ("bfloat16", "int4"))


def run_quality() -> list[dict[str, object]]:
    """One entry a variant, float32 first."""
    model = Config().model
    folder = ModelStore(model.cache_path).prepare(model.name, lambda _: None)
    kernels = NativeKernels(open_native(model.kernels_path), torch.get_num_threads())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT.read_text(), add_special_tokens=False).ids[:NUM_TOKENS]
    exact = _logits(load_model(folder, dtype="float32", block_size=BLOCK_SIZE, kernels=kernels), token_ids)
    rows = [_figures("float32", "none", exact, exact, token_ids)]
    for dtype, quantization in VARIANTS:
        loaded = load_model(folder, dtype=dtype, block_size=BLOCK_SIZE, kernels=kernels, quantization=quantization)
        rows.append(_figures(dtype, quantization, _logits(loaded, token_ids), exact, token_ids))
    return rows


def _logits(loaded: LoadedModel, token_ids: Sequence[int]) -> Tensor:
    """`[tokens, vocab_size]`."""
    cache = PagedKvCache(loaded.layout, -(-len(token_ids) // BLOCK_SIZE))
    table = list(range(cache.num_blocks))
    parts = []
    for start in range(0, len(token_ids), CHUNK):
        part = SequenceSlice("text", token_ids[start : start + CHUNK], start, table, sample=None)
        batch = build_paged_batch([part], BLOCK_SIZE, cache.tensor)
        parts.append(loaded.forward.logits(batch, torch.arange(len(part.token_ids))).clone())
    return torch.cat(parts)


def _figures(dtype: str, quantization: str, ours: Tensor, exact: Tensor, token_ids: Sequence[int]) -> dict[str, object]:
    loss = torch.nn.functional.cross_entropy(ours[:-1], torch.tensor(token_ids[1:]))
    deviation = (ours - exact).norm(dim=1) / exact.norm(dim=1)
    return {
        "dtype": dtype,
        "quantization": quantization,
        "num_tokens": len(token_ids),
        "perplexity": round(loss.exp().item(), 3),
        "agreement": round((ours.argmax(dim=1) == exact.argmax(dim=1)).float().mean().item(), 4),
        "deviation": round(deviation.median().item(), 5),
    }
