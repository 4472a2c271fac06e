"""Block tables: admission, copy on write, forks, swap, the window, prefixes under way; books that notice faults."""

from __future__ import annotations

import random

import pytest

from decode_svc.admission import DecodeAdmission
from engine.block_manager import BlockManager
from engine.block_pool import BlockPool, BlockQuota, Room
from engine.core import EngineCore, EngineLimits
from engine.gang import Gang
from engine.local import LocalResult, choice_name, generate
from engine.memory_ops import CopyBlock, SwapIn, SwapOut, perform
from engine.outputs import BeamsFinished, SequencePreempted
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.sequence import Sequence, SequenceStatus
from engine.swap_space import SwapSpace
from kvferry.errors import ResourceExhausted
from kvferry.sampling import BeamParams, SamplingParams
from tests.support.engines import (
    BLOCK_SIZE,
    WatchedRunner,
    deny_room,
    expected_beams,
    expected_tokens,
    first_tokens,
    make_core,
    make_sequence,
    poison_free_blocks,
    run_to_end,
    ship,
)


def manager_of(num_blocks: int, *, num_slots: int = 0, quotas: dict[str, BlockQuota] | None = None) -> BlockManager:
    runner = WatchedRunner(num_blocks)
    swap_space = SwapSpace(num_slots, runner.layout.block_bytes)
    return BlockManager(BlockPool(num_blocks, quotas), BLOCK_SIZE, swap_space)


def sequence_of(name: str, prompt: list[int], max_tokens: int = 40, **kwargs: object) -> Sequence:
    return Sequence(name, prompt, SamplingParams(max_tokens=max_tokens), **kwargs)  # type: ignore[arg-type]


def compute(manager: BlockManager, sequence: Sequence) -> None:
    sequence.num_computed_tokens = sequence.num_tokens
    manager.publish(sequence)


# -- taking and sharing -------------------------------------------------------------------------------------------


def test_admission_is_all_or_nothing_and_keeps_the_watermark() -> None:
    manager = manager_of(4)
    first, second = sequence_of("a", [1] * 8), sequence_of("b", [2] * 8)
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    assert manager.admit([second], keep_watermark=True) is not Room.ENOUGH
    assert second.block_table == [] and manager.pool.counts.used == 2
    assert manager.admit([second], keep_watermark=False) is Room.ENOUGH
    manager.check_integrity([first, second])


def test_the_last_known_token_is_never_a_hit_but_a_reservation_takes_all() -> None:
    manager = manager_of(16)
    first = sequence_of("a", list(range(8)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    compute(manager, first)
    again, shipped = sequence_of("b", list(range(8))), sequence_of("c", list(range(8)))
    assert manager.admit([again], keep_watermark=False) is Room.ENOUGH
    assert manager.reserve(shipped, keep_watermark=False) is Room.ENOUGH
    assert again.block_table[:1] == first.block_table[:1] and again.num_computed_tokens == 4
    assert shipped.block_table[:2] == first.block_table and len(shipped.block_table) == 3
    assert shipped.num_computed_tokens == 8
    manager.check_integrity([first, again, shipped])


def test_a_block_that_others_hold_is_copied_before_it_is_written() -> None:
    manager, runner = manager_of(8), WatchedRunner(8)
    first = sequence_of("a", list(range(6)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    compute(manager, first)
    runner.block_view(first.block_table[1])[:] = b"a" * runner.layout.block_bytes
    forks = [manager.fork(first, f"a#{choice}", choice) for choice in (1, 2)]
    family = [first, *forks]
    manager.check_integrity(family)
    assert manager.pool.counts.used == 2
    for one in family:
        one.token_ids.append(one.choice)
        assert manager.prepare_write(one)
    assert [len(one.block_table) for one in family] == [2, 2, 2]
    assert len({one.block_table[1] for one in family}) == 3 and len({one.block_table[0] for one in family}) == 1
    copies = manager.take_ops()
    assert [type(op) for op in copies] == [CopyBlock, CopyBlock], "the last holder writes in place"
    perform(copies, runner, manager.swap_space)
    assert {bytes(runner.block_view(one.block_table[1])) for one in family} == {b"a" * runner.layout.block_bytes}
    for one in family:
        manager.free(one)
        manager.free(one)
    manager.check_integrity(family)
    assert manager.pool.counts.used == 0


def test_a_copy_that_finds_no_room_changes_nothing() -> None:
    manager = manager_of(2)
    first = sequence_of("a", list(range(6)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    compute(manager, first)
    fork = manager.fork(first, "a#1", 1)
    tables = list(first.block_table), list(fork.block_table)
    first.token_ids.append(0)
    assert not manager.prepare_write(first)
    assert (first.block_table, fork.block_table) == tables and manager.take_ops() == []
    manager.check_integrity([first, fork])


def test_freed_blocks_are_evicted_deepest_first() -> None:
    manager = manager_of(4)
    first = sequence_of("a", list(range(16)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    compute(manager, first)
    manager.free(first)
    assert manager.pool.allocate(2) is not None
    assert len(manager.match_prefix(sequence_of("b", list(range(16))), 16)) == 2


def test_a_sequence_without_the_prefix_cache_neither_hits_nor_publishes() -> None:
    manager = manager_of(8)
    loner = sequence_of("a", list(range(9)), use_prefix_cache=False)
    assert manager.admit([loner], keep_watermark=False) is Room.ENOUGH
    compute(manager, loner)
    assert manager.pool.published_blocks() == []
    other, late = sequence_of("b", list(range(9))), sequence_of("c", list(range(9)), use_prefix_cache=False)
    assert manager.computing_next(other, 8) is None
    assert manager.admit([other], keep_watermark=False) is Room.ENOUGH
    compute(manager, other)
    assert manager.match_prefix(late, 8) == [] and manager.computing_next(late, 8) is None


def test_a_prefix_under_way_is_known_until_it_is_computed_or_given_up() -> None:
    manager = manager_of(12)
    leader, follower = sequence_of("a", list(range(9))), sequence_of("b", list(range(9)))
    assert manager.computing_next(follower, 8) is None
    assert manager.admit([leader], keep_watermark=False) is Room.ENOUGH
    assert manager.computing_next(follower, 8) is leader
    assert manager.computing_next(sequence_of("c", [7] * 9), 8) is None
    leader.num_computed_tokens = 4
    manager.publish(leader)
    assert manager.computing_next(follower, 8) is leader, "the second block is still to come"
    compute(manager, leader)
    assert manager.computing_next(follower, 8) is None
    manager.free(leader)
    manager.pool.flush()
    assert manager.admit([leader], keep_watermark=False) is Room.ENOUGH
    manager.free(leader)
    assert manager.computing_next(follower, 8) is None, "whoever gave up computes nothing"


# -- swap ------------------------------------------------------------------------------------------------------------


def test_swapped_blocks_come_back_with_their_contents() -> None:
    """Out, everything overwritten, in again: what is still published is not copied."""
    manager, runner = manager_of(8, num_slots=8), WatchedRunner(8)
    first = sequence_of("a", list(range(10)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    compute(manager, first)
    before = []
    for index, block_id in enumerate(first.block_table):
        runner.block_view(block_id)[:] = bytes([index]) * runner.layout.block_bytes
        before.append(bytes(runner.block_view(block_id)))
    assert manager.swap_out([first])
    manager.check_integrity([first])
    assert manager.pool.counts.used == 0 and manager.swap_space.num_used == 3
    filler = manager.pool.allocate(7)  # evicts the second of the two published blocks
    assert filler is not None
    ops = manager.take_ops()
    assert [type(op) for op in ops] == [SwapOut] * 3
    perform(ops, runner, manager.swap_space)
    for block_id in filler:
        runner.block_view(block_id)[:] = b"\xff" * runner.layout.block_bytes
    manager.pool.free(filler)
    assert manager.swap_in([first], keep_watermark=False) is Room.ENOUGH
    ops = manager.take_ops()
    assert [type(op) for op in ops] == [SwapIn, SwapIn]
    perform(ops, runner, manager.swap_space)
    assert [bytes(runner.block_view(block_id)) for block_id in first.block_table] == before
    assert first.num_computed_tokens == 10 and manager.swap_space.num_used == 0
    manager.check_integrity([first])


def test_a_unit_is_swapped_whole_or_not_at_all() -> None:
    manager = manager_of(12, num_slots=3)
    unit = [sequence_of("a", list(range(10)))]
    assert manager.admit(unit, keep_watermark=False) is Room.ENOUGH
    compute(manager, unit[0])
    unit.append(manager.fork(unit[0], "a#1", 1))
    unit[1].token_ids.append(1)
    assert manager.prepare_write(unit[1])
    tables = [list(one.block_table) for one in unit]
    manager.take_ops()
    assert not manager.swap_out(unit), "four blocks, three slots"
    assert [one.block_table for one in unit] == tables and manager.take_ops() == []
    assert manager.swap_space.num_used == 0
    manager.check_integrity(unit)


def test_a_unit_keeps_what_it_shares_through_a_swap() -> None:
    manager = manager_of(12, num_slots=4)
    unit = [sequence_of("a", list(range(10)))]
    assert manager.admit(unit, keep_watermark=False) is Room.ENOUGH
    compute(manager, unit[0])
    unit.append(manager.fork(unit[0], "a#1", 1))
    Gang(None, unit)  # type: ignore[arg-type]
    unit[1].token_ids.append(1)
    assert manager.prepare_write(unit[1])
    assert manager.swap_out(unit) and manager.swap_space.num_used == 4
    manager.pool.flush()
    assert manager.swap_in(unit, keep_watermark=False) is Room.ENOUGH
    assert unit[0].block_table[:2] == unit[1].block_table[:2] and unit[0].block_table[2] != unit[1].block_table[2]
    assert manager.pool.counts.used == 4
    manager.check_integrity(unit)


def test_a_swapped_sequence_that_is_freed_gives_its_slots_back() -> None:
    manager = manager_of(4, num_slots=4)
    first = sequence_of("a", list(range(10)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    assert manager.swap_out([first])
    manager.free(first)
    manager.free(first)
    assert manager.swap_space.num_used == 0
    manager.check_integrity([first])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_choices_whose_prompt_fills_the_pool_exactly_both_finish(mode: PreemptionMode) -> None:
    """They share every block; the one that is preempted holds the whole pool, and must get it back."""
    core = make_core(10, EngineLimits(num_swap_blocks=20, preemption=PreemptionPolicy(mode)))
    core.add(make_sequence(core, "a", [1] * 38, 3, num_choices=2, temperature=1.0))
    run_to_end(core, max_steps=100)
    assert core.pool.counts.used == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_that_fill_the_pool_exactly_come_back_after_preemption(mode: PreemptionMode) -> None:
    core = make_core(14, EngineLimits(num_swap_blocks=30, preemption=PreemptionPolicy(mode)))
    core.add(make_sequence(core, "plain", [2] * 2, 25, arrival=0))
    beams = make_sequence(core, "beams", [1] * 32, 9, beam=BeamParams(3), arrival=1)
    core.add(beams)
    assert core.block_manager.max_blocks_for(beams) == 14
    outputs = run_to_end(core, max_steps=200)
    assert any(isinstance(output, SequencePreempted) and output.seq_id == "beams" for output in outputs)
    (finished,) = [output for output in outputs if isinstance(output, BeamsFinished)]
    assert finished.beams == expected_beams([1] * 32, BeamParams(3), SamplingParams(max_tokens=9))


# -- the attention window ------------------------------------------------------------------------------------------


def check_window_tables(core: EngineCore, window: int) -> None:
    """Every entry of a table names a block that its sequence holds; one that decodes holds what its window needs."""
    for sequence in core.sequences.values():
        assert set(sequence.block_table) <= set(sequence.held_blocks), sequence.seq_id
        has_stepped = sequence.gang is None or sequence.num_preemptions == 0  # a resumed beam may not have yet
        if sequence.status is SequenceStatus.RUNNING and sequence.num_uncomputed_tokens == 1 and has_stepped:
            assert len(sequence.held_blocks) <= -(-window // BLOCK_SIZE) + 1, sequence.seq_id
        first_needed = max(0, sequence.num_computed_tokens - window + 1)
        assert sequence.num_dropped_blocks * BLOCK_SIZE <= first_needed, "a block that is still needed is gone"


def run_windowed(core: EngineCore, window: int, sequences: list[Sequence]) -> dict[str, LocalResult]:
    def check(step: int) -> None:
        core.check_integrity()
        check_window_tables(core, window)
        poison_free_blocks(core)

    return generate(core, sequences, before_step=check)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 16])
def test_blocks_that_left_the_window_are_given_back(window: int) -> None:
    """One long sequence: its tokens are those of the window's rule, and it never holds much more than the window."""
    core = make_core(32, window=window)
    prompt = list(range(21))
    result = run_windowed(core, window, [make_sequence(core, "a", prompt, 60)])
    assert result["a"].token_ids == expected_tokens(prompt, SamplingParams(60, 0.0), window=window)
    assert core.pool.counts.used == 0


def test_a_window_of_one_token_holds_one_block() -> None:
    """Every token attends to itself only; what this makes of the slots' chain is not asked here."""
    core = make_core(32, window=1)
    results = run_windowed(core, 1, [make_sequence(core, "a", list(range(12)), 40)])
    assert len(results["a"].token_ids) == 40


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("window", [2, 5, 8, 11])
def test_forks_beams_and_preemption_keep_to_the_window(window: int, mode: PreemptionMode) -> None:
    rng = random.Random(window)
    limits = EngineLimits(
        max_batched_tokens=64,
        max_running=8,
        max_chunk_tokens=8,
        num_swap_blocks=24,
        preemption=PreemptionPolicy(mode),
    )
    core = make_core(14, limits, window=window)
    deny_room(core, lambda: rng.random() < 0.03)
    prompts = [[number % 3, *range(rng.randint(1, 30))] for number in range(24)]
    sequences = []
    for number, prompt in enumerate(prompts):
        beam = BeamParams(2) if number % 4 == 3 else None
        num_choices = 1 if beam else rng.randint(1, 3)
        sequences.append(
            make_sequence(
                core, str(number), prompt, 10 if beam else 24, arrival=number, num_choices=num_choices, beam=beam,
                temperature=1.0, seed=number,
            )
        )  # fmt: skip
    results = run_windowed(core, window, sequences)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        if sequence.beam is not None:
            expected = expected_beams(prompt, sequence.beam, sequence.sampling, window=window)
            assert results[sequence.seq_id].beams == expected
            continue
        for choice in range(3):
            name = choice_name(sequence.seq_id, choice)
            if name in results:
                expected_ids = expected_tokens(prompt, sequence.sampling, choice, window=window)
                assert results[name].token_ids == expected_ids
    kinds = core.memory.num_swap_preemptions, core.memory.num_recompute_preemptions
    assert kinds[mode == "recompute"] > 3
    assert core.memory.num_blocks_copied > 3
    assert core.pool.counts.used == 0 and core.swap_space.num_used == 0


def test_a_windowed_prompt_that_is_held_for_shipping_keeps_all_its_blocks() -> None:
    core = make_core(32, window=4)
    held = make_sequence(core, "a", list(range(30)), 9, hold_after_prefill=True)
    core.add(held)
    while core.has_work:
        core.step()
    assert held.num_dropped_blocks == 0 and len(set(held.block_table)) == 8
    core.remove("a")
    core.check_integrity()


def test_a_windowed_shipment_gives_its_first_blocks_back_at_once() -> None:
    core = make_core(32, window=8)
    admission = DecodeAdmission(core)
    prompt = list(range(30))
    sequence = make_sequence(core, "a", prompt, 20)
    admission.register(sequence)
    admission.offer("a", sequence.block_hashes(7, BLOCK_SIZE), 30)
    admission.poll()
    ship(core, sequence)
    # 30 tokens computed, the next one attends to the 8 from position 23 on: blocks 0 … 4 are out
    expected = expected_tokens(prompt, sequence.sampling, window=8)
    admission.commit("a", [first_tokens(prompt, sequence)[0].__class__(expected[0])])
    assert sequence.num_dropped_blocks == 5
    results = [output for output in run_to_end(core) if getattr(output, "token_id", None) is not None]
    assert [getattr(output, "token_id", None) for output in results] == expected[1:]


def test_a_copy_on_write_takes_the_entries_of_dropped_blocks_along() -> None:
    """They name a block that the sequence holds, never one that was given back and may be anybody's."""
    core = make_core(8, window=2)
    first = make_sequence(core, "a", list(range(7)), 9, num_choices=2, temperature=1.0)
    core.add(first)
    core.step()
    fork = core.sequences["a#1"]
    assert first.block_table == fork.block_table and first.num_dropped_blocks == 1
    core.step()
    assert first.block_table != fork.block_table
    for one in (first, fork):
        assert set(one.block_table) <= set(one.held_blocks)


# -- books that notice faults ----------------------------------------------------------------------------------------


def test_integrity_notices_what_is_wrong() -> None:
    manager = manager_of(8, num_slots=4)
    first = sequence_of("a", list(range(10)))
    assert manager.admit([first], keep_watermark=False) is Room.ENOUGH
    manager.check_integrity([first])
    with pytest.raises(AssertionError, match="holders 0"):
        manager.check_integrity([])
    first.block_table.append(first.block_table[0])
    with pytest.raises(AssertionError, match="holders 2"):
        manager.check_integrity([first])
    first.block_table.pop()
    manager.swap_space.take(1)
    with pytest.raises(AssertionError, match="1 slots used, 0 held"):
        manager.check_integrity([first])
    manager.swap_space.give_back({0})
    table, first.block_table = first.block_table, []
    manager.pool.free(table)
    with pytest.raises(AssertionError, match="computed by nobody"):
        manager.check_integrity([first])


# -- what can never fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3])
def test_a_shipped_search_of_one_token_whose_prompt_fills_the_pool_is_served_or_refused(width: int) -> None:
    """Nothing of it is ever decoded, so that its prompt may need every block, and none for a next token."""
    core = make_core(4)
    admission = DecodeAdmission(core)
    sequence = make_sequence(core, "a", list(range(16)), 1, beam=BeamParams(width))
    try:
        admission.register(sequence)
    except ResourceExhausted:
        return
    admission.offer("a", sequence.block_hashes(4, BLOCK_SIZE), 16)
    assert admission.poll(), "taken, and never granted room"
    ship(core, sequence)
    admission.commit("a", first_tokens(list(range(16)), sequence))
    assert [type(output) for output in admission.poll()][-1] is BeamsFinished
    core.check_integrity()
    assert core.pool.counts.used == 0
