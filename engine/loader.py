"""Load a model folder into a transformers model whose attention runs over our blocks, or refuse it with the reason.

What cannot be exact is refused here, not found out later as a slightly wrong token: the folder is checked file by
file, the configuration is searched for what paged attention lacks, no weight may be missing (transformers would fill it
with random numbers), a dry run notes what every layer asks of the attention function, and a short prompt computed in
two chunks over scattered blocks has to give the logits of transformers' own attention.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.forward_batch import SequenceSlice
from engine.kv_cache import TORCH_DTYPES, PagedKvCache
from engine.lean_decoder import is_made_of_codes, lean_decoder
from engine.model_folder import check_model_folder, model_fingerprint
from engine.paged_attention import (
    ATTENTION_NAME,
    Attend,
    AttentionCall,
    PagedBatch,
    build_paged_batch,
    register_attention,
)
from kernels.decoder import PACKING, NativeKernels
from kernels.groups import NIBBLES
from kernels.reference import paged_attention
from kvferry.errors import FailedPrecondition
from kvferry.kv_layout import KvLayout

logger = logging.getLogger(__name__)

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
RESCALING_ROPE_TYPES = frozenset({"dynamic", "longrope"})
CHECK_TOKENS, CHECK_CHUNK, CHECK_BLOCK = 24, 15, 4
WEIGHT_DTYPES = {"int8": torch.int8, "int4": NIBBLES}
LARGEST_DEVIATION = {"float32": 1e-3, "bfloat16": 0.15, "int8": 0.3, "int4": 0.3}
"""Median over the checked positions of |ours - theirs| / |theirs|: rounding is far below, a dropped term far above.
With int4 theirs are made with the same rounded weights."""


class Forward(Protocol):
    """The forward pass of a model."""

    def logits(self, batch: PagedBatch, rows: Tensor) -> Tensor:
        """Forward one step; float32 logits `[len(rows), vocab_size]` of the flattened rows `rows` only."""


@dataclass(frozen=True, slots=True)
class GenericForward:
    """Transformers' own layers around our attention."""

    model: PreTrainedModel

    def logits(self, batch: PagedBatch, rows: Tensor) -> Tensor:
        """A `Forward`."""
        return forward_logits(self.model, batch, rows)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for paged attention and what is known of it; `window` as in `engine/runner.py`.

    `is_batch_invariant`: a row's logits are the same to the bit whatever is beside it.
    """

    forward: Forward
    layout: KvLayout
    max_context: int
    vocab_size: int
    window: int | None
    is_batch_invariant: bool


def load_model(
    folder: Path,
    *,
    dtype: str,
    block_size: int,
    max_context: int | None = None,
    kernels: NativeKernels | None = None,
    packed_folder: Path | None = None,
    quantization: str = "none",
) -> LoadedModel:
    """Load the model in `folder` with weights and KV in `dtype` ("float32" or "bfloat16").

    With `kernels` a model of Llama's family runs on them as a whole, of any other its attention. Packed weights are
    kept in `packed_folder`, if there is one. `quantization`: "int8" and "int4" hold the weights of the linears as codes
    (`kernels.decoder.pack`), where `kernels` run a model of Llama's family; "auto" is "int4" where that rounds nothing.

    Raises:
        FailedPrecondition: a file is missing or damaged, a tensor is missing, or the model cannot be served exactly.
    """
    check_model_folder(folder)
    config = _read_config(folder)
    limit = _context_limit(folder, config, max_context)
    _refuse_by_config(folder, config, limit)
    model = _read_weights(folder, config, _dtype_to_read(config, dtype, quantization))
    calls = _dry_run(folder, model)
    _refuse_by_calls(folder, config, calls)
    asked = quantization
    if asked == "auto":
        quantization = "none" if kernels is None or not is_made_of_codes(model, calls) else "int4"
        logger.info("%s: quantization auto is %s", folder, quantization)
    if quantization == "none" and model.dtype != TORCH_DTYPES[dtype]:
        model = _read_weights(folder, config, dtype)
    layout = KvLayout(
        num_layers=len(calls),
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        block_size=block_size,
        dtype=dtype,
        model_fingerprint=quantised_fingerprint(model_fingerprint(folder), quantization),
        rope_digest=_rope_digest(config),
    )
    packed_file = packed_folder and packed_folder / _packed_name(layout)
    kv_dtype, weights_dtype = TORCH_DTYPES[dtype], WEIGHT_DTYPES.get(quantization, TORCH_DTYPES[dtype])
    lean = None if kernels is None else lean_decoder(model, calls, kernels, kv_dtype, weights_dtype, packed_file)
    if lean is None and quantization != "none":
        raise FailedPrecondition(
            f"{folder}: quantization {quantization} needs a model of Llama's family, sizes that are multiples of 32, "
            "and native kernels"
        )
    if asked == "auto" and lean is not None and lean.num_rounded:
        raise FailedPrecondition(
            f"{folder}: quantization auto: {lean.num_rounded} linear(s) would be rounded; say none or int4"
        )
    forward = lean or GenericForward(model)
    attend = paged_attention if kernels is None else kernels.paged_attention
    limit_of = LARGEST_DEVIATION[dtype if quantization == "none" else quantization]
    vocab_size = _compare_with_eager(folder, model, layout, forward, attend, limit_of)
    return LoadedModel(forward, layout, limit, vocab_size, _widest_window(calls), is_batch_invariant=lean is not None)


def _dtype_to_read(config: PreTrainedConfig, dtype: str, quantization: str) -> str:
    """The folder's own where codes are looked for in its weights: rounded to bfloat16 they would be lost."""
    return "float32" if quantization in ("auto", "int4") and config.dtype != torch.bfloat16 else dtype


def quantised_fingerprint(fingerprint: str, quantization: str) -> str:
    """Of the weights as they compute: rounded ones are others, whose blocks must not meet the exact ones'."""
    if quantization == "none":
        return fingerprint
    return hashlib.sha256(f"{fingerprint}:{quantization}".encode()).hexdigest()


def _packed_name(layout: KvLayout) -> str:
    return f"weights-{PACKING}-{layout.model_fingerprint[:32]}-{layout.dtype}.safetensors"


def _rope_digest(config: PreTrainedConfig) -> str:
    """By its parameters, which are the same on every machine; its frequencies may differ in the last bit."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return "none"
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:16]


def _widest_window(calls: list[AttentionCall]) -> int | None:
    """Tokens the widest layer attends to; None where one attends to all."""
    windows = [call.sliding_window for call in calls]
    return None if None in windows else max(window for window in windows if window is not None)


@torch.inference_mode()
def forward_logits(model: PreTrainedModel, batch: PagedBatch, rows: Tensor) -> Tensor:
    """Float32 logits `[len(rows), vocab_size]`; the output layer runs on those rows only where the model allows it."""
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    selection = {"logits_to_keep": rows} if selects else {}
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        paged_batch=batch,
        **selection,
    )
    logits: Tensor = output.logits[0]  # [rows or T, V]
    return (logits if selects else logits[rows]).float()


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises anything; the reason is passed on
        raise FailedPrecondition(f"{folder / 'config.json'}: not a usable configuration ({error})") from error
    return config


def _context_limit(folder: Path, config: PreTrainedConfig, max_context: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None)
    given = [limit for limit in (own, max_context) if isinstance(limit, int)]
    if not given:
        raise FailedPrecondition(f"{folder / 'config.json'}: says no max_position_embeddings; set max_context")
    return min(given)


def _refuse_by_config(folder: Path, config: PreTrainedConfig, max_context: int) -> None:
    if getattr(config, "_heterogeneity_spec", None) is not None:  # reading anything else of it may raise
        raise FailedPrecondition(f"{folder}: {config.model_type} has layers with configurations of their own")
    reasons = {
        "is an encoder-decoder model": config.is_encoder_decoder,
        "is a multimodal model; only text models are served": config.get_text_config() is not config,
        "has quantised weights": getattr(config, "quantization_config", None) is not None,
        "has chunked attention": getattr(config, "attention_chunk_size", None) is not None,
        "has bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        f"has layers other than {' and '.join(sorted(SUPPORTED_LAYER_TYPES))}": bool(
            set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
        ),
        f"rescales its rotary embedding within max_context {max_context}, by the longest sequence of a batch; "
        "set max_context to its original length": _rope_can_rescale(config, max_context),
    }
    for reason, applies in reasons.items():
        if applies:
            raise FailedPrecondition(f"{folder}: {config.model_type} {reason}")


def _rope_can_rescale(config: PreTrainedConfig, max_context: int) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for rope in nested or [parameters]:
        original = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 0
        if rope.get("rope_type") in RESCALING_ROPE_TYPES and max_context > original:
            return True
    return False


def _read_weights(folder: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    register_attention()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused by name below
            output_loading_info=True,
        )
    except Exception as error:  # the library raises anything; the reason is passed on
        raise FailedPrecondition(f"{folder}: its weights cannot be loaded ({error})") from error
    model: PreTrainedModel = loaded[0]
    _refuse_by_tensors(folder, loaded[1])
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _refuse_by_tensors(folder: Path, info: Mapping[str, Any]) -> None:
    """Weights that transformers would make up; tensors that it does not use are only worth a warning."""
    missing, mismatched, unexpected = (
        sorted(info[kind]) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")
    )
    if missing:
        raise FailedPrecondition(
            f"{folder}: {len(missing)} tensor(s) of the model are in no weight file, the first is {missing[0]}"
        )
    for name, in_file, in_model in mismatched:
        raise FailedPrecondition(f"{folder}: tensor {name} has shape {list(in_file)}, the model needs {list(in_model)}")
    if unexpected:
        logger.warning("%s: %d tensor(s) are not used, the first is %s", folder, len(unexpected), unexpected[0])


def _dry_run(folder: Path, model: PreTrainedModel) -> list[AttentionCall]:
    """Which layers call the attention function, and what they ask of it, in order of their index."""
    part = SequenceSlice("dry run", token_ids=[0, 0], start=0, block_table=[0], sample=None)
    batch = build_paged_batch([part], CHECK_BLOCK, cache=None)
    try:
        forward_logits(model, batch, torch.tensor([1]))
    except Exception as error:  # whatever goes wrong is a reason to refuse the model
        raise FailedPrecondition(
            f"{folder}: {type(model).__name__} does not run on paged attention ({type(error).__name__}: {error})"
        ) from error
    return sorted(batch.calls, key=lambda call: call.layer)


def _refuse_by_calls(folder: Path, config: PreTrainedConfig, calls: list[AttentionCall]) -> None:
    name = f"{folder}: {config.model_type}"
    num_layers = config.num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise FailedPrecondition(
            f"{name} has {num_layers} layers, of which {len(calls)} call the attention function with an index of "
            "their own: some keep another kind of state"
        )
    if len({(call.num_kv_heads, call.head_dim) for call in calls}) > 1:
        raise FailedPrecondition(f"{name} has layers with different numbers or sizes of KV heads")
    for call in calls:
        _refuse_call(name, config, call)


def _refuse_call(name: str, config: PreTrainedConfig, call: AttentionCall) -> None:
    window = _configured_window(config, call.layer)
    reasons = {
        f"has keys of {call.head_dim} and values of {call.value_head_dim} elements (latent attention)": call.head_dim
        != call.value_head_dim,
        f"needs {', '.join(call.other_arguments)} in attention, which paged attention lacks": bool(
            call.other_arguments
        ),
        "is not causal": not call.is_causal,
        f"is configured with window {window} but asks for {call.sliding_window}": window != call.sliding_window,
    }
    for reason, applies in reasons.items():
        if applies:
            raise FailedPrecondition(f"{name} layer {call.layer} {reason}")


def _configured_window(config: PreTrainedConfig, layer: int) -> int | None:
    """The window that the layer has according to the configuration."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return window if layer_types[layer] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def _compare_with_eager(
    folder: Path, model: PreTrainedModel, layout: KvLayout, forward: Forward, attend: Attend, largest_deviation: float
) -> int:
    """Refuse a model whose logits on paged attention are not those of transformers; returns the vocabulary's size."""
    token_ids = [(7 * position + 3) % min(model.config.vocab_size, 97) for position in range(CHECK_TOKENS)]
    small = KvLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, CHECK_BLOCK, layout.dtype, "")
    cache = PagedKvCache(small, CHECK_TOKENS // CHECK_BLOCK)
    block_table = list(reversed(range(cache.num_blocks)))
    for start, end in ((0, CHECK_CHUNK), (CHECK_CHUNK, CHECK_TOKENS)):
        part = SequenceSlice("check", token_ids[start:end], start, block_table, sample=None)
        batch = build_paged_batch([part], CHECK_BLOCK, cache.tensor, attend=attend)
        ours = forward.logits(batch, torch.arange(end - start))  # [rows, V]; those of the second chunk stay
    theirs = _with_eager(model, lambda: _plain_logits(model, token_ids))[CHECK_CHUNK:]
    deviation = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median().item()
    if not deviation <= largest_deviation:
        raise FailedPrecondition(
            f"{folder}: {type(model).__name__} computes something else on paged attention than on its own "
            f"(logits deviate by {deviation:.2g}, at most {largest_deviation:.2g} is rounding)"
        )
    return int(ours.shape[1])


def _with_eager(model: PreTrainedModel, compute: Callable[[], Tensor]) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        return compute()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, token_ids: Iterable[int]) -> Tensor:
    """Logits `[tokens, V]` of transformers' own attention, in float32."""
    logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits
