"""Cutting blocks, and their digests."""

from __future__ import annotations

import pytest

from kvferry.block_digest import DIGEST_BYTES, block_digest
from tests.unit.kvtransfer.support import contents_of, frames_of, payload_of


def test_digest_is_xxh3_128() -> None:
    assert block_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"  # the published value of no bytes
    assert len(block_digest(contents_of(1))) == DIGEST_BYTES


@pytest.mark.parametrize(("max_frame_bytes", "sizes"), [(128, [128]), (127, [127, 1]), (64, [64, 64]), (1000, [128])])
def test_frames_cover_the_block(max_frame_bytes: int, sizes: list[int]) -> None:
    frames = frames_of(3, max_frame_bytes=max_frame_bytes)
    assert [len(frame.payload) for frame in frames] == sizes
    assert b"".join(bytes(payload_of(frame)) for frame in frames) == contents_of(3)
    assert [frame.offset for frame in frames] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert [frame.digest for frame in frames] == [b""] * (len(sizes) - 1) + [block_digest(contents_of(3))]
