"""A decoder of Llama's family on the native kernels: weights packed once, then one call a step.

    LayerWeights … ─► `pack_decoder` ─► `NativeDecoder`: layers(x, …) ─► x ─► head(x, rows) ─► logits

Every row is computed in the same order of operations whatever else is in the step: `kernels/cpu/linear.h` and
`attention.h` say how.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.groups import GROUP, NIBBLES, Groups, exact_groups, round_to_bytes, round_to_nibbles
from kernels.native import AttentionSettings, Cache, Decoder, Layer, Linear, Native, Sequences, Step

TILE = 32
"""Output features of a tile, as in `linear.h`; rows are padded to it."""
PACKING = 1
"""Counts up with every change of what `pack_decoder` makes."""
GATES = TILE // 2
"""Gates of a tile whose other half are their partners."""
ROUNDED = ".rounded"
"""Ends the name of a mark beside weights that are rounded."""


def padded(count: int) -> int:
    """Up to a whole tile."""
    return -(-count // TILE) * TILE


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight matrix.

    Attributes:
        values: `[tiles, units, 32 · elements of a unit]`, zeros where there is no output; codes of 4 bits are two in a
            byte, of two neighbouring units, so there are half as many.
        scales, minimums: of codes, `[tiles, groups, 32]` float16; minimums None: -128 · scale.
        is_exact: whether these are the very weights, not rounded ones.
    """

    values: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None
    is_exact: bool = True

    def linear(self, num_inputs: int, num_outputs: int, bias: Tensor | None = None) -> Linear:
        """For the library; its tensors must stay alive. Raises ValueError where the sizes are not these weights'."""
        count, has = padded(num_outputs) * num_inputs, self.values.numel()
        bits = 0 if self.scales is None else 4 if 2 * has == count else 8
        groups = count // GROUP if self.scales is None else self.scales.numel()
        if has != count // (2 if bits == 4 else 1) or groups != count // GROUP:
            raise ValueError(f"{has} packed elements are not {padded(num_outputs)} · {num_inputs}")
        tensors = {"packed": self.values, "bias": bias, "scales": self.scales, "minimums": self.minimums}
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        return Linear(**pointers, bits=bits, num_inputs=num_inputs, num_outputs=num_outputs)

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of the outputs `outputs` `[count]` int64, `[count, num_inputs]` float32. Of codes only."""
        assert self.scales is not None
        tiles, lanes, groups = outputs // TILE, outputs % TILE, self.scales.shape[1]
        codes = self.values.view(len(self.values), -1, TILE, 4)[tiles, :, lanes]  # [count, units or pairs of them, 4]
        if codes.shape[1] * 8 == groups * GROUP:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)  # [count, pairs, 2, 4]
        of_outputs = (None if part is None else part[tiles, :, lanes] for part in (self.scales, self.minimums))
        scales, minimums = of_outputs
        assert scales is not None
        return Groups(codes.reshape(len(outputs), groups, GROUP), scales, minimums, bits=8, is_exact=True).values()


def pack(weight: Tensor, dtype: torch.dtype) -> Packed:
    """`[num_outputs, num_inputs]`, in `dtype`.

    In int8 every 32 inputs of an output share a scale, by the largest. In NIBBLES weights that are codes already keep
    their values, in 8 bits where these need them (GGUF's Q4_0, Q4_1, Q8_0); others are rounded to 4.

    Raises ValueError where the inputs are no whole number of units, or of groups.
    """
    if dtype == NIBBLES:
        return pack_groups(exact_groups(weight) or round_to_nibbles(weight))
    return pack_groups(round_to_bytes(weight)) if dtype == torch.int8 else Packed(_tiles(weight, dtype))


def pack_head(weight: Tensor, dtype: torch.dtype) -> Packed:
    """As `pack`, but nothing is rounded to less than 8 bits: every token depends on it at once."""
    if dtype == NIBBLES:
        return pack_groups(exact_groups(weight) or round_to_bytes(weight))
    return pack(weight, dtype)


def pack_groups(groups: Groups) -> Packed:
    """Weights that are codes."""
    values = _tiles(groups.codes.flatten(1), torch.uint8)  # [tiles, units, 128]
    if groups.bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    minimums = None if groups.minimums is None else _tiles_of_groups(groups.minimums)
    return Packed(values.contiguous(), _tiles_of_groups(groups.scales), minimums, groups.is_exact)


def _tiles_of_groups(halves: Tensor) -> Tensor:
    """`[num_outputs, groups]` → `[tiles, groups, 32]`."""
    filled = torch.zeros(padded(len(halves)), halves.shape[1], dtype=halves.dtype)
    filled[: len(halves)] = halves
    return filled.view(-1, TILE, halves.shape[1]).transpose(1, 2).contiguous()


def _tiles(weight: Tensor, dtype: torch.dtype) -> Tensor:
    per_unit = 4 // dtype.itemsize
    num_outputs, num_inputs = weight.shape
    if num_inputs % per_unit:
        raise ValueError(f"{num_inputs} input features are no whole number of units")
    filled = torch.zeros(padded(num_outputs), num_inputs, dtype=dtype)
    filled[:num_outputs] = weight
    tiles = filled.view(-1, TILE, num_inputs // per_unit, per_unit)
    return tiles.transpose(1, 2).contiguous().view(len(tiles), num_inputs // per_unit, TILE * per_unit)


def gate_up_rows(count: int) -> tuple[Tensor, Tensor]:
    """Where `pack_gate_up` puts `count` gates and their partners, `[count]` int64 both."""
    numbers = torch.arange(count)
    gates = numbers // GATES * TILE + numbers % GATES
    return gates, gates + GATES


def pack_gate_up(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Packed:
    """Both `[intermediate, num_inputs]`, packed so that each tile has 16 gates and then their 16 partners."""
    size = _whole_gates(len(gate))
    both = torch.zeros(size // GATES, 2, GATES, gate.shape[1], dtype=gate.dtype)
    for place, weight in enumerate((gate, up)):
        filled = torch.zeros(size, gate.shape[1], dtype=gate.dtype)
        filled[: len(weight)] = weight
        both[:, place] = filled.view(-1, GATES, gate.shape[1])
    return pack(both.view(2 * size, gate.shape[1]), dtype)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer. H: hidden size, D: head size, I: intermediate size.

    Attributes:
        query, key, value: `[heads · D, H]`; `bias` are theirs one after the other, or None.
        output: `[H, heads · D]`.
        gate, up: `[I, H]`; `down`: `[H, I]`.
        attention_norm, mlp_norm: `[H]`; query_norm, key_norm: `[D]`, or None.
        attention_post_norm, mlp_post_norm: `[H]`, of what a layer adds to x; or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What layers have in common.

    Attributes:
        scaling: of the scores.
        windows: of the layers, None: all tokens are seen.
        rotations: of the layers, which of the rotary embeddings is theirs.
        is_gelu: whether gates go through GELU (its tangent form), not through SiLU.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    scaling: float
    windows: tuple[int | None, ...]
    rotations: tuple[int, ...]
    is_gelu: bool = False


def pack_layer(of: LayerWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    """What `NativeDecoder` needs of a layer, by name; what the layer has not is missing."""
    linears = {
        "projection": pack(torch.cat([of.query, of.key, of.value]), dtype),
        "output": pack(of.output, dtype),
        "gate_up": pack_gate_up(of.gate, of.up, dtype),
        "down": pack(of.down, dtype),
    }
    packed = {part: tensor for name, one in linears.items() for part, tensor in _parts(name, one).items()}
    vectors = {
        "projection.bias": of.bias,
        "output.bias": of.output_bias,
        "attention_norm": of.attention_norm,
        "mlp_norm": of.mlp_norm,
        "query_norm": of.query_norm,
        "key_norm": of.key_norm,
        "attention_post_norm": of.attention_post_norm,
        "mlp_post_norm": of.mlp_post_norm,
    }
    return packed | {name: pad(values) for name, values in vectors.items() if values is not None}


def pack_decoder(
    layers: Iterable[LayerWeights], final_norm: Tensor, head: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What `NativeDecoder` needs, by name. `final_norm`: `[H]`; `head`: `[vocab_size, H]`."""
    packed = {"final_norm": pad(final_norm), **_parts("head", pack_head(head, dtype))}
    for number, layer in enumerate(layers):
        packed |= {f"{number}.{name}": tensor for name, tensor in pack_layer(layer, dtype).items()}
    return packed


def rounded_linears(weights: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the linears of `pack_decoder`'s weights that hold rounded values."""
    return frozenset(name.removesuffix(ROUNDED) for name in weights if name.endswith(ROUNDED))


def _parts(name: str, packed: Packed) -> dict[str, Tensor]:
    parts = {name: packed.values, f"{name}.scales": packed.scales, f"{name}.minimums": packed.minimums}
    if not packed.is_exact:
        parts[f"{name}{ROUNDED}"] = torch.ones(1, dtype=torch.uint8)
    return {part: tensor for part, tensor in parts.items() if tensor is not None}


def packed_linear(weights: Mapping[str, Tensor], name: str) -> Packed:
    """A linear among the weights of `pack_decoder`: "head", or of a layer, "0.projection"."""
    scales, minimums = (weights.get(f"{name}.{part}") for part in ("scales", "minimums"))
    return Packed(weights[name], scales, minimums, f"{name}{ROUNDED}" not in weights)


def pad(values: Tensor) -> Tensor:
    """`[count]` → `[padded(count)]` float32, filled up with zeros."""
    filled = torch.zeros(padded(len(values)))
    filled[: len(values)] = values
    return filled


class NativeKernels:
    """The library with threads for its passes, one pass at a time; they end with this object."""

    def __init__(self, native: Native, num_threads: int) -> None:
        self.native = native
        self.team = native.new_team(num_threads)
        weakref.finalize(self, native.end_team, self.team)

    def paged_attention(
        self,
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
        """`reference.paged_attention`, with the same arguments; the query has the cache's dtype."""
        assert query.dtype == cache.dtype
        query = query.contiguous()
        output = torch.empty_like(query)
        settings = AttentionSettings(
            num_heads=query.shape[1],
            layer=layer,
            window=sliding_window or 0,
            scaling=scaling,
            softcap=softcap or 0.0,
        )
        self.native.attention(
            self.team,
            int(cache.dtype == torch.bfloat16),
            ctypes.byref(_cache(cache)),
            ctypes.byref(_sequences(block_tables, cu_seqlens_q, context_lengths)),
            ctypes.byref(settings),
            query.data_ptr(),
            output.data_ptr(),
        )
        return output

    def linear(self, rows: Tensor, weight: Linear) -> Tensor:
        """`[num_rows, num_inputs]` in the weight's dtype, float32 for codes → `[num_rows, num_outputs]` float32."""
        rows = rows.contiguous()
        output = torch.empty(len(rows), padded(weight.num_outputs))
        self.native.linear(
            self.team,
            int(rows.dtype == torch.bfloat16),
            int(weight.bits > 0),
            rows.data_ptr(),
            rows.shape[1],
            len(rows),
            ctypes.byref(weight),
            output.data_ptr(),
        )
        return output[:, : weight.num_outputs]


class NativeDecoder:
    """Layers and output layer of one model. Its methods belong to one thread at a time."""

    def __init__(
        self, kernels: NativeKernels, shape: DecoderShape, weights: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        """`weights`: of `pack_decoder`, in `dtype` or as codes; `dtype`: the cache's."""
        self._kernels, self._shape, self._weights = kernels, shape, weights  # which the structures point to
        self._width = padded(shape.hidden_size)
        self._layers = (Layer * len(shape.windows))(*(self._layer(number) for number in range(len(shape.windows))))
        self._decoder = Decoder(
            is_bfloat16=int(dtype == torch.bfloat16),
            is_quantised=int(weights["head"].dtype == torch.uint8),
            is_gelu=int(shape.is_gelu),
            num_layers=len(shape.windows),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            epsilon=shape.epsilon,
            scaling=shape.scaling,
            softcap=0.0,
            layers=self._layers,
            final_norm=self._pointer("final_norm"),
            head=self._linear("head", shape.hidden_size, shape.vocab_size),
        )

    def _layer(self, number: int) -> Layer:
        shape, prefix = self._shape, f"{number}."
        heads = shape.num_heads * shape.head_dim
        projected = heads + 2 * shape.num_kv_heads * shape.head_dim
        gates = 2 * _whole_gates(shape.intermediate_size)
        return Layer(
            projection=self._linear(f"{prefix}projection", shape.hidden_size, projected),
            output=self._linear(f"{prefix}output", heads, shape.hidden_size),
            gate_up=self._linear(f"{prefix}gate_up", shape.hidden_size, gates),
            down=self._linear(f"{prefix}down", shape.intermediate_size, shape.hidden_size),
            attention_norm=self._pointer(f"{prefix}attention_norm"),
            mlp_norm=self._pointer(f"{prefix}mlp_norm"),
            query_norm=self._pointer(f"{prefix}query_norm"),
            key_norm=self._pointer(f"{prefix}key_norm"),
            attention_post_norm=self._pointer(f"{prefix}attention_post_norm"),
            mlp_post_norm=self._pointer(f"{prefix}mlp_post_norm"),
            window=shape.windows[number] or 0,
            rotation=shape.rotations[number],
        )

    def _linear(self, name: str, num_inputs: int, num_outputs: int) -> Linear:
        return packed_linear(self._weights, name).linear(num_inputs, num_outputs, self._weights.get(f"{name}.bias"))

    def _pointer(self, name: str) -> int | None:
        tensor = self._weights.get(name)
        return None if tensor is None else tensor.data_ptr()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the output layer, which a tied model begins with: `[num_tokens, hidden_size]` float32.

        Only where they are codes.
        """
        return packed_linear(self._weights, "head").rows(token_ids)

    def layers(
        self,
        x: Tensor,
        cosines: Tensor,
        sines: Tensor,
        cache: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        context_lengths: Tensor,
    ) -> Tensor:
        """All layers; keys and values go to their slots.

        Args:
            x: `[num_tokens, hidden_size]` float32, the embedded tokens.
            cosines, sines: `[rotations, num_tokens, head_dim]` float32.
            cache, slots, block_tables, cu_seqlens_q, context_lengths: as in `kernels/reference.py`.

        Returns:
            `[num_tokens, padded(hidden_size)]` float32, for `head`.
        """
        rows = torch.zeros(len(x), self._width)
        rows[:, : x.shape[1]] = x
        step = Step(
            num_tokens=len(x),
            slots=slots.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            x=rows.data_ptr(),
            cache=_cache(cache),
            sequences=_sequences(block_tables, cu_seqlens_q, context_lengths),
        )
        self._kernels.native.layers(self._kernels.team, ctypes.byref(self._decoder), ctypes.byref(step))
        return rows

    def head(self, x: Tensor, rows: Tensor) -> Tensor:
        """Float32 logits `[len(rows), vocab_size]` of the rows `rows` (int64) of what `layers` returned."""
        width = padded(self._shape.vocab_size)
        logits = torch.empty(len(rows), width)
        self._kernels.native.head(
            self._kernels.team,
            ctypes.byref(self._decoder),
            x.data_ptr(),
            rows.data_ptr(),
            len(rows),
            logits.data_ptr(),
            width,
        )
        return logits[:, : self._shape.vocab_size]


def _whole_gates(count: int) -> int:
    return -(-count // GATES) * GATES


def _cache(cache: Tensor) -> Cache:
    _, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
    return Cache(
        data=cache.data_ptr(),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
    )


def _sequences(block_tables: Tensor, cu_seqlens_q: Tensor, context_lengths: Tensor) -> Sequences:
    return Sequences(
        num_sequences=len(context_lengths),
        max_blocks=block_tables.shape[1],
        block_tables=block_tables.data_ptr(),
        first_rows=cu_seqlens_q.data_ptr(),
        context_lengths=context_lengths.data_ptr(),
    )
