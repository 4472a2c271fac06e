"""Held prompts whose shipment waits for its grant: parked for others that find no room, recalled with the grant."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import pytest

from engine.block_pool import BlockQuota
from engine.core import EngineCore, EngineLimits
from engine.hold import Hold
from engine.outputs import (
    CandidatesFound,
    ChunkComputed,
    Output,
    SequenceFailed,
    SequenceRestored,
    TokenSampled,
)
from engine.scripted import slots_of
from engine.sequence import Sequence, SequenceStatus
from kvferry.block_digest import block_digest
from kvferry.sampling import BeamParams
from tests.support.engines import (
    BLOCK_SIZE,
    expected_tokens,
    first_tokens,
    make_core,
    make_sequence,
    poison_free_blocks,
    run_to_end,
)

NUM_BLOCKS = 8


def small_core(**limits: object) -> EngineCore:
    """Room for two prompts of three blocks, with a block to spare each."""
    values = {"max_batched_tokens": 64, "max_running": 8, "max_chunk_tokens": 8, "digests": True, **limits}
    return make_core(NUM_BLOCKS, EngineLimits(**values))  # type: ignore[arg-type]


def prompt_of(name: str, num_tokens: int) -> list[int]:
    return [random.Random(name).randrange(1024) for _ in range(num_tokens)]


def hold_prompt(core: EngineCore, name: str, num_tokens: int = 3 * BLOCK_SIZE, **more: object) -> Sequence:
    """A prompt to be held, queued; by itself it is computed and held with the next steps."""
    prompt = prompt_of(name, num_tokens)
    arrival = len(core.sequences)
    sequence = make_sequence(core, name, prompt, 5, **{"arrival": arrival, "hold_after_prefill": True, **more})  # type: ignore[arg-type]
    core.add(sequence)
    return sequence


def held_prompt(core: EngineCore, name: str, num_tokens: int = 3 * BLOCK_SIZE, **more: object) -> Sequence:
    """A prompt that is computed and held."""
    sequence = hold_prompt(core, name, num_tokens, **more)
    run_to_end(core)
    assert sequence.status is SequenceStatus.HELD
    return sequence


def run(core: EngineCore, max_steps: int = 50) -> list[Output]:
    """Steps until nothing can go on, which may leave some waiting."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        if not core.has_work:
            break
        poison_free_blocks(core)
        outputs += core.step()
        core.check_integrity()
        if core.is_blocked:
            break
    return outputs


def secure(core: EngineCore, sequence: Sequence) -> bool:
    """As a shipment does when its grant comes; whether the blocks were there."""
    is_there = sequence.hold.secure()
    if not is_there:
        core.recall(sequence)
    return is_there


def assert_shippable(core: EngineCore, sequence: Sequence) -> None:
    """All blocks hold what they must, and full ones have their digests."""
    size, contents = core.layout.block_bytes, slots_of(sequence.token_ids)
    assert sequence.status is SequenceStatus.HELD
    for index in range(core.layout.num_blocks_for(sequence.num_tokens)):
        block_id, expected = sequence.block_table[index], contents[index * size : (index + 1) * size]
        view = core.runner.block_view(block_id)
        assert bytes(view)[: len(expected)] == expected
        if len(expected) == size:
            assert core.pool.digest(block_id) == block_digest(view)


def kinds(outputs: Iterable[Output]) -> list[type[Output]]:
    return [type(output) for output in outputs]


# -- the hold itself --------------------------------------------------------------------------------------------------


def test_whoever_comes_first_decides() -> None:
    secured, parked = Hold(), Hold()
    assert secured.secure() and not secured.park() and secured.secure()
    assert parked.park() and not parked.secure() and not parked.park()
    assert parked.is_parked
    parked.restore()
    assert parked.secure() and not parked.park()


def test_two_threads_never_both_get_the_blocks() -> None:
    holds = [Hold() for _ in range(20_000)]
    starts, secured, parked = threading.Barrier(2), list[bool](), list[bool]()

    def secure_all() -> None:
        starts.wait()
        secured.extend(hold.secure() for hold in holds)

    def park_all() -> None:
        starts.wait()
        parked.extend(hold.park() for hold in reversed(holds))

    threads = [threading.Thread(target=target) for target in (secure_all, park_all)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ours != theirs for ours, theirs in zip(secured, reversed(parked), strict=True))


# -- parking ----------------------------------------------------------------------------------------------------------


def test_a_prompt_without_room_parks_one_that_waits_for_its_grant() -> None:
    """Its full blocks stay cached until somebody takes them; the new one is computed as though nobody were there."""
    core = small_core()
    first, second = held_prompt(core, "first"), held_prompt(core, "second")
    assert core.pool.counts.used == 6
    new = held_prompt(core, "new")
    assert [first.status, second.status] == [SequenceStatus.HELD, SequenceStatus.PARKED]
    assert second.block_table == [] and core.pool.counts.used == 6 and core.pool.counts.cached > 0
    assert core.stats().memory.num_parked_prompts == 1
    assert_shippable(core, first)
    assert_shippable(core, new)


def test_nobody_is_parked_while_there_is_room() -> None:
    core = small_core()
    held = [held_prompt(core, name, 2 * BLOCK_SIZE) for name in "abcd"]
    assert core.pool.counts.used == NUM_BLOCKS
    assert {one.status for one in held} == {SequenceStatus.HELD}


def test_the_watermark_is_kept_by_parking_too() -> None:
    core = small_core(num_watermark_blocks=2)
    held = held_prompt(core, "held", BLOCK_SIZE)
    running = hold_prompt(core, "running", 5 * BLOCK_SIZE)
    core.step()
    assert running.status is SequenceStatus.RUNNING and core.pool.counts.available == 2
    new = hold_prompt(core, "new", BLOCK_SIZE)
    core.step()
    assert held.status is SequenceStatus.PARKED and new.status is not SequenceStatus.WAITING


def test_the_lowest_tier_goes_first_then_the_latest() -> None:
    core = small_core()
    tiers = {"a": 0, "b": 1, "c": 1, "d": 0}
    held = {name: held_prompt(core, name, 2 * BLOCK_SIZE, tier_rank=tier) for name, tier in tiers.items()}
    order = []
    for number in range(4):
        assert secure(core, held_prompt(core, f"new{number}", 2 * BLOCK_SIZE))
        order += [name for name, one in held.items() if one.status is SequenceStatus.PARKED and name not in order]
    assert order == ["c", "b", "d", "a"]


def test_one_that_is_still_computed_is_left_alone() -> None:
    core = small_core()
    running = hold_prompt(core, "running", 6 * BLOCK_SIZE)
    core.step()
    new = hold_prompt(core, "new", 3 * BLOCK_SIZE)
    core.step()
    assert (running.status, new.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    run(core)
    assert (running.status, new.status) == (SequenceStatus.PARKED, SequenceStatus.HELD)


def test_a_secured_one_is_never_parked() -> None:
    """Also when it was secured before it was computed; whoever needs its room waits until it is removed."""
    core = small_core()
    early = hold_prompt(core, "early", 4 * BLOCK_SIZE)
    core.step()
    assert secure(core, early)
    late = held_prompt(core, "late", 4 * BLOCK_SIZE)
    assert secure(core, late)
    tables = [list(early.block_table), list(late.block_table)]
    new = hold_prompt(core, "new")
    run(core)
    assert core.is_blocked and list(core.scheduler.waiting) == [new]
    assert [early.block_table, late.block_table] == tables
    assert core.memory.num_parked_prompts == 0
    core.remove("early")
    run(core)
    for sequence in (late, new):
        assert_shippable(core, sequence)


def test_only_prompts_that_hold_blocks_of_the_tenant_are_parked_for_its_quota() -> None:
    core = small_core(quotas={"metered": BlockQuota(max_used_blocks=4)})
    others = [held_prompt(core, name, BLOCK_SIZE, tenant="other", tier_rank=2) for name in "ab"]
    own = held_prompt(core, "own", tenant="metered")
    new = held_prompt(core, "new", tenant="metered")
    assert (own.status, new.status) == (SequenceStatus.PARKED, SequenceStatus.HELD)
    assert {one.status for one in others} == {SequenceStatus.HELD}


def test_a_prompt_of_another_tenant_is_parked_where_it_holds_blocks_of_this_one() -> None:
    """Shared blocks count against whoever took them."""
    core = small_core(quotas={"metered": BlockQuota(max_used_blocks=4)})
    shared = prompt_of("shared", 3 * BLOCK_SIZE)
    metered = make_sequence(core, "m", shared, 5, tenant="metered", shared_salt="x", hold_after_prefill=True)
    other = make_sequence(core, "o", shared, 5, tenant="other", shared_salt="x", hold_after_prefill=True, arrival=1)
    for sequence in (metered, other):
        core.add(sequence)
        run_to_end(core)
    core.remove("m")
    new = held_prompt(core, "new", tenant="metered")
    assert (other.status, new.status) == (SequenceStatus.PARKED, SequenceStatus.HELD)


# -- coming back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE - 1])
@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_a_parked_prompt_is_computed_again_when_its_grant_comes(num_tokens: int, use_prefix_cache: bool) -> None:
    """Nothing that was told is told again, and it is never parked a second time."""
    core = small_core()
    parked = held_prompt(core, "parked", num_tokens, use_prefix_cache=use_prefix_cache)
    other = held_prompt(core, "other", 8 * BLOCK_SIZE)
    assert parked.status is SequenceStatus.PARKED and not core.has_work
    num_sampled = core.stats().num_sampled_tokens
    assert not secure(core, parked)
    outputs = run(core)
    assert set(kinds(outputs)) == {ChunkComputed, SequenceRestored}
    assert outputs[-1] == SequenceRestored("parked", 0)
    assert other.status is SequenceStatus.PARKED
    assert_shippable(core, parked)
    assert core.stats().num_sampled_tokens == num_sampled
    assert core.memory.num_recomputed_tokens == num_tokens, "the other one had taken all blocks"
    assert secure(core, parked), "the same call once more finds it restored"
    big = hold_prompt(core, "big", 8 * BLOCK_SIZE)
    run(core)
    assert (big.status, parked.status) == (SequenceStatus.WAITING, SequenceStatus.HELD)
    core.remove("parked")
    run(core)
    assert big.status is SequenceStatus.HELD


def test_what_the_prefix_cache_still_holds_is_not_computed_again() -> None:
    core = small_core()
    parked = held_prompt(core, "parked", 4 * BLOCK_SIZE + 1)
    held_prompt(core, "other", 5 * BLOCK_SIZE)
    assert parked.status is SequenceStatus.PARKED
    num_left = len(core.block_manager.match_prefix(parked, parked.num_tokens))
    assert 0 < num_left < 4
    secure(core, parked)
    outputs = run(core)
    num_computed = sum(output.num_tokens for output in outputs if isinstance(output, ChunkComputed))
    assert num_computed == parked.num_tokens - num_left * BLOCK_SIZE == core.memory.num_recomputed_tokens
    assert_shippable(core, parked)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_choices_are_told_once(num_choices: int) -> None:
    core = small_core()
    parked = hold_prompt(core, "parked", num_choices=num_choices, temperature=1.0, seed=7)
    told = [output for output in run_to_end(core) if isinstance(output, TokenSampled)]
    expected = [expected_tokens(parked.token_ids, parked.sampling, choice)[0] for choice in range(num_choices)]
    assert [output.token_id for output in told] == expected
    held_prompt(core, "other", 7 * BLOCK_SIZE)
    assert not secure(core, parked)
    assert TokenSampled not in kinds(run(core))
    assert_shippable(core, parked)


def test_candidates_of_a_beam_search_are_told_once() -> None:
    core = small_core()
    parked = hold_prompt(core, "parked", beam=BeamParams(2, 1.0, False, 1))
    (found,) = [output for output in run_to_end(core) if isinstance(output, CandidatesFound)]
    assert [one.token_id for one in found.candidates] == [
        one.token_id for one in first_tokens(parked.token_ids, parked)
    ]
    held_prompt(core, "other", 7 * BLOCK_SIZE)
    assert not secure(core, parked)
    assert CandidatesFound not in kinds(run(core))
    assert_shippable(core, parked)


def test_two_that_are_recalled_and_do_not_fit_together_come_back_one_after_the_other() -> None:
    core = small_core()
    one, two = held_prompt(core, "one", 5 * BLOCK_SIZE), held_prompt(core, "two", 5 * BLOCK_SIZE)
    three = held_prompt(core, "three", 5 * BLOCK_SIZE)
    assert {one.status, two.status} == {SequenceStatus.PARKED}
    for sequence in (two, one):
        assert not secure(core, sequence)
    run(core)
    assert (one.status, two.status, three.status) == (
        SequenceStatus.HELD,
        SequenceStatus.WAITING,
        SequenceStatus.PARKED,
    )
    assert_shippable(core, one)
    core.remove("one")
    run(core)
    assert_shippable(core, two)


def test_one_of_a_better_tier_gives_way_to_a_recalled_one() -> None:
    """Else they could wait for each other: the one for room here, the other for room that decode reserved for it."""
    core = small_core()
    low = held_prompt(core, "low", 5 * BLOCK_SIZE, tier_rank=2)
    high = held_prompt(core, "high", 5 * BLOCK_SIZE, tier_rank=0)
    assert low.status is SequenceStatus.PARKED
    assert not secure(core, low)
    run(core)
    assert high.status is SequenceStatus.PARKED
    assert_shippable(core, low)


def test_pins_yield_to_one_that_is_recalled() -> None:
    core = small_core()
    pinned = held_prompt(core, "pinned", 4 * BLOCK_SIZE)
    core.pool.pin("kept", pinned.block_table)
    core.remove("pinned")
    parked = held_prompt(core, "parked", 4 * BLOCK_SIZE)
    big = held_prompt(core, "big", 8 * BLOCK_SIZE)
    assert parked.status is SequenceStatus.PARKED and core.pool.num_pinned == 0
    secure(core, parked)
    run(core)
    assert big.status is SequenceStatus.PARKED
    assert_shippable(core, parked)


# -- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [None, 0, 1, 2, 50])
def test_an_end_while_parked_or_coming_back_frees_everything_once(num_steps: int | None) -> None:
    """None: before the grant. A recall that comes after the end changes nothing."""
    core = small_core()
    parked = held_prompt(core, "parked", 5 * BLOCK_SIZE)
    other = held_prompt(core, "other", 5 * BLOCK_SIZE)
    if num_steps is not None:
        secure(core, parked)
        for _ in range(num_steps):
            core.step()
    for _ in range(2):
        core.remove("parked")
        core.recall(parked)
        core.check_integrity()
    assert "parked" not in core.sequences and not core.has_work
    core.remove(other.seq_id)
    core.check_integrity()
    assert core.pool.counts.used == 0


def test_a_recall_given_twice_queues_it_once() -> None:
    core = small_core()
    parked, _ = held_prompt(core, "parked"), held_prompt(core, "other", 8 * BLOCK_SIZE)
    for _ in range(3):
        assert not secure(core, parked)
    assert list(core.scheduler.waiting) == [parked]
    core.step()
    assert not secure(core, parked)
    assert kinds(run(core)).count(SequenceRestored) == 1


def test_one_that_fails_when_it_is_computed_again_says_so() -> None:
    core = small_core()
    parked, _ = held_prompt(core, "parked"), held_prompt(core, "other", 7 * BLOCK_SIZE)
    secure(core, parked)

    def fail(slices: object, *rest: object) -> None:
        raise RuntimeError("out of order")

    core.runner.run = fail  # type: ignore[assignment, method-assign]
    assert SequenceFailed in kinds(run(core))
    core.remove("parked")
    core.check_integrity()


# -- nobody waits for ever --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_shipped_whatever_the_order_of_grants(seed: int) -> None:
    """Grants come to one prompt at a time, in any order, and each holds the only place until it has been shipped."""
    rng = random.Random(seed)
    core = small_core(num_watermark_blocks=rng.randrange(3), quotas={"metered": BlockQuota(max_used_blocks=6)})
    left: dict[str, Sequence] = {}
    granted: Sequence | None = None
    num_made, num_tokens_told = 0, 0
    for _ in range(1_500):
        if num_made < 40 and rng.random() < 0.4:
            num_made += 1
            tenant, tier, size = rng.choice(["", "metered"]), rng.randrange(3), rng.randint(1, 6 * BLOCK_SIZE)
            name = f"{seed}.{num_made}"
            left[name] = hold_prompt(core, name, size, tenant=tenant, tier_rank=tier, arrival=num_made)
        outputs = run(core, 1)
        num_tokens_told += kinds(outputs).count(TokenSampled)
        if granted is None:
            started = [one for one in left.values() if one.was_started]
            granted = rng.choice(started) if started and rng.random() < 0.2 else None
        elif not secure(core, granted):
            continue
        elif granted.status is SequenceStatus.HELD:
            assert_shippable(core, granted)
            core.remove(granted.seq_id)
            del left[granted.seq_id]
            granted = None
        if num_made == 40 and not left:
            break
    assert not left, {name: one.status.value for name, one in left.items()}
    assert num_tokens_told == 40
    assert core.memory.num_parked_prompts > 5
    core.check_integrity()
    assert core.pool.counts.used == 0
