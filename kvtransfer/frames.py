"""Cutting a block into frames: a block of a large model is bigger than a gRPC message should be."""

from __future__ import annotations

from kvferry.block_digest import block_digest
from kvferry.spec import AttemptId
from kvtransfer.messages import BlockFrame

MAX_FRAME_BYTES = 1 << 20
"""Largest payload of a frame: above it throughput gains little, and each message holds the event loop for longer."""


def cut_block(
    contents: bytes | memoryview,
    *,
    id: AttemptId,
    block_index: int,
    num_tokens: int,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    digest: bytes | None = None,
) -> list[BlockFrame]:
    """Frames of one block, in order. Their payloads are views of `contents`, which stays as it is until they are sent.

    Args:
        contents: the whole slab of the block, not empty.
        num_tokens: filled slots of the block.
        max_frame_bytes: largest payload, at least 1.
        digest: digest stored when the block filled; None makes it from `contents`.
    """
    assert max_frame_bytes > 0, "a frame must carry something"
    view = memoryview(contents).cast("B")
    last = len(view) - 1
    assert last >= 0, "a block must carry something"
    if digest is None:
        digest = block_digest(view)
    return [
        BlockFrame(
            id=id,
            block_index=block_index,
            offset=offset,
            payload=view[offset : offset + max_frame_bytes],
            digest=digest if offset + max_frame_bytes > last else b"",
            num_tokens=num_tokens,
        )
        for offset in range(0, len(view), max_frame_bytes)
    ]
