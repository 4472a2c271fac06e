"""Engine core over the scripted runner, whose tokens depend on every byte of every block."""

from __future__ import annotations

import random

import pytest

from engine.core import EngineCore, EngineLimits
from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.local import generate
from engine.outputs import ChunkComputed, Output, SequenceStarted, TokenSampled
from engine.scripted import ScriptConfig, ScriptedRunner, reference_continuation, slots_of
from engine.sequence import Priority, Sequence, SequenceStatus
from kvferry.errors import InvalidArgument, ResourceExhausted
from kvferry.sampling import Finish, FinishKind, SamplingParams


def make_core(num_blocks: int = 64, limits: EngineLimits | None = None, block_size: int = 16) -> EngineCore:
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=block_size)
    return EngineCore(runner, limits or EngineLimits(), clock_ns=lambda: 0)


def make_sequence(
    core: EngineCore, name: str, prompt: list[int], max_tokens: int, *, arrival: int = 0, tier_rank: int = 0
) -> Sequence:
    return Sequence(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        priority=Priority(tier_rank=tier_rank, arrival=arrival),
        hash_root=core.hash_root(),
    )


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1024) for _ in range(num_tokens)]


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("max_chunk_tokens", [1, 16, 512])
def test_tokens_are_those_of_the_oracle(block_size: int, max_chunk_tokens: int) -> None:
    core = make_core(512, EngineLimits(max_chunk_tokens=max_chunk_tokens), block_size)
    rng = random.Random(1)
    prompts = {str(length): random_prompt(rng, length) for length in range(1, 3 * 16 + 2)}
    results = generate(core, [make_sequence(core, name, prompt, 20) for name, prompt in prompts.items()])
    assert {name: result.token_ids for name, result in results.items()} == {
        name: reference_continuation(prompt, 20) for name, prompt in prompts.items()
    }
    core.check_integrity()
    assert core.pool.counts.used == 0


@pytest.mark.parametrize("seed", range(10))
def test_twenty_blocks_serve_thirty_sequences_by_preemption(seed: int) -> None:
    core = make_core(20, EngineLimits(max_chunk_tokens=16, max_running=32))
    rng = random.Random(seed)
    cases = {str(i): (random_prompt(rng, rng.randrange(1, 90)), rng.randrange(1, 100)) for i in range(30)}
    sequences = [make_sequence(core, name, *case, arrival=int(name)) for name, case in cases.items()]
    results = generate(core, sequences, before_step=lambda step: core.check_integrity())
    for name, (prompt, max_tokens) in cases.items():
        assert results[name].token_ids == reference_continuation(prompt, max_tokens)
    assert core.stats().num_preemptions > 0
    assert core.stats().num_cached_tokens == 0, "recomputing after preemption is no cache hit"


def test_two_sequences_of_most_of_the_pool_do_not_thrash() -> None:
    core = make_core(20)
    rng = random.Random(0)
    sequences = [make_sequence(core, str(i), random_prompt(rng, 64), 128, arrival=i) for i in range(2)]
    results = generate(core, sequences)
    assert [len(results[str(i)].token_ids) for i in range(2)] == [128, 128]
    assert core.stats().num_preemptions <= 2


def test_prefix_hits_at_block_edges_leave_the_last_token_to_compute() -> None:
    core = make_core()
    for num_tokens in (16, 32, 64, 15, 17, 31, 33):
        prompt = random_prompt(random.Random(num_tokens), num_tokens)
        expected = reference_continuation(prompt, 20)
        cached = []
        for turn in range(3):
            name = f"{num_tokens}.{turn}"
            results = generate(core, [make_sequence(core, name, prompt, 20)])
            assert results[name].token_ids == expected
            cached.append(core.stats().num_cached_tokens)
        full_blocks = (num_tokens - 1) // 16
        assert cached[1] - cached[0] == full_blocks * 16
        assert cached[2] - cached[1] == full_blocks * 16
    core.check_integrity()


def test_salts_do_not_share_blocks() -> None:
    core = make_core()
    prompt = random_prompt(random.Random(5), 64)
    sampling = SamplingParams(max_tokens=1)
    for salt in ("a", "b"):
        generate(core, [Sequence(salt, prompt, sampling, hash_root=core.hash_root(cache_salt=salt))])
    assert core.stats().num_cached_tokens == 0
    generate(core, [Sequence("again", prompt, sampling, hash_root=core.hash_root(cache_salt="a"))])
    assert core.stats().num_cached_tokens == 48


def test_a_sequence_that_can_never_fit_is_refused_with_both_numbers() -> None:
    core = make_core(4)
    with pytest.raises(ResourceExhausted, match=r"up to 5 blocks .* pool has 4"):
        core.add(make_sequence(core, "a", [1] * 60, 6))
    core.add(make_sequence(core, "b", [1] * 60, 5))  # 60 + 5 - 1 tokens of KV fill the pool exactly
    assert not core.sequences.keys() - {"b"}


def test_bad_sequences_are_refused() -> None:
    core = make_core(4096)
    with pytest.raises(InvalidArgument, match="no tokens"):
        core.add(make_sequence(core, "a", [], 1))
    with pytest.raises(InvalidArgument, match="context of 4096"):
        core.add(make_sequence(core, "a", [1], 4096))
    core.add(make_sequence(core, "a", [1], 4095))
    with pytest.raises(InvalidArgument, match="running already"):
        core.add(make_sequence(core, "a", [1], 1))


def test_a_small_sequence_passes_a_big_one_but_not_for_ever() -> None:
    core = make_core(8)
    core.add(make_sequence(core, "holder", [1] * 48, 30, arrival=0))
    core.step()
    core.add(make_sequence(core, "big", [2] * 100, 2, arrival=1))
    finished: list[str] = []
    for index in range(200):
        core.add(make_sequence(core, f"small{index}", [3, index], 1, arrival=2 + index))
        finished += [out.seq_id for out in core.step() if isinstance(out, TokenSampled) and out.finish]
        if "big" in finished:
            break
    assert finished.index("small0") < finished.index("big")
    assert "big" in finished


def test_a_lower_tier_gives_way() -> None:
    core = make_core(8)
    core.add(make_sequence(core, "batch", [1] * 40, 60, arrival=0, tier_rank=2))
    core.step()
    core.add(make_sequence(core, "interactive", [2] * 30, 60, arrival=1, tier_rank=0))
    order = []
    preempted = set()
    while core.has_work:
        for output in core.step():
            if isinstance(output, TokenSampled) and output.finish:
                order.append(output.seq_id)
        preempted |= {seq.seq_id for seq in core.scheduler.waiting if seq.num_preemptions}
    assert order == ["interactive", "batch"]
    assert preempted == {"batch"}


def test_decodes_run_beside_a_long_prompt() -> None:
    core = make_core(256, EngineLimits(max_batched_tokens=32, max_running=8))
    core.add(make_sequence(core, "decoding", [1], 50, arrival=1))
    core.step()
    core.add(make_sequence(core, "long", [2] * 400, 1, arrival=0, tier_rank=0))
    for _ in range(10):
        outputs = core.step()
        assert any(isinstance(out, TokenSampled) and out.seq_id == "decoding" for out in outputs)
        assert sum(out.num_tokens for out in outputs if isinstance(out, ChunkComputed)) == 31


def test_a_held_sequence_keeps_its_blocks_until_removed() -> None:
    core = make_core()
    prompt = random_prompt(random.Random(0), 40)
    held = Sequence("held", prompt, SamplingParams(max_tokens=9, temperature=0.0), hold_after_prefill=True)
    core.add(held)
    outputs = core.step()
    assert [type(output) for output in outputs] == [SequenceStarted, ChunkComputed, TokenSampled]
    assert held.status is SequenceStatus.HELD and len(held.block_table) == 3
    assert not core.has_work
    core.remove("held")
    core.remove("held")
    core.check_integrity()
    assert core.pool.counts.used == 0


def test_a_held_sequence_whose_first_token_ends_it_keeps_its_blocks_too() -> None:
    core = make_core()
    first = reference_continuation([7] * 20, 1)[0]
    sampling = SamplingParams(max_tokens=9, temperature=0.0, eos_token_ids=(first,))
    core.add(Sequence("held", [7] * 20, sampling, hold_after_prefill=True))
    (token,) = [output for output in core.step() if isinstance(output, TokenSampled)]
    assert token.finish == Finish(FinishKind.END_OF_SEQUENCE, token_id=first)
    assert core.pool.counts.used == 2
    core.remove("held")
    assert core.pool.counts.used == 0


def test_resumed_sequence_continues_where_the_first_left_off() -> None:
    prompt = random_prompt(random.Random(3), 21)
    whole = reference_continuation(prompt, 30)
    core = make_core()
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    resumed = Sequence("r", prompt + whole[:11], sampling, num_prompt_tokens=21, hash_root=core.hash_root())
    core.add(resumed)
    tokens = []
    while core.has_work:
        tokens += [(out.token_index, out.token_id) for out in core.step() if isinstance(out, TokenSampled)]
    assert tokens == list(enumerate(whole))[11:]


class _FailingRunner(ScriptedRunner):
    """Raises whenever token 666 is computed."""

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        if any(666 in part.token_ids for part in slices):
            raise RuntimeError("evil token")
        return super().run(slices, on_kv_written)


def test_a_sequence_that_breaks_the_model_fails_alone() -> None:
    core = EngineCore(_FailingRunner(num_blocks=64), EngineLimits())
    good = [1, 2, 3]
    results = generate(core, [make_sequence(core, "good", good, 3), make_sequence(core, "evil", [666], 3)])
    assert results["good"].token_ids == reference_continuation(good, 3)
    assert "RuntimeError" in str(results["evil"].error)
    assert core.pool.counts.used == 0


def test_non_finite_logits_fail_one_sequence() -> None:
    config = ScriptConfig(nan_at_output_index=(2,))
    core = EngineCore(ScriptedRunner(config, num_blocks=64), EngineLimits())
    results = generate(core, [make_sequence(core, "long", [1], 5), make_sequence(core, "short", [2], 2)])
    assert len(results["short"].token_ids) == 2 and results["short"].error is None
    assert len(results["long"].token_ids) == 2 and "non-finite" in str(results["long"].error)


@pytest.mark.parametrize("seed", range(5))
def test_random_cancels_free_every_block_once(seed: int) -> None:
    core = make_core(24, EngineLimits(max_chunk_tokens=16))
    rng = random.Random(seed)
    prompts = {str(i): random_prompt(rng, rng.randrange(1, 80)) for i in range(40)}
    unborn = list(prompts)
    cancelled: set[str] = set()

    def cancel_some(step: int) -> None:
        core.check_integrity()
        if rng.random() < 0.3 and core.sequences:
            victim = rng.choice(sorted(core.sequences))
            cancelled.add(victim)
            core.remove(victim)
        while unborn and (not core.has_work or rng.random() < 0.5):
            name = unborn.pop(0)
            core.add(make_sequence(core, name, prompts[name], 20, arrival=int(name)))

    results = generate(core, [], before_step=cancel_some)
    for name in prompts.keys() - cancelled:
        assert results[name].token_ids == reference_continuation(prompts[name], 20)
    core.check_integrity()
    assert core.pool.counts.used == 0


def test_what_can_be_shipped_is_told_before_the_step_ends() -> None:
    core = make_core(64, EngineLimits(digests=True, max_chunk_tokens=20), block_size=8)
    prompt = random_prompt(random.Random(1), 50)
    made = make_sequence(core, "s", prompt, 2)
    core.add(made)
    early: list[tuple[list[object], bool]] = []  # what was told, and whether its full blocks were whole and digested

    def tell(outputs: list[Output]) -> None:
        computed = next(one.num_computed_tokens for one in outputs if isinstance(one, ChunkComputed))
        slots = slots_of(prompt[:computed])
        blocks = range(computed // 8)
        whole = [
            core.runner.block_view(made.block_table[index]).tobytes() == slots[index * 64 : (index + 1) * 64]
            and core.pool.digest(made.block_table[index]) is not None
            for index in blocks
        ]
        early.append((list(outputs), all(whole)))

    late: list[Output] = []
    while core.has_work:
        late += core.step(tell)
    told = [output for outputs, _ in early for output in outputs]
    assert all(is_whole for _, is_whole in early)
    assert [type(output) for output in told] == [SequenceStarted, ChunkComputed, ChunkComputed, ChunkComputed]
    assert [one.num_computed_tokens for one in told if isinstance(one, ChunkComputed)] == [20, 40, 50]
    assert [type(output) for output in late] == [TokenSampled, TokenSampled]


def test_without_a_listener_everything_is_returned() -> None:
    core = make_core(64, EngineLimits(digests=True))
    core.add(make_sequence(core, "s", [1, 2, 3], 1))
    assert [type(output) for output in core.step()] == [SequenceStarted, ChunkComputed, TokenSampled]
