"""The runner for transformers models: one flattened forward over the paged KV cache, then sampling.

A step goes: slices → `PagedBatch` (tensors) → model forward, whose attention writes and reads the pool → logits of the
rows that sample or are scored → `sample_slices`, `score_rows`.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch
from torch import Tensor

from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.kv_cache import PagedKvCache
from engine.loader import load_model
from engine.paged_attention import build_paged_batch
from engine.runner import RunnerConfig
from engine.sampler import sample_slices, score_rows
from kernels.decoder import NativeKernels
from kernels.native import NativeMissing, open_native
from kernels.reference import paged_attention
from kvferry.errors import FailedPrecondition
from kvferry.host_memory import give_back_freed

logger = logging.getLogger(__name__)


class ModelRunner:
    """A `Runner` (`engine/runner.py`). Sets the number of torch threads of the process."""

    def __init__(self, folder: Path, config: RunnerConfig) -> None:
        torch.set_num_threads(config.num_threads)
        kernels = open_kernels(config)
        self._attend = paged_attention if kernels is None else kernels.paged_attention
        self._loaded = load_model(
            folder,
            dtype=config.dtype,
            block_size=config.block_size,
            max_context=config.max_context,
            kernels=kernels,
            packed_folder=config.kernels_folder,
            quantization=config.quantization,
        )
        gc.collect()  # transformers' layers, where they are not used: they refer to each other
        give_back_freed()
        self.layout = self._loaded.layout
        self.max_context = self._loaded.max_context
        self.vocab_size = self._loaded.vocab_size
        self.window = self._loaded.window
        self.suits_drafts = config.dtype == "float32" or self._loaded.is_batch_invariant
        self.num_blocks = config.pool_blocks(self.layout)
        self._cache = PagedKvCache(self.layout, self.num_blocks, config.device)

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        """Compute one step: one entry a slice, None where the slice asked for nothing."""
        if not slices:
            return []
        batch = build_paged_batch(slices, self.layout.block_size, self._cache.tensor, on_kv_written, self._attend)
        sampling = [index for index, part in enumerate(slices) if part.sample is not None]
        scoring = [index for index, part in enumerate(slices) if part.score is not None]
        rows = _sampled_rows(batch.cu_seqlens_q[1:][sampling], [slices[index].num_draft_tokens for index in sampling])
        num_sampled_rows = len(rows)
        if scoring:
            scored = [_scored_rows(slices[index], int(batch.cu_seqlens_q[index])) for index in scoring]
            rows = torch.cat([rows, *scored])
        logits = self._loaded.forward.logits(batch, rows)  # [len(rows), vocab_size]
        sampled = sample_slices(logits[:num_sampled_rows], [slices[index] for index in sampling])
        results: list[Sampled | None] = [None] * len(slices)
        for index, one in zip(sampling, sampled, strict=True):
            results[index] = one
        first = num_sampled_rows
        for index in scoring:
            request = slices[index].score
            assert request is not None
            last = first + len(request.token_ids)
            results[index] = score_rows(logits[first:last], request).joined(results[index])
            first = last
        return results

    def block_view(self, block_id: int) -> memoryview:
        return self._cache.block_view(block_id)

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        return self._cache.copy_partial(block_id, num_tokens)

    def populate(self) -> None:
        self._cache.populate()


def open_kernels(config: RunnerConfig) -> NativeKernels | None:
    """The native kernels as `config` wants them; None: the reference computes.

    Raises FailedPrecondition where they must be there and are not.
    """
    if config.kernels == "reference":
        return None
    try:
        return NativeKernels(open_native(config.kernels_folder), config.num_threads)
    except NativeMissing as error:
        if config.kernels == "native":
            raise FailedPrecondition(f"engine.kernels is native, but {error}") from error
        logger.warning("%s: every step takes much longer on plain torch", error)
        return None


def _sampled_rows(ends: Tensor, draft_lengths: list[int]) -> Tensor:
    """Rows of the step whose logits are sampled from: of each slice, that ends before row `ends[i]`, the last known
    token's and those of its draft."""
    if not any(draft_lengths):
        return ends - 1
    parts = zip(ends.tolist(), draft_lengths, strict=True)
    return torch.cat([torch.arange(end - 1 - num_drafted, end) for end, num_drafted in parts])


def _scored_rows(part: SequenceSlice, offset: int) -> Tensor:
    """Rows of the step, of which the slice's begin at `offset`, whose logits say how likely the scored tokens are."""
    assert part.score is not None
    first = offset + part.score.first_row
    return torch.arange(first, first + len(part.score.token_ids))
