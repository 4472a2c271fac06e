"""Cutting blocks, their digests, and faults committed on purpose."""

from __future__ import annotations

import pytest

from kvferry.block_digest import DIGEST_BYTES, block_digest
from kvtransfer.faults import NO_FAULTS, Fault, FaultKind, Faults
from tests.unit.kvtransfer.support import contents_of, frames_of


def test_digest_is_xxh3_128() -> None:
    assert block_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"  # the published value of no bytes
    assert len(block_digest(contents_of(1))) == DIGEST_BYTES


@pytest.mark.parametrize(("max_frame_bytes", "sizes"), [(128, [128]), (127, [127, 1]), (64, [64, 64]), (1000, [128])])
def test_frames_cover_the_block(max_frame_bytes: int, sizes: list[int]) -> None:
    frames = frames_of(3, max_frame_bytes=max_frame_bytes)
    assert [len(frame.payload) for frame in frames] == sizes
    assert b"".join(frame.payload for frame in frames) == contents_of(3)
    assert [frame.offset for frame in frames] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert [frame.digest for frame in frames] == [b""] * (len(sizes) - 1) + [block_digest(contents_of(3))]


def test_no_faults_change_nothing() -> None:
    frames = frames_of(0)
    assert NO_FAULTS.apply(frames, 1).frames == frames


def test_corruption_hits_one_sending_of_one_block() -> None:
    faults = Faults((Fault(FaultKind.CORRUPT, 0, nth=1),))
    frames = frames_of(0)
    (damaged,) = faults.apply(frames, 1).frames
    assert sum(left != right for left, right in zip(damaged.payload, frames[0].payload, strict=True)) == 1
    assert damaged.digest == frames[0].digest
    assert faults.apply(frames, 2).frames == frames
    assert faults.apply(frames_of(1), 1).frames == frames_of(1)


def test_other_faults() -> None:
    frames = frames_of(0, max_frame_bytes=64)
    faulty = Faults((Fault(FaultKind.DELAY, 0, delay_s=0.5), Fault(FaultKind.DUPLICATE, 0))).apply(frames, 3)
    assert faulty.delay_s == 0.5
    assert faulty.frames == frames + frames
    assert Faults((Fault(FaultKind.DROP, 0),)).apply(frames, 1).frames == []
