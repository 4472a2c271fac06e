"""Drafts: where they come from, how long they are, and that nothing but speed tells whether there were any."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import EngineCore, EngineLimits
from engine.forward_batch import Sampled, SampleRequest
from engine.local import LocalResult, choice_name, generate
from engine.outputs import SequencePreempted, TokenSampled
from engine.preemption import PreemptionPolicy
from engine.scripted import ScriptConfig, ScriptedRunner
from engine.sequence import Sequence
from engine.speculation import (
    LEAST_MATCH,
    LONGEST_MATCH,
    MAX_CANDIDATES,
    MAX_DRAFT_TOKENS,
    SequenceLookup,
    SpeculationPolicy,
    Speculator,
    StepOutlook,
    TextIndex,
    sample_run,
)
from kvferry.errors import Internal
from kvferry.sampling import BeamParams, FinishKind, SamplingParams
from tests.support.drafts import scripted_drafts, speculate
from tests.support.engines import (
    BLOCK_SIZE,
    expected_beams,
    expected_tokens,
    make_core,
    make_sequence,
    poison_free_blocks,
    run_to_end,
)

TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=60)
PLENTY = StepOutlook(num_tokens=1.0, cost=1.0)
PERIOD = [7, 8, 9, 10, 11]


# -- the index --------------------------------------------------------------------------------------------------------


@given(TEXTS, st.lists(st.integers(0, 60), max_size=4))
def test_the_longest_match_is_found_however_the_text_grew(text: list[int], stops: list[int]) -> None:
    index = TextIndex()
    for stop in sorted(stops):
        index.read(text[:stop])
    index.read(text)
    assert index.match(text) == plain_match(text)


def plain_match(text: SequenceOf[int]) -> tuple[int, int]:
    """The same by trying everything."""

    def length(place: int) -> int:
        same = 0
        while same < min(LONGEST_MATCH, place) and text[place - 1 - same] == text[len(text) - 1 - same]:
            same += 1
        return same

    places = [place for place in range(LEAST_MATCH, len(text)) if length(place) >= LEAST_MATCH][-MAX_CANDIDATES:]
    best = max(places, key=lambda place: (length(place), place), default=0)
    return best, length(best) if best else 0


def test_a_text_in_a_loop_is_expected_to_stay_in_it() -> None:
    lookup, outlook = SequenceLookup(), replace(PLENTY)
    draft = lookup.draft(PERIOD * 3, MAX_DRAFT_TOKENS, outlook, row_cost=0.01)
    assert draft == (PERIOD * 4)[: len(draft)]
    assert len(draft) > len(PERIOD)


# -- how long a draft is ----------------------------------------------------------------------------------------------


def lengths_of_drafts(*, is_right: bool, number: int, row_cost: float = 0.08, num_decodes: int = 1) -> list[int]:
    """Of a looping text whose drafts come out, or never."""
    lookup, text, lengths = SequenceLookup(), PERIOD * 4, list[int]()
    for step in range(number):
        outlook = StepOutlook.of(num_decodes, row_cost)
        draft = lookup.draft(text, MAX_DRAFT_TOKENS, outlook, row_cost)
        lengths.append(len(draft))
        new = [*draft, PERIOD[len(text) % 5 + len(draft) % 5 - 5]] if is_right else [100 + step]
        lookup.observe(new)
        text = text + (PERIOD * 5)[: len(new)] if is_right else text
    return lengths


def test_drafts_grow_while_they_come_out_and_end_where_they_do_not() -> None:
    right, wrong = lengths_of_drafts(is_right=True, number=8), lengths_of_drafts(is_right=False, number=20)
    assert right[-1] == MAX_DRAFT_TOKENS
    assert wrong[0] > 0 and wrong[-1] == 0
    assert wrong == sorted(wrong, reverse=True) and not any(wrong[12:])


def test_what_would_have_been_right_brings_drafts_back() -> None:
    """A sequence that has stopped to draft is judged by what it would have drafted, so it costs nothing to find out."""
    lookup, text = SequenceLookup(), PERIOD * 4
    for number in range(20):
        lookup.draft(text, MAX_DRAFT_TOKENS, replace(PLENTY), 0.08)
        lookup.observe([100 + number])
    assert lookup.draft(text, MAX_DRAFT_TOKENS, replace(PLENTY), 0.08) == []
    for number in range(20):
        lookup.observe([PERIOD[number % 5]])
        text = [*text, PERIOD[number % 5]]
        draft = lookup.draft(text, MAX_DRAFT_TOKENS, replace(PLENTY), 0.08)
    assert draft


@pytest.mark.parametrize(("row_cost", "num_decodes"), [(1.0, 1), (0.3, 32)])
def test_rows_that_cost_more_than_they_bring_are_not_drafted(row_cost: float, num_decodes: int) -> None:
    assert not any(lengths_of_drafts(is_right=False, number=5, row_cost=row_cost, num_decodes=num_decodes))


def test_a_batch_drafts_less_than_one_sequence() -> None:
    alone, among_many = (lengths_of_drafts(is_right=True, number=1, num_decodes=number)[0] for number in (1, 32))
    assert alone > among_many


# -- verification -----------------------------------------------------------------------------------------------------


def places(tokens: SequenceOf[int], failing: int | None = None, **sampling: object) -> tuple[list[int], Sampled]:
    """Runs a draft of [1, 2, 3, 4] against a model that says `tokens`; what was asked for, and the result."""
    params = SamplingParams(**{"max_tokens": 50, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    asked: list[int] = []

    def sample(place: int, request: SampleRequest) -> Sampled:
        assert (request.position, request.num_output_tokens) == (3 + place, 1 + place)
        assert list(request.token_ids) == [50, 51, 52, *range(1, 1 + place)]
        asked.append(place)
        return Sampled(None, "failed") if place == failing else Sampled(tokens[place])

    return asked, sample_run(sample, SampleRequest(params, 3, 1, token_ids=[50, 51, 52]), [1, 2, 3, 4])


@pytest.mark.parametrize("num_right", range(5))
def test_a_run_ends_behind_the_first_wrong_token(num_right: int) -> None:
    tokens = [*range(1, num_right + 1), 99, 98, 97, 96, 95]
    asked, result = places(tokens)
    assert [result.token_id, *(one.token_id for one in result.further)] == tokens[: num_right + 1]
    assert asked == list(range(num_right + 1))


def test_a_run_ends_with_a_token_that_ends_the_choice() -> None:
    for sampling in ({"stop_token_ids": (2,)}, {"eos_token_ids": (2,)}, {"max_tokens": 3}):
        asked, result = places([1, 2, 3, 4, 5], **sampling)
        assert [result.token_id, *(one.token_id for one in result.further)] == [1, 2], sampling
        assert asked == [0, 1]


def test_a_place_that_fails_ends_the_run_before_it() -> None:
    _, result = places([1, 2, 3, 4, 5], failing=2)
    assert result.error is None
    assert [result.token_id, *(one.token_id for one in result.further)] == [1, 2]
    _, result = places([1, 2, 3, 4, 5], failing=0)
    assert result.error == "failed"


# -- the engine -------------------------------------------------------------------------------------------------------


class Published:
    """Hashes that could be hit at any time."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def on_published(self, block_hash: bytes) -> None:
        self.hashes.add(block_hash)

    def on_unpublished(self, block_hash: bytes) -> None:
        """It was findable."""

    def on_all_unpublished(self) -> None:
        """They were findable."""


@given(st.integers(0, 1 << 30))
def test_tokens_and_published_blocks_are_those_without_drafts(seed: int) -> None:
    rng = random.Random(seed)
    limits = EngineLimits(
        max_batched_tokens=rng.choice((4, 12, 64)),
        max_running=4,
        max_chunk_tokens=rng.choice((1, 3, 16)),
        num_swap_blocks=rng.choice((0, 16)),
        preemption=PreemptionPolicy(rng.choice(("recompute", "swap"))),
        digests=True,
    )
    core = make_core(rng.choice((12, 16, 64)), limits)
    speculate(core, scripted_drafts(rng))
    core.pool.listener = published = Published()
    expected: dict[tuple[str, int], list[int]] = {}
    known: set[bytes] = set()
    for number in range(rng.randint(1, 5)):
        sequence = drawn_sequence(core, rng, f"s{number}")
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        for choice in range(sequence.num_choices):
            tokens = expected_tokens(prompt, sequence.sampling, choice)
            expected[sequence.seq_id, choice] = tokens
            whole = make_sequence(core, "whole", [*prompt, *tokens], 1)
            known.update(whole.block_hashes(len(whole.token_ids) // BLOCK_SIZE, BLOCK_SIZE))
        core.add(sequence)
    told: dict[tuple[str, int], list[int]] = {key: [] for key in expected}
    for output in run_to_end(core):
        if isinstance(output, TokenSampled):
            tokens = told[output.seq_id, output.choice]
            assert output.token_index == len(tokens)
            tokens.append(output.token_id)
            assert (output.finish is None) == (len(tokens) < len(expected[output.seq_id, output.choice]))
    assert told == expected
    assert published.hashes <= known
    assert core.stats().num_sampled_tokens == sum(map(len, expected.values()))
    assert core.pool.counts.used == 0


def drawn_sequence(core: EngineCore, rng: random.Random, name: str) -> Sequence:
    """With a prompt that begins as others do, and an end of its own."""
    prompt = [100, 101, 102, 103, 104, 105, 106, 107][: rng.randint(1, 8)] + [rng.randrange(50)] * rng.randint(0, 3)
    sequence = make_sequence(
        core,
        name,
        prompt,
        rng.randint(1, 24),
        arrival=rng.randrange(5),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(9),
        num_choices=rng.choice((1, 1, 3)),
    )
    if rng.random() < 0.4:
        stop = rng.choice(expected_tokens(prompt, sequence.sampling))
        sequence.sampling = replace(sequence.sampling, stop_token_ids=(stop,), min_tokens=rng.choice((0, 3)))
    return sequence


class Most(random.Random):
    """Draws the most there can be: drafts are long and right."""

    def randint(self, a: int, b: int) -> int:
        return b


def speculating(num_blocks: int = 64, *, rng: random.Random | None = None, **limits: Any) -> EngineCore:
    """An engine whose drafts are always right, unless `rng` draws them."""
    core = make_core(num_blocks, EngineLimits(**{"max_batched_tokens": 64, "max_running": 8, **limits}))
    speculate(core, scripted_drafts(rng or Most(0)))
    return core


def test_several_tokens_come_in_a_step() -> None:
    core = speculating()
    core.add(make_sequence(core, "a", [1, 2, 3], 17))
    sizes = []
    while core.has_work:
        outputs = [one for one in core.step() if isinstance(one, TokenSampled)]
        assert len({one.at_ns for one in outputs}) == 1
        sizes.append(len(outputs))
    assert sizes == [1, 8, 8]
    stats = core.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 14, 14)
    assert stats.num_steps == 3


def test_no_draft_goes_beyond_the_end() -> None:
    """The KV of the last token is never computed, so no draft holds it."""
    core = speculating()
    core.add(make_sequence(core, "a", [1, 2, 3], 6))
    while core.has_work:
        core.step()
    assert (core.stats().num_draft_tokens, core.stats().num_accepted_tokens) == (4, 4)


def test_a_draft_takes_no_block_that_others_need() -> None:
    """It is cut to what is there beside the watermark; nothing is preempted for it."""
    prompt, num_tokens = [1] * 8, 12
    lengths = {}
    for num_blocks in (5, 6, 7):
        core = speculating(num_blocks, num_watermark_blocks=2)
        core.add(make_sequence(core, "a", prompt, num_tokens))
        outputs = run_to_end(core)
        assert not [one for one in outputs if isinstance(one, SequencePreempted)]
        sampled = [one.token_id for one in outputs if isinstance(one, TokenSampled)]
        assert sampled == expected_tokens(prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0))
        lengths[num_blocks] = core.stats().num_draft_tokens
    assert lengths == {5: 8, 6: 9, 7: 9}


def test_wrong_drafts_leave_no_block_behind() -> None:
    core = make_core(64)
    speculator = scripted_drafts(random.Random(0))
    speculator.propose = lambda sequence, most, outlook: [1023] * min(most, 13)  # type: ignore[method-assign]
    speculate(core, speculator)
    sequence = make_sequence(core, "a", [1, 2, 3], 12)
    core.add(sequence)
    while core.has_work:
        poison_free_blocks(core)
        core.step()
        if sequence.block_table:
            assert len(sequence.block_table) == core.block_manager.num_blocks_for(sequence.num_computed_tokens)
    assert core.stats().num_draft_tokens > 0 and core.stats().num_accepted_tokens == 0


def test_blocks_of_drafts_that_came_out_are_hit_later() -> None:
    core = speculating(rng=random.Random(0))
    tokens = expected_tokens(prompt := [1, 2, 3], sampling := SamplingParams(max_tokens=30, temperature=0.0))
    generate(core, [make_sequence(core, "first", prompt, 30)])
    again = make_sequence(core, "second", [*prompt, *tokens], 5)
    result = generate(core, [again])["second"]
    assert again.num_cached_tokens == (3 + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert result.token_ids == expected_tokens([*prompt, *tokens], replace(sampling, max_tokens=5))


def test_budget_chunk_and_pool_bound_a_draft() -> None:
    """`WatchedRunner` checks the budget."""
    every: list[dict[str, Any]] = [{"max_batched_tokens": 3, "max_running": 3}, {"max_chunk_tokens": 2}]
    for limits in (*every, {"max_chunk_tokens": 1}):
        core = speculating(**limits)
        core.add(make_sequence(core, "a", [1, 2, 3], 10))
        sizes = []
        while core.has_work:
            sizes.append(sum(isinstance(one, TokenSampled) for one in core.step()))
        assert max(sizes) == min(limits.values())


def test_a_beam_search_is_left_alone() -> None:
    beam = BeamParams(3, 1.0, False, 1)
    core = speculating()
    sequence = make_sequence(core, "a", [1, 2, 3], 8, beam=beam)
    result = generate(core, [sequence])["a"]
    assert result.beams == expected_beams([1, 2, 3], beam, sequence.sampling)
    assert core.stats().num_drafts == 0


def test_a_token_that_fails_within_a_right_draft_fails_at_its_turn() -> None:
    script = ScriptConfig(nan_at_output_index=(5,))
    core = EngineCore(ScriptedRunner(script, num_blocks=64, block_size=4), EngineLimits())
    speculate(core, scripted_drafts(Most(0), script))
    result = generate(core, [make_sequence(core, "a", [1, 2, 3], 20)])["a"]
    assert result.token_ids == expected_tokens([1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0))
    assert isinstance(result.error, Internal) and "position 8" in result.error.message


def test_each_token_of_a_run_has_its_own_log_probability() -> None:
    results: list[dict[str, LocalResult]] = []
    for is_drafting in (False, True):
        core = speculating()
        if not is_drafting:
            speculate(core, None)
        sequence = make_sequence(core, "a", [1, 2, 3], 20, num_choices=2, temperature=1.0)
        sequence.sampling = replace(sequence.sampling, logprobs=True, num_top_logprobs=2)
        results.append(generate(core, [sequence]))
        assert (core.stats().num_accepted_tokens > 0) == is_drafting
    assert results[0] == results[1]
    one = results[1][choice_name("a", 1)]
    assert [told.token_id for told in one.logprobs if told is not None] == one.token_ids


def test_a_script_in_a_loop_is_looked_up() -> None:
    """The whole of it: text index, record and cost model on a scripted engine."""
    script = ScriptConfig(mode="script", script=tuple(range(20, 32)))
    runner = ScriptedRunner(script, num_blocks=64, block_size=4)
    core = EngineCore(runner, EngineLimits(speculation=SpeculationPolicy("prompt_lookup", 0.08)))
    result = generate(core, [make_sequence(core, "a", [1, 2, 3], 120)])["a"]
    assert result.token_ids == [script.script[index % 12] for index in range(120)]
    assert result.finish is not None and result.finish.kind is FinishKind.LENGTH
    assert core.num_steps < 40
    core.check_integrity()


def test_without_a_policy_there_are_no_drafts() -> None:
    assert make_core(8).speculator is None
    assert isinstance(
        EngineCore(
            ScriptedRunner(num_blocks=8), EngineLimits(speculation=SpeculationPolicy("prompt_lookup"))
        ).speculator,
        Speculator,
    )
