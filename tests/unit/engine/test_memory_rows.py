"""What went wrong with KV memory elsewhere, tried here: the prefix cache and preemption rows of the collected cases."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import engine.sequence
from decode_svc.admission import DecodeAdmission
from engine.core import EngineCore, EngineLimits
from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.local import choice_name, generate
from engine.outputs import Output, SequenceFailed, SequencePreempted, TokenSampled
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.sequence import Sequence
from kvferry.errors import ResourceExhausted
from kvferry.sampling import BeamParams, FinishKind, SamplingParams
from tests.support.engines import (
    BLOCK_SIZE,
    WatchedRunner,
    expected_beams,
    expected_tokens,
    first_tokens,
    make_core,
    make_sequence,
    poison_free_blocks,
    run_to_end,
    ship,
)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, 0.0)


def serve(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> int:
    """Runs one request alone and compares its tokens; returns how many tokens of it were cached."""
    before = core.stats().num_cached_tokens
    result = generate(core, [make_sequence(core, name, prompt, max_tokens)])[name]
    assert result.token_ids == expected_tokens(prompt, greedy(max_tokens))
    core.check_integrity()
    return core.stats().num_cached_tokens - before


def draw(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1024) for _ in range(num_tokens)]


def tight(mode: PreemptionMode, *, max_running: int = 16) -> EngineLimits:
    return EngineLimits(
        max_batched_tokens=64,
        max_running=max_running,
        max_chunk_tokens=16,
        num_swap_blocks=16,
        preemption=PreemptionPolicy(mode),
    )


# -- the prefix cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_prompt_that_is_wholly_cached_and_ends_on_a_block_edge(num_blocks: int) -> None:
    """R041: its last block is computed again, so that there is something to compute; longer prompts hit it whole."""
    core = make_core(64)
    prompt = draw(random.Random(num_blocks), num_blocks * BLOCK_SIZE)
    for turn in range(3):
        for max_tokens in (1, 20):
            num_cached = serve(core, f"{turn}.{max_tokens}", prompt, max_tokens)
            is_cold = turn == 0 and max_tokens == 1
            assert num_cached == (0 if is_cold else (num_blocks - 1) * BLOCK_SIZE)
        assert serve(core, f"{turn}.longer", [*prompt, turn, 7], 3) == num_blocks * BLOCK_SIZE


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_what_is_reused_before_at_and_after_a_block_edge(num_blocks: int, offset: int) -> None:
    """R042: never a block too few, never more than there is."""
    core = make_core(64)
    num_tokens = num_blocks * BLOCK_SIZE + offset
    prompt = draw(random.Random(num_tokens), num_tokens)
    assert serve(core, "cold", prompt, 5) == 0
    num_cached = serve(core, "warm", prompt, 5)
    assert num_cached == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE >= (num_blocks - 1) * BLOCK_SIZE


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_thousand_requests_through_a_small_pool_with_cancels(mode: PreemptionMode) -> None:
    """R045: sixteen clients, half of them with a shared beginning, a third cancelled: all others are right."""
    core, rng = make_core(40, tight(mode)), random.Random(45)
    shared = draw(rng, 40)
    prompts: dict[str, tuple[list[int], int]] = {}
    tokens: dict[str, list[int]] = {}
    num_made = num_right = 0
    while num_made < 1_000 or prompts:
        while num_made < 1_000 and len(prompts) < 16:
            num_made += 1
            prompt = (
                shared[: rng.randint(4, 40)] + draw(rng, 4) if rng.random() < 0.5 else draw(rng, rng.randint(1, 40))
            )
            prompts[str(num_made)] = prompt, rng.randint(1, 24)
            core.add(make_sequence(core, str(num_made), *prompts[str(num_made)], arrival=num_made))
        if rng.random() < 0.12:
            name = rng.choice(sorted(prompts))
            core.remove(name)
            tokens.pop(name, None)
            del prompts[name]
        poison_free_blocks(core)
        for output in core.step():
            if isinstance(output, TokenSampled):
                tokens.setdefault(output.seq_id, []).append(output.token_id)
                if output.finish is not None:
                    prompt, max_tokens = prompts.pop(output.seq_id)
                    assert tokens.pop(output.seq_id) == expected_tokens(prompt, greedy(max_tokens))
                    num_right += 1
        core.check_integrity()
    assert num_right > 600 and core.stats().num_preemptions > 20 and core.pool.num_evictions > 500
    assert core.pool.counts.used == 0


def test_an_evicted_block_is_found_by_nobody() -> None:
    """R046: filled, evicted, asked for again: a miss and the right tokens; the index holds what is cached."""
    core = make_core(8)
    first, second = draw(random.Random(1), 24), draw(random.Random(2), 31)
    assert serve(core, "a", first, 1) == 0
    assert serve(core, "b", second, 1) == 0, "needs all eight blocks"
    assert serve(core, "a again", first, 1) == 0
    assert len(core.pool.published_blocks()) == core.pool.counts.cached == 6 + 2


def colliding(parent: bytes, token_ids: list[int]) -> bytes:
    return b"the same for all"


def test_a_colliding_hash_gives_nobody_anothers_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """R048: every block has the same hash; a hit compares the tokens."""
    monkeypatch.setattr(engine.sequence, "hash_block", colliding)
    core = make_core(64)
    rng = random.Random(48)
    for number in range(20):
        serve(core, str(number), draw(rng, rng.randint(1, 30)), 6)
    prompt = draw(rng, 12)
    for number in range(3):
        serve(core, f"same{number}", prompt, 6)


def test_a_cancel_between_chunks_leaves_no_poisoned_prefix() -> None:
    """R051: only what is wholly computed is published; cancelled after every chunk, repeated five times each."""
    for num_steps in range(1, 6):
        core = make_core(64, EngineLimits(max_batched_tokens=64, max_running=8, max_chunk_tokens=7))
        prompt = draw(random.Random(num_steps), 40)
        core.add(make_sequence(core, "cancelled", prompt, 5))
        for _ in range(num_steps):
            core.step()
        core.remove("cancelled")
        poison_free_blocks(core)
        cached = [serve(core, str(turn), prompt, 5) for turn in range(5)]
        assert cached == [7 * num_steps // BLOCK_SIZE * BLOCK_SIZE] + [36] * 4


@pytest.mark.parametrize("use_prefix_cache", [True, False])
def test_fresh_requests_right_after_cancelled_ones_get_their_own_tokens(use_prefix_cache: bool) -> None:
    """R052: five cancelled while they decode, five fresh ones in their blocks, fifty rounds."""
    core, rng = make_core(24), random.Random(52)
    for number in range(50):
        for index in range(5):
            core.add(make_sequence(core, f"{number}-{index}", draw(rng, 8), 20, use_prefix_cache=use_prefix_cache))
        for _ in range(rng.randint(2, 8)):
            core.step()
        for name in list(core.sequences):
            core.remove(name)
        prompts = {f"{number}+{index}": draw(rng, rng.randint(1, 12)) for index in range(5)}
        sequences = [
            make_sequence(core, name, prompt, 8, use_prefix_cache=use_prefix_cache) for name, prompt in prompts.items()
        ]
        results = generate(core, sequences)
        assert {name: one.token_ids for name, one in results.items()} == {
            name: expected_tokens(prompt, greedy(8)) for name, prompt in prompts.items()
        }
        core.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
def test_one_short_request_on_the_decode_side_leaves_the_counts_at_nought(num_tokens: int) -> None:
    """R053: shipped in, decoded, twice, the second time from the cache; a count never goes below nought."""
    core = make_core(16)
    admission = DecodeAdmission(core)
    for turn in range(2):
        prompt = list(range(num_tokens))
        sequence = make_sequence(core, f"s{turn}", prompt, 3)
        admission.register(sequence)
        admission.offer(sequence.seq_id, sequence.block_hashes(num_tokens // BLOCK_SIZE, BLOCK_SIZE), num_tokens)
        admission.poll()
        assert sequence.num_cached_tokens == (num_tokens // BLOCK_SIZE * BLOCK_SIZE if turn else 0)
        ship(core, sequence)
        admission.commit(sequence.seq_id, first_tokens(prompt, sequence))
        core.check_integrity()
        run_to_end(core)
        admission.unregister(sequence.seq_id)
        assert set(core.pool.census().ref_counts) == set() and core.pool.counts.used == 0
    with pytest.raises(ValueError, match="freed more often"):
        core.pool.free([0])
    core.check_integrity()


def test_eight_equal_cold_prompts_are_computed_once() -> None:
    """R055: those that come while the first computes wait for it, then hit all but the end."""
    core = make_core(400, EngineLimits(max_batched_tokens=512, max_running=16, max_chunk_tokens=64))
    prompt = draw(random.Random(55), 1_000)
    sequences = [make_sequence(core, str(number), prompt, 4, arrival=number) for number in range(8)]
    results = generate(core, sequences)
    assert all(one.token_ids == expected_tokens(prompt, greedy(4)) for one in results.values())
    assert core.stats().num_prefill_tokens <= 1_000 + 7 * BLOCK_SIZE
    assert core.memory.num_prefix_waits > 0
    assert core.stats().num_cached_tokens >= 7 * 996


def test_eight_equal_offers_are_shipped_once() -> None:
    """R055, on decode: a grant waits for the prefix that is on its way to another one."""
    core = make_core(400)
    admission = DecodeAdmission(core)
    prompt = draw(random.Random(55), 102)
    sequences = [make_sequence(core, str(number), prompt, 4, arrival=number) for number in range(8)]
    for sequence in sequences:
        admission.register(sequence)
        admission.offer(sequence.seq_id, sequence.block_hashes(25, BLOCK_SIZE), 102)
    wanted = [getattr(grant, "wanted", ()) for grant in admission.poll()]
    assert [len(one) for one in wanted] == [26]
    ship(core, sequences[0])
    admission.commit("0", first_tokens(prompt, sequences[0]))
    assert [getattr(grant, "wanted", None) for grant in admission.poll()[1:]] == [(25,)] * 7
    core.check_integrity()


# -- preemption --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_six_long_outputs_through_a_pool_for_two(mode: PreemptionMode) -> None:
    """R056: the same tokens as with a large pool, and as many."""

    def outputs(num_blocks: int) -> dict[str, list[int]]:
        core, rng = make_core(num_blocks, tight(mode)), random.Random(56)
        sequences = [
            make_sequence(core, str(number), draw(rng, 8), 40, arrival=number, temperature=1.0, seed=number)
            for number in range(6)
        ]
        results = generate(core, sequences, before_step=lambda step: poison_free_blocks(core))
        assert (core.stats().num_preemptions > 0) == (num_blocks < 100)
        return {name: one.token_ids for name, one in results.items()}

    small = outputs(24)
    assert small == outputs(100)
    assert {len(tokens) for tokens in small.values()} == {40}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_request_preempted_three_times_repeats_nothing(mode: PreemptionMode) -> None:
    """R057: every token once, in order, also across preemptions; what was sampled is counted once."""
    core = make_core(24, tight(mode))
    prompt = draw(random.Random(57), 10)
    core.add(make_sequence(core, "victim", prompt, 80, arrival=0, tier_rank=2))
    outputs: list[Output] = []
    for number in range(3):
        while sum(isinstance(one, SequencePreempted) for one in outputs) <= number:
            if len(core.sequences) == 1:
                for index in range(2):
                    name = f"{number}.{len(outputs)}.{index}"
                    core.add(make_sequence(core, name, draw(random.Random(len(outputs)), 6), 34, arrival=1))
            outputs += core.step()
            assert core.sequences, "the victim ended too soon"
    outputs += run_to_end(core)
    told = [
        (one.token_index, one.token_id) for one in outputs if isinstance(one, TokenSampled) and one.seq_id == "victim"
    ]
    assert told == list(enumerate(expected_tokens(prompt, greedy(80))))
    assert core.stats().num_sampled_tokens == sum(isinstance(one, TokenSampled) for one in outputs)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_one_request_that_fills_the_pool_is_served_and_a_bigger_one_refused(num_choices: int) -> None:
    """R059, R063: nobody else to preempt; what can never fit is refused with both numbers, and the worker lives on."""
    core = make_core(10)
    with pytest.raises(ResourceExhausted, match=r"up to 11 blocks .* pool has 10"):
        core.add(make_sequence(core, "bigger", [1] * 8, 34, num_choices=num_choices))
    results = generate(core, [make_sequence(core, "a", [1] * 8, 33, num_choices=num_choices, temperature=1.0)])
    for choice in range(num_choices):
        result = results[choice_name("a", choice)]
        assert result.token_ids == expected_tokens([1] * 8, SamplingParams(33), choice)
        assert result.finish is not None and result.finish.kind is FinishKind.LENGTH
    assert core.pool.counts.used == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_coming_back_after_preemption_is_no_cache_hit(mode: PreemptionMode) -> None:
    """R115: random prompts that share nothing, a tiny pool: the hit rate stays 0."""
    core, rng = make_core(24, tight(mode)), random.Random(115)
    for number in range(60):
        prompt = [number, *draw(rng, rng.randint(1, 20))]
        core.add(
            make_sequence(core, str(number), prompt, 20, arrival=number, num_choices=number % 3 + 1, temperature=1.0)
        )
    run_to_end(core)
    assert core.stats().num_preemptions > 20
    assert core.stats().num_cached_tokens == 0
    (counter,) = core.memory.hits.values()
    assert counter.num_hit_tokens == 0 and counter.num_queried_tokens > 0


# -- nothing is left ---------------------------------------------------------------------------------------------------


class _FailingRunner(WatchedRunner):
    """Raises whenever token 666 is computed, alone or in company."""

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        if any(666 in part.token_ids for part in slices):
            raise RuntimeError("evil token")
        return super().run(slices, on_kv_written)


def begin_somehow(core: EngineCore, admission: DecodeAdmission, sequence: Sequence, rng: random.Random) -> None:
    """Computed here, computed here and bound to fail, or shipped in."""
    kind = rng.randrange(3)
    if kind == 0:
        admission.register(sequence)
        hashes = sequence.block_hashes(sequence.num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        admission.offer(sequence.seq_id, hashes, sequence.num_tokens)
        return
    if kind == 1:
        sequence.token_ids[rng.randrange(sequence.num_tokens)] = 666
    core.add(sequence)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.filterwarnings("error")
def test_ten_thousand_cancelled_or_failed_requests_leave_nothing_behind(
    mode: PreemptionMode, caplog: pytest.LogCaptureFixture
) -> None:
    """Five thousand under either kind of preemption, of one and several choices, and beams; cancelled while they wait,
    run, are swapped out or reserved for, before and after their commit."""
    caplog.set_level("CRITICAL")
    limits = tight(mode, max_running=12)
    runner = _FailingRunner(32, max_tokens=limits.max_batched_tokens)
    core = EngineCore(runner, limits, clock_ns=int)
    runner.published = core.pool.published_blocks
    admission, rng = DecodeAdmission(core), random.Random(10)
    live: dict[str, Sequence] = {}
    ended: Counter[str] = Counter()
    number = 0
    while ended.total() < 5_000:
        while len(live) < 14:
            number += 1
            beam = BeamParams(2) if rng.random() < 0.15 else None
            sequence = make_sequence(
                core,
                str(number),
                [rng.randrange(3), *draw(rng, rng.randint(0, 24))],
                rng.randint(2, 10 if beam else 40),
                arrival=number,
                tier_rank=rng.randrange(2),
                num_choices=1 if beam else rng.choice([1, 1, 2, 3]),
                beam=beam,
                temperature=1.0,
                seed=number,
            )
            begin_somehow(core, admission, sequence, rng)
            live[sequence.seq_id] = sequence
        for output in [*admission.poll(), *core.step()]:
            name = getattr(output, "seq_id", "")
            if isinstance(output, SequenceFailed) and name in live:
                ended["failed"] += 1
                admission.unregister(name)
                del live[name]
        for name in [one for one, sequence in live.items() if sequence.status.value == "reserved"]:
            if rng.random() < 0.5:
                ship(core, live[name])
                first = first_tokens(live[name].token_ids, live[name])
                if any(live[name].sampling.finish_after(one.token_id, 1) is None for one in first):
                    admission.commit(name, first)
        for name in rng.sample(sorted(live), k=min(len(live), rng.randint(0, 4))):
            status = live[name].status.value
            admission.unregister(name)
            del live[name]
            ended[status] += status != "finished"
        if ended.total() % 8 == 0:
            core.check_integrity()
    for name in live:
        admission.unregister(name)
    core.check_integrity()
    assert not core.sequences and not core.has_work and admission.num_waiting == 0
    assert core.pool.counts.used == 0 and core.swap_space.num_used == 0
    assert all(ended[status] > 50 for status in ("failed", "waiting", "running", "reserved")), ended
    assert core.stats().num_preemptions > 100


def test_beams_after_all_that_are_right() -> None:
    """The oracle of beam searches is not the engine: it searches over the slots of whole sequences."""
    core = make_core(64)
    prompt = draw(random.Random(3), 13)
    for width in (1, 2, 3, 4):
        beam = BeamParams(width, length_penalty=0.5, num_returned=width)
        sequence = make_sequence(core, f"b{width}", prompt, 9, beam=beam)
        result = generate(core, [sequence])[f"b{width}"]
        assert result.beams == expected_beams(prompt, beam, sequence.sampling) and len(result.beams) == width
