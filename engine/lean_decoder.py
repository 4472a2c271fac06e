"""Models of Llama's family, Gemma 3 too, without their layers in transformers: the embedding, then one native call.

    `lean_decoder(model, …)` packs the weights ─► `LeanDecoder.logits(batch, rows)`

What is taken is told by the model's configuration and by what its layers asked of attention; every other model keeps
its own forward pass. Embedding and rotary embedding stay transformers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.packed_weights import kept_weights
from engine.paged_attention import AttentionCall, PagedBatch
from kernels.decoder import (
    DecoderShape,
    LayerWeights,
    NativeDecoder,
    NativeKernels,
    gate_up_rows,
    pack_decoder,
    packed_linear,
    rounded_linears,
)
from kernels.groups import GROUP, NIBBLES, SAMPLE_ROWS, exact_groups

logger = logging.getLogger(__name__)

GEMMA = "gemma3_text"
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", GEMMA})
CODES = frozenset({torch.int8, NIBBLES})
"""Types of weights that are codes with scales."""

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Something on the right device and positions `[1, T]` → cosines and sines, `[R, T, D]` both, R kinds of rotation."""


class LeanDecoder:
    """The forward pass of one model."""

    def __init__(
        self, embed: Callable[[Tensor], Tensor], rotary: Rotary, decoder: NativeDecoder, num_rounded: int
    ) -> None:
        """`embed`: token ids `[T]` → `[T, H]`; `num_rounded`: linears whose weights are rounded to codes."""
        self._embed, self._rotary, self._decoder = embed, rotary, decoder
        self.num_rounded = num_rounded

    @torch.inference_mode()
    def logits(self, batch: PagedBatch, rows: Tensor) -> Tensor:
        """Float32 logits `[len(rows), vocab_size]` of the flattened rows `rows`."""
        assert batch.cache is not None
        x = self._embed(batch.input_ids[0]).float()  # [T, H]
        cosines, sines = self._rotary(x[None], batch.position_ids)  # [R, T, D]
        x = self._decoder.layers(
            x,
            cosines.contiguous(),
            sines.contiguous(),
            batch.cache,
            batch.slot_mapping,
            batch.block_tables,
            batch.cu_seqlens_q,
            batch.context_lengths,
        )
        if batch.on_kv_written is not None:
            batch.on_kv_written()
        return self._decoder.head(x, rows)


def lean_decoder(
    model: PreTrainedModel,
    calls: Sequence[AttentionCall],
    kernels: NativeKernels,
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    packed_file: Path | None = None,
) -> LeanDecoder | None:
    """None for a model that is none of Llama's family, or that differs from it where it matters.

    `dtype`: the cache's; `weights_dtype`: the same, int8 or NIBBLES (`kernels.decoder.pack`); `packed_file`: where its
    packed weights are, or are to be kept.
    """
    if not _is_like_llama(model, calls, GROUP if weights_dtype in CODES else 2):
        return None
    config, inner = model.config, _untyped(model.model)
    head: Tensor = _untyped(model.lm_head).weight
    shape = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        vocab_size=head.shape[0],
        epsilon=config.rms_norm_eps,
        scaling=inner.layers[0].self_attn.scaling,
        windows=tuple(call.sliding_window for call in calls),
        rotations=tuple(map(_rotation_types(config).index, _layer_types(config))),
        is_gelu=config.model_type == GEMMA,
    )
    weights = kept_weights(
        packed_file, lambda: pack_decoder(map(_weights, inner.layers), _norm(inner.norm), head, weights_dtype)
    )
    if weights_dtype == NIBBLES:
        _take_rounded(model, weights)
    decoder = NativeDecoder(kernels, shape, weights, dtype)
    embed = _embedding(model, decoder, dtype, weights_dtype)
    return LeanDecoder(embed, _rotary(model), decoder, len(rounded_linears(weights)))


def is_made_of_codes(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> bool:
    """Whether a `lean_decoder` in NIBBLES seems to round nothing: a sample of each linear holds codes already."""
    if not _is_like_llama(model, calls, GROUP):
        return False
    linears = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return all(exact_groups(linear.weight[:SAMPLE_ROWS]) is not None for linear in linears)


def _take_rounded(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Gives transformers' layers the weights of those packed linears that are rounded: what ours are compared with."""
    names = rounded_linears(weights)
    logger.info("%s: %d linear(s) hold rounded weights", model.config.name_or_path, len(names))
    for number, layer in enumerate(_untyped(model.model).layers):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        ends = torch.tensor([0, *(projection.out_features for projection in projections)]).cumsum(0).tolist()
        rows = [torch.arange(*span) for span in pairwise(ends)]
        gates = zip((mlp.gate_proj, mlp.up_proj), gate_up_rows(mlp.gate_proj.out_features), strict=True)
        parts = {
            "projection": tuple(zip(projections, rows, strict=True)),
            "output": ((attention.o_proj, torch.arange(attention.o_proj.out_features)),),
            "gate_up": tuple(gates),
            "down": ((mlp.down_proj, torch.arange(mlp.down_proj.out_features)),),
        }
        for name in parts.keys() & {name.removeprefix(f"{number}.") for name in names}:
            for linear, outputs in parts[name]:
                _set(linear, packed_linear(weights, f"{number}.{name}").rows(outputs))
    if "head" in names:
        head, embedding = _untyped(model.lm_head), _untyped(model.model).embed_tokens
        is_tied = head.weight is embedding.weight
        _set(head, packed_linear(weights, "head").rows(torch.arange(len(head.weight))))
        if is_tied:
            embedding.weight = head.weight


def _set(module: Any, weight: Tensor) -> None:
    module.weight = torch.nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)


def _embedding(
    model: PreTrainedModel, decoder: NativeDecoder, dtype: torch.dtype, weights_dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """The model's own in `dtype`, or in NIBBLES the output layer's packed weights, where they are the same."""
    module = _untyped(model.model).embed_tokens
    embedding: Tensor = module.weight
    if weights_dtype == NIBBLES and embedding is _untyped(model.lm_head).weight:
        embed: Callable[[Tensor], Tensor] = decoder.embed
    else:
        embed = partial(torch.nn.functional.embedding, weight=embedding.to(dtype))
    if model.config.model_type != GEMMA:
        return embed
    scale = module.embed_scale.to(dtype)
    return lambda token_ids: embed(token_ids) * scale


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """Of the layers, as far as their rotations differ."""
    return config.layer_types if config.model_type == GEMMA else [""] * config.num_hidden_layers


def _rotation_types(config: PreTrainedConfig) -> list[str]:
    """The kinds of rotation, in the order in which `_rotary` gives them."""
    return sorted(set(_layer_types(config)))


def _rotary(model: PreTrainedModel) -> Rotary:
    rotary: Rotary = _untyped(model.model).rotary_emb
    if model.config.model_type != GEMMA:
        return rotary
    types = _rotation_types(model.config)

    def of_all_types(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = zip(*(_untyped(rotary)(x, positions, one) for one in types), strict=True)
        return torch.cat(cosines), torch.cat(sines)

    return of_all_types


def _is_like_llama(model: PreTrainedModel, calls: Sequence[AttentionCall], unit: int) -> bool:
    config, head_dim = model.config, calls[0].head_dim
    return (
        config.model_type in MODEL_TYPES
        and (_is_like_gemma(config) if config.model_type == GEMMA else config.hidden_act == "silu")
        and not getattr(config, "mlp_bias", False)
        and _untyped(model.lm_head).bias is None
        and all(len(frequencies) * 2 == head_dim for frequencies in _frequencies(model))  # all of a head is rotated
        and all(
            size % unit == 0
            for size in (config.hidden_size, config.intermediate_size, head_dim * config.num_attention_heads)
        )
    )


def _is_like_gemma(config: PreTrainedConfig) -> bool:
    return config.hidden_activation == "gelu_pytorch_tanh" and config.final_logit_softcapping is None


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    rotary = _untyped(model.model).rotary_emb
    return [buffer for name, buffer in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]


def _norm(module: Any) -> Tensor:
    """What a norm multiplies by; Gemma keeps how much that is more than 1."""
    weight: Tensor = module.weight
    return weight.float() + 1.0 if "Gemma" in type(module).__name__ else weight


def _untyped(module: Any) -> Any:
    """A module's own attributes, which its type does not know."""
    return module


def _weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias, is_gemma = attention.q_proj.bias is not None, hasattr(layer, "post_feedforward_layernorm")
    return LayerWeights(
        query=attention.q_proj.weight,
        key=attention.k_proj.weight,
        value=attention.v_proj.weight,
        bias=torch.cat([projection.bias for projection in projections]) if has_bias else None,
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        attention_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        attention_post_norm=_norm(layer.post_attention_layernorm) if is_gemma else None,
        mlp_post_norm=_norm(layer.post_feedforward_layernorm) if is_gemma else None,
    )
