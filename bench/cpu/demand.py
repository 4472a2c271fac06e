"""What a step of a model needs at least: bytes read and operations done, by the model's shapes."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_WEIGHT = {"bf16": 2.0, "int8": 1.0 + 2 / 32, "int4": 0.5 + 4 / 32}
"""int8: a scale in half precision for 32 weights; int4: a scale and a least value, as Q4_1."""
KV_BYTES_PER_VALUE = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model of Llama's family."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: dict[str, object]) -> Shape:
        """From config.json."""
        numbers = {name: value for name, value in config.items() if isinstance(value, int)}
        heads = numbers["num_attention_heads"]
        return cls(
            num_layers=numbers["num_hidden_layers"],
            hidden_size=numbers["hidden_size"],
            intermediate_size=numbers["intermediate_size"],
            num_heads=heads,
            num_kv_heads=numbers.get("num_key_value_heads", heads),
            head_dim=numbers.get("head_dim", numbers["hidden_size"] // heads),
            vocab_size=numbers["vocab_size"],
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's, merged."""
        heads = self.num_heads * self.head_dim
        return {
            "projection": (self.hidden_size, heads + 2 * self.num_kv_heads * self.head_dim),
            "output": (heads, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }

    @property
    def num_layer_weights(self) -> int:
        """Of all layers' linears."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def num_head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    def weight_bytes(self, precision: str) -> float:
        """Of the linears and the head; every decode step reads them once."""
        return (self.num_layer_weights + self.num_head_weights) * BYTES_PER_WEIGHT[precision]

    def kv_bytes(self, num_sequences: int, context: int) -> int:
        """Of a decode step."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * KV_BYTES_PER_VALUE
        return num_sequences * context * per_token

    def prefill_operations(self, num_sequences: int, num_tokens: int) -> float:
        """Of prompts of `num_tokens` each: products with weights, attention to what is seen, one row of the head."""
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * num_tokens * (num_tokens + 1) / 2
        return num_sequences * (2 * self.num_layer_weights * num_tokens + 2 * self.num_head_weights + attention)
