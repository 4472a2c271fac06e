"""Content digest of a block: xxh3-128, made when the block fills, sent with it, compared by the receiver with what it
wrote."""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16


def block_digest(contents: bytes | bytearray | memoryview) -> bytes:
    """Digest of the whole slab of a block (all layers, unfilled slots included)."""
    return xxhash.xxh3_128_digest(contents)
