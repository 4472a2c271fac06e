"""Several choices and beams across the hand-off: one prefill, one shipment, forks that share and copy on write."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from engine.core import EngineCore, EngineLimits
from engine.local import choice_name, generate
from engine.scripted import DEFAULT_SCRIPT_CONFIG, ScriptedRunner, reference_continuation
from engine.sequence import Sequence
from kvferry.errors import InvalidArgument, KvferryError
from kvferry.sampling import BeamParams, SamplingParams
from kvferry.spec import AttemptId, SequenceSpec
from proto.kvferry.v1 import types_pb2, worker_pb2
from tests.support.workers import (
    PairCaller,
    PairResult,
    assert_idle,
    core_of,
    make_spec,
    running_pair,
    scripted_config,
    scripted_folder,
)

BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
"""Two full blocks and a partial one."""
NUM_TOKENS = 11


def choices_spec(name: str, prompt: list[int], num_choices: int, max_tokens: int = NUM_TOKENS) -> SequenceSpec:
    return dataclasses.replace(make_spec(name, prompt, max_tokens, temperature=1.0, seed=42), num_choices=num_choices)


def expected(spec: SequenceSpec) -> dict[int, list[int]]:
    """By hand: every choice continues the prompt with its own noise."""
    numbers = range(spec.choice, spec.choice + spec.num_choices)
    count = spec.sampling.max_tokens - (len(spec.token_ids) - spec.num_prompt_tokens)
    return {
        number: reference_continuation(spec.token_ids, count, DEFAULT_SCRIPT_CONFIG, spec.sampling, number)
        for number in numbers
    }


def beams_of(result: PairResult) -> list[tuple[tuple[int, ...], float]]:
    return [(tuple(beam.token_ids), round(beam.score, 5)) for beam in result.beams]


def local_beams(spec: SequenceSpec) -> list[tuple[tuple[int, ...], float]]:
    """The same search in one process with plenty of room."""
    core = EngineCore(ScriptedRunner(num_blocks=200, block_size=BLOCK), EngineLimits())
    sequence = Sequence("beam", spec.token_ids, spec.sampling, beam=spec.beam, hash_root=core.hash_root())
    found = generate(core, [sequence])[choice_name("beam", 0)].beams
    return [(beam.token_ids, round(beam.score, 5)) for beam in found]


@pytest.mark.parametrize("num_prompt_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("num_choices", [2, 4, 8])
async def test_choices_come_from_one_prefill_and_one_shipment(
    tmp_path: Path, num_prompt_tokens: int, num_choices: int
) -> None:
    """R039."""
    async with running_pair(scripted_config(scripted_folder(tmp_path / "m"))) as (prefill, decode, caller):
        spec = choices_spec("n", list(range(20, 20 + num_prompt_tokens)), num_choices)
        result = await caller.generate(spec)
        assert result.tokens == expected(spec)
        assert {finish.reason for finish in result.finishes.values()} == {types_pb2.FINISH_REASON_LENGTH}
        assert result.done is not None
        assert result.done.num_blocks_shipped == -(-num_prompt_tokens // BLOCK)
        assert core_of(prefill).stats().num_prefill_tokens == num_prompt_tokens
        assert core_of(decode).stats().num_prefill_tokens == 0
        has_partial_block = num_prompt_tokens % BLOCK != 0
        assert core_of(decode).memory.num_blocks_copied == (num_choices - 1) * has_partial_block
        await assert_idle(prefill, decode)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_choices_in_a_small_pool_are_preempted_one_by_one(tmp_path: Path, preemption: str) -> None:
    folder = scripted_folder(tmp_path / "m")
    small = scripted_config(folder, num_blocks=14, preemption=preemption)
    async with running_pair(scripted_config(folder), small) as (prefill, decode, caller):
        specs = [choices_spec(f"n{number}", [*PROMPT, number], 4, 16) for number in range(5)]
        results = await asyncio.gather(*(caller.generate(spec) for spec in specs))
        assert [result.tokens for result in results] == [expected(spec) for spec in specs]
        counters = core_of(decode).memory
        assert counters.num_recompute_preemptions + counters.num_swap_preemptions > 0
        assert (counters.num_swap_preemptions > 0) == (preemption == "swap")
        await assert_idle(prefill, decode)
        assert core_of(decode).swap_space.num_used == 0


async def test_a_first_token_may_end_some_choices_or_all(tmp_path: Path) -> None:
    """R035 with several choices: what has ended is not decoded, and when all have, nothing is committed."""
    async with running_pair(scripted_config(scripted_folder(tmp_path / "m"))) as (prefill, decode, caller):
        spec = choices_spec("some", PROMPT, 3)
        firsts = [tokens[0] for tokens in expected(spec).values()]
        stopping = dataclasses.replace(spec.sampling, stop_token_ids=(firsts[1],))
        result = await caller.generate(dataclasses.replace(spec, sampling=stopping))
        assert result.tokens[1] == [firsts[1]]
        assert result.finishes[1].reason == types_pb2.FINISH_REASON_STOP_TOKEN
        assert result.tokens[0] == expected(spec)[0] and result.tokens[2] == expected(spec)[2]
        stopping = dataclasses.replace(spec.sampling, stop_token_ids=tuple(firsts))
        num_steps = core_of(decode).num_steps
        whole = dataclasses.replace(choices_spec("all", [*PROMPT], 3), sampling=stopping)
        result = await caller.generate(whole)
        assert result.tokens == {number: [first] for number, first in enumerate(firsts)}
        assert result.committed is None and core_of(decode).num_steps == num_steps
        await assert_idle(prefill, decode)


async def test_a_single_choice_goes_on_with_its_own_noise_and_its_own_output(tmp_path: Path) -> None:
    """What a request that split does with each of its choices."""
    async with running_pair(scripted_config(scripted_folder(tmp_path / "m"))) as (prefill, decode, caller):
        whole = expected(choices_spec("n", PROMPT, 4))
        for number, given in ((2, 3), (3, 1), (1, 0)):
            spec = choices_spec(f"resumed{number}", PROMPT, 1)
            known = (*PROMPT, *whole[number][:given])
            result = await caller.generate(
                dataclasses.replace(spec, token_ids=known, num_prompt_tokens=len(PROMPT), choice=number)
            )
            assert result.tokens[number] == whole[number][given:]
        await assert_idle(prefill, decode)


async def test_stopping_one_choice_leaves_the_others(tmp_path: Path) -> None:
    """Also one that has not begun: its stop may overtake the shipment."""
    folder = scripted_folder(tmp_path / "m", step_delay_s=0.01)
    async with running_pair(scripted_config(folder)) as (prefill, decode, caller):
        spec = choices_spec("stop", PROMPT, 3, 40)
        for early in (True, False):
            result = await _generate_and_stop(
                caller, dataclasses.replace(spec, id=AttemptId(f"stop{early}", 1)), early=early
            )
            assert result.tokens[0] == expected(spec)[0]
            assert result.tokens[2] == expected(spec)[2]
            assert len(result.tokens[1]) < 40
            assert result.tokens[1] == expected(spec)[1][: len(result.tokens[1])]
            await assert_idle(prefill, decode)


async def _generate_and_stop(caller: PairCaller, spec: SequenceSpec, *, early: bool) -> PairResult:
    """Stops choice 1 before its prefill begins, or after its fifth token."""
    result = PairResult((0, 2))
    stop = worker_pb2.DecodeRequest(stop=worker_pb2.DecodeStop(num_wanted_tokens=1, choice=1))
    async with caller.open_decode() as decode:
        registered = await caller.register(decode, spec)
        if early:
            await decode.write(stop)
        prefill = asyncio.ensure_future(caller.prefill(spec, registered, result))
        stopped = early
        while not result.is_finished():
            message = await decode.read()
            if message.HasField("tokens"):
                result.take_tokens(message.tokens)
            if not stopped and len(result.tokens.get(1, ())) >= 5:
                stopped = True
                await decode.write(stop)
        await prefill
    return result


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, NUM_TOKENS])
async def test_beams_are_those_of_one_process(tmp_path: Path, width: int, max_tokens: int) -> None:
    async with running_pair(scripted_config(scripted_folder(tmp_path / "m"))) as (prefill, decode, caller):
        beam = BeamParams(width, length_penalty=0.5, num_returned=width)
        spec = dataclasses.replace(make_spec("beam", PROMPT, max_tokens), beam=beam)
        result = await caller.generate(spec)
        assert beams_of(result) == local_beams(spec)
        assert len(result.beams) == width and result.tokens == {}
        assert core_of(prefill).stats().num_prefill_tokens == len(PROMPT)
        await assert_idle(prefill, decode)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_beams_are_preempted_together(tmp_path: Path, preemption: str) -> None:
    folder = scripted_folder(tmp_path / "m", step_delay_s=0.005)
    small = scripted_config(folder, num_blocks=22, preemption=preemption, prefix_caching=preemption == "swap")
    async with running_pair(scripted_config(folder), small) as (prefill, decode, caller):
        beam = BeamParams(3, num_returned=3)
        specs = [
            dataclasses.replace(make_spec(f"beam{number}", [*PROMPT, number], 18), beam=beam) for number in range(4)
        ]
        results = await asyncio.gather(*(caller.generate(spec) for spec in specs))
        assert [beams_of(result) for result in results] == [local_beams(spec) for spec in specs]
        counters = core_of(decode).memory
        assert (counters.num_swap_preemptions > 0) == (preemption == "swap")
        assert (counters.num_recompute_preemptions > 0) == (preemption == "recompute")
        await assert_idle(prefill, decode)


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    async with running_pair(scripted_config(scripted_folder(tmp_path / "m"))) as (prefill, decode, caller):
        spec = dataclasses.replace(make_spec("a", PROMPT, 5), beam=BeamParams(2, num_returned=2))
        with pytest.raises(InvalidArgument, match="target: must be set: a beam search"):
            await caller.prefill(spec, None, PairResult())
        wide = dataclasses.replace(make_spec("b", PROMPT[:4], 1), beam=BeamParams(65, num_returned=1))
        with pytest.raises(InvalidArgument, match="65 beams; this worker's batch has 64 places"):
            await caller.generate(wide)
        with pytest.raises(InvalidArgument, match="num_returned: must be 1 … 2, got 3"):
            await caller.generate(dataclasses.replace(spec, beam=BeamParams(2, num_returned=3)))
        other = dataclasses.replace(make_spec("c", PROMPT, 5), num_choices=2)
        single = make_spec("c", PROMPT, 5)
        with pytest.raises(KvferryError, match="1 tokens for 2 choices"):
            async with caller.open_decode() as call:
                registered = await caller.register(call, other)
                await caller.prefill(single, registered, PairResult())
        await assert_idle(prefill, decode)


def test_oracle_differs_between_choices() -> None:
    """The comparison above could not fail if choices were equal."""
    spec = choices_spec("n", PROMPT, 4)
    assert len({tuple(tokens) for tokens in expected(spec).values()}) == 4
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    assert reference_continuation(PROMPT, 4, DEFAULT_SCRIPT_CONFIG, greedy, 1) == reference_continuation(PROMPT, 4)
