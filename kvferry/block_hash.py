"""Content names of full blocks: a SHA-256 chain over (parent, token ids), equal in every process.

The root names everything besides tokens that the contents of a block depend on, each part with its label and length, so
that no two different roots can spell the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvferry.kv_layout import BLOCK_FORMAT_VERSION, KvLayout

HASH_BYTES = 32


def hash_root(
    layout: KvLayout, *, adapter: str = "", cache_salt: str = "", tenant: str = "", shared_salt: str = ""
) -> bytes:
    """Root of the chain for one model, KV layout, adapter, tenant and salts.

    A `shared_salt` takes the tenant's place: tenants that set the same one find each other's blocks. Its label differs,
    so no tenant's name can be a salt that lets others in.
    """
    digest = hashlib.sha256(b"kvferry.block.v2")
    parts = {
        "model": layout.model_fingerprint,
        "dtype": layout.dtype,
        "num_layers": str(layout.num_layers),
        "num_kv_heads": str(layout.num_kv_heads),
        "head_dim": str(layout.head_dim),
        "block_size": str(layout.block_size),
        "wire_version": str(BLOCK_FORMAT_VERSION),  # the label that version 1 of the wire gave it
        "adapter": adapter,
        "cache_salt": cache_salt,
        **({"shared_salt": shared_salt} if shared_salt else {"tenant": tenant}),
    }
    for label, value in parts.items():
        for text in (label.encode(), value.encode()):
            digest.update(struct.pack("<Q", len(text)) + text)
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block whose predecessor (or root) is `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def hash_blocks(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`; a partial block at the end has none."""
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
