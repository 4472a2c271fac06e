"""What two workers must agree on before a block may travel between them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

KV_WIRE_VERSION = 2
"""Version of what travels between workers; independent of the package's version. Workers speak the older of theirs.

1: one block frame a message, no link between workers, no digest of the rotary embedding.
"""
OLDEST_WIRE_VERSION = KV_WIRE_VERSION - 1
"""Spoken too, so that workers can be replaced one by one."""
BLOCK_FORMAT_VERSION = 1
"""Version of a block's bytes, part of its hash; the same in both wire versions."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def num_beam_blocks(num_prompt_tokens: int, num_kv_tokens: int, width: int, *, block_size: int) -> int:
    """Most blocks that `width` beams of up to `num_kv_tokens` tokens, the prompt's included, hold at one time.

    They share the full blocks of the prompt, and nothing beyond in the worst case.
    """
    if num_kv_tokens <= num_prompt_tokens:
        return -(-num_prompt_tokens // block_size)  # one output token: no beam ever forks
    num_shared = num_prompt_tokens // block_size
    return num_shared + width * (-(-num_kv_tokens // block_size) - num_shared)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one block: `[num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous, of `dtype`.

    `rope_digest` names the rotary embedding that the keys carry, "none" without one; version 1 did not tell it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    model_fingerprint: str
    wire_version: int = KV_WIRE_VERSION
    rope_digest: str = ""

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def differences(self, other: KvLayout) -> tuple[str, ...]:
        """One line for each value that keeps blocks from being exchanged, naming both: `block_size: 16 here, 32 there`.

        Neighbouring wire versions go together; what one side does not tell is not compared.
        """
        names = [field.name for field in dataclasses.fields(self)]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return tuple(f"{name}: {here} here, {there} there" for name, here, there in pairs if _differ(name, here, there))


def _differ(name: str, here: object, there: object) -> bool:
    if name == "wire_version":
        return abs(int(str(here)) - int(str(there))) > KV_WIRE_VERSION - OLDEST_WIRE_VERSION
    return here != there and not (name == "rope_digest" and "" in (here, there))
