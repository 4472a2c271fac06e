"""An engine that decodes and ships what it let go of: shipped blocks stay as they are, and every digest is right."""

from __future__ import annotations

import pytest

from engine.block_pool import Room
from engine.core import EngineCore, EngineLimits
from engine.forward_batch import SampledToken
from engine.outputs import SequencePreempted
from engine.sequence import SequenceStatus
from kvferry.block_digest import block_digest
from tests.support.engines import make_core, make_sequence

LIMITS = EngineLimits(max_batched_tokens=16, max_running=4, max_chunk_tokens=2, digests=True)


def test_what_is_shipped_is_not_preempted_for_what_decodes() -> None:
    """Though it is last in the order, and its blocks would do."""
    core = make_core(6, LIMITS)
    core.add(make_sequence(core, "decodes", [1, 2, 3, 4], 8))
    shipped = make_sequence(core, "shipped", range(40, 56), 8, hold_after_prefill=True, arrival=9)
    core.add(shipped)
    preempted: list[str] = []
    core.step()
    table = list(shipped.block_table)
    assert len(table) == 4
    while shipped.status is SequenceStatus.RUNNING:
        preempted += [one.seq_id for one in core.step() if isinstance(one, SequencePreempted)]
        assert shipped.block_table == table
    assert preempted == ["decodes"]
    assert shipped.status is SequenceStatus.HELD


@pytest.mark.parametrize("is_read", [False, True])
def test_room_for_what_arrives_may_be_that_of_a_prompt_whose_shipment_waits(*, is_read: bool) -> None:
    """Else two workers that ship to each other could wait for ever; what is being read stays."""
    core = make_core(5, LIMITS)
    held = make_sequence(core, "held", range(40, 56), 8, hold_after_prefill=True)
    core.add(held)
    while held.status is not SequenceStatus.HELD:
        core.step()
    if is_read:
        assert held.hold.secure()
    arriving = make_sequence(core, "arriving", range(70, 80), 8)
    core.register(arriving)
    assert core.reserve(arriving) is (Room.NO_BLOCKS if is_read else Room.ENOUGH)
    assert held.status is (SequenceStatus.HELD if is_read else SequenceStatus.PARKED)
    core.check_integrity()


def test_what_arrived_keeps_the_digests_it_came_with() -> None:
    core = make_core(8, LIMITS)
    sequence = make_sequence(core, "arrives", range(10), 8)
    core.register(sequence)
    core.reserve(sequence)
    core.adopt(sequence, [SampledToken(7)], {0: b"first", 1: b"second"})
    core.step()
    assert [core.pool.digest(block_id) for block_id in sequence.block_table] == [b"first", b"second", None]


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("num_blocks", [14, 64])
def test_every_digest_is_that_of_the_contents(num_blocks: int, window: int | None) -> None:
    """Of forks that share, copy and let go of blocks, also when they are preempted; a partial block has none."""
    core = make_core(num_blocks, LIMITS, window=window)
    core.add(make_sequence(core, "choices", range(10), 20, temperature=1.0, seed=3, num_choices=3))
    num_checked = 0
    while core.has_work:
        core.step()
        num_checked += _check_digests(core)
    assert num_checked > 20


def _check_digests(core: EngineCore) -> int:
    blocks = [(block_id, core.pool.digest(block_id)) for block_id in range(core.pool.num_blocks)]
    known = [(block_id, digest) for block_id, digest in blocks if digest is not None]
    for block_id, digest in known:
        assert digest == block_digest(core.runner.block_view(block_id)), f"block {block_id}"
    return len(known)
