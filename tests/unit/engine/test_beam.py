"""Beam search: equal to transformers', by hand, and what holds for any model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.beam import BeamSearch, BeamStep, Hypothesis
from engine.forward_batch import Candidate
from kvferry.sampling import BeamParams, Finish, FinishKind, SamplingParams
from tests.support.beam_reference import (
    NEAR_TIE,
    BeamCase,
    Scored,
    differences,
    most_likely,
    plain_search,
    transformers_beams,
)
from tests.support.models import BOS_TOKEN_ID, VOCAB_SIZE, save_tiny_model

ARCHITECTURES = ("llama", "gpt2", "gemma2")
PROMPTS = ((BOS_TOKEN_ID, 1, 2, 3), (BOS_TOKEN_ID, 72, 101, 108, 108, 111), (7, 200, 31))
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
LENGTH = Finish(FinishKind.LENGTH)
Row = Mapping[int, float]  # probability of every token


# --- equal to transformers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


def ending_sets(model: PreTrainedModel, prompt: Sequence[int]) -> list[SamplingParams]:
    """Stop rules that bite: none; tokens of the most likely continuation; so many that most beams end soon."""
    case = BeamCase(tuple(prompt), BeamParams(1), SamplingParams(max_tokens=6))
    greedy = transformers_beams(model, case).hypotheses[0].token_ids
    return [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=10, eos_token_ids=(greedy[3],)),
        SamplingParams(max_tokens=10, eos_token_ids=(greedy[2],), stop_token_ids=(greedy[4],), min_tokens=4),
        SamplingParams(max_tokens=20, eos_token_ids=tuple(range(0, VOCAB_SIZE, 29))),
        SamplingParams(max_tokens=20, eos_token_ids=tuple(range(5, VOCAB_SIZE, 9)), min_tokens=2),
        SamplingParams(max_tokens=1, eos_token_ids=(greedy[0],)),
    ]


def searches(widths: Sequence[int]) -> list[BeamParams]:
    return [
        BeamParams(width, penalty, early_stopping, num_returned=width)
        for width, penalty, early_stopping in itertools.product(widths, PENALTIES, (False, True))
    ]


def cases(model: PreTrainedModel, widths: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> list[BeamCase]:
    return [
        BeamCase(prompt, beam, sampling)
        for prompt in prompts
        for sampling, beam in itertools.product(ending_sets(model, prompt), searches(widths))
    ]


def replay(step_logprobs: Sequence[torch.Tensor], case: BeamCase) -> list[Scored]:
    """Our search over log-probabilities that transformers computed; fails when ours is longer or shorter."""
    search = BeamSearch(case.beam, case.sampling, VOCAB_SIZE)
    for logprobs in step_logprobs:
        search.advance(most_likely(logprobs[: len(search.live_token_ids)], search.num_candidates))
    return [Scored(hypothesis.token_ids, hypothesis.score) for hypothesis in search.results()]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.sweep)])
def test_from_equal_logprobs_every_bit_is_equal(model: PreTrainedModel, stride: int) -> None:
    num_early = 0
    for case in cases(model, (2, 4), PROMPTS[:2])[::stride]:
        wanted = transformers_beams(model, case)
        assert differences(replay(wanted.step_logprobs, case), wanted.hypotheses, tolerance=0) == [], case
        num_early += len(wanted.step_logprobs) < case.sampling.max_tokens
    assert num_early >= 3  # the rules of stopping early have been at work


@pytest.mark.parametrize("stride", [29, pytest.param(3, marks=pytest.mark.sweep)])
def test_over_plain_forwards_tokens_and_scores_are_equal(
    model: PreTrainedModel, stride: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for case in cases(model, (1, 2, 4), PROMPTS)[::stride]:
        found = plain_search(model, case)
        differing = differences(found.hypotheses, transformers_beams(model, case).hypotheses)
        if differing and found.margin < NEAR_TIE:
            with capsys.disabled():
                print(f"near-tie, margin {found.margin:.1e}: {case}: {differing}")  # noqa: T201 - for people
        else:
            assert differing == [], case


@pytest.mark.parametrize("num_returned", [1, 2, 3])
def test_fewer_results_are_the_best_of_all(model: PreTrainedModel, num_returned: int) -> None:
    sampling = SamplingParams(max_tokens=8, eos_token_ids=tuple(range(0, VOCAB_SIZE, 29)))
    case = BeamCase(PROMPTS[0], BeamParams(3, 0.5, num_returned=num_returned), sampling)
    wanted = transformers_beams(model, case)
    found = replay(wanted.step_logprobs, case)
    assert differences(found, wanted.hypotheses, tolerance=0) == []
    assert len(found) == num_returned


# --- by hand ---------------------------------------------------------------------------------------------------------


def best_first(row: Row, num_candidates: int | None = None) -> list[Candidate]:
    pairs = sorted(row.items(), key=lambda pair: (-pair[1], pair[0]))
    candidates = [Candidate(token_id, math.log(share) if share else -math.inf) for token_id, share in pairs]
    return candidates[:num_candidates]


def run(search: BeamSearch, model: Callable[[tuple[int, ...]], Row]) -> tuple[Hypothesis, ...]:
    while not search.is_finished:
        search.advance([best_first(model(token_ids), search.num_candidates) for token_ids in search.live_token_ids])
    return search.results()


def by_last(table: Mapping[int | None, Row]) -> Callable[[tuple[int, ...]], Row]:
    """A model that looks at the last output token only; None before the first."""
    return lambda token_ids: table[token_ids[-1] if token_ids else None]


def test_finds_what_greedy_misses_and_says_which_beam_goes_on() -> None:
    search = BeamSearch(BeamParams(2, 0.0, num_returned=2), SamplingParams(max_tokens=2), vocab_size=3)
    assert search.num_candidates == 3 and search.num_output_tokens == 0
    first = search.advance([best_first({0: 0.5, 1: 0.4, 2: 0.1})])
    assert first == (BeamStep(0, 0), BeamStep(0, 1))
    assert search.live_token_ids == ((0,), (1,))
    # Sums: 0.5 · (0.4, 0.3, 0.3) and 0.4 · (0.9, 0.05, 0.05); the best is 1 0 with 0.36, then 0 0 with 0.2.
    second = search.advance([best_first({0: 0.4, 1: 0.3, 2: 0.3}), best_first({0: 0.9, 1: 0.05, 2: 0.05})])
    assert second == () and search.is_finished
    best, other = search.results()
    assert (best.token_ids, best.finish) == ((1, 0), LENGTH)
    assert best.cumulative_logprob == pytest.approx(math.log(0.36), abs=1e-6) == best.score
    assert (other.token_ids, other.finish) == ((0, 0), LENGTH)


def test_beams_of_one_parent_push_out_the_other() -> None:
    search = BeamSearch(BeamParams(2), SamplingParams(max_tokens=5), vocab_size=3)
    search.advance([best_first({0: 0.9, 1: 0.06, 2: 0.04})])
    steps = search.advance([best_first({0: 0.2, 1: 0.5, 2: 0.3}), best_first({0: 0.4, 1: 0.3, 2: 0.3})])
    assert steps == (BeamStep(0, 1), BeamStep(0, 2))
    assert search.live_logprobs == pytest.approx([math.log(0.45), math.log(0.27)], abs=1e-6)


ENDING = by_last({None: {9: 0.45, 0: 0.55}, 0: {9: 0.6, 0: 0.4}})  # 9 ends; sequences are 9 | 0 9 | 0 0 9 …


@pytest.mark.parametrize(
    ("penalty", "best"),
    [
        (0.0, (9,)),  # log 0.45 = -0.80 against log 0.33 = -1.11
        (1.0, (0, 9)),  # -0.80 against -1.11 / 2
        (-1.0, (9,)),  # -0.80 against -1.11 · 2
    ],
)
def test_length_penalty_over_output_tokens(penalty: float, best: tuple[int, ...]) -> None:
    search = BeamSearch(BeamParams(1, penalty), SamplingParams(max_tokens=3, eos_token_ids=(9,)), vocab_size=10)
    assert run(search, ENDING)[0].token_ids == (0, 9)  # one beam: 9 is second at first, so it is no hypothesis
    search = BeamSearch(BeamParams(2, penalty), SamplingParams(max_tokens=3, eos_token_ids=(9,)), vocab_size=10)
    assert run(search, ENDING)[0].token_ids == best


@pytest.mark.parametrize("penalty", [-1e6, -100.0, 100.0, 1e6])
def test_no_length_penalty_breaks_the_search(penalty: float) -> None:
    sampling = SamplingParams(max_tokens=12, eos_token_ids=(9,))
    found = run(BeamSearch(BeamParams(2, penalty, num_returned=2), sampling, 10), lambda token_ids: {0: 0.6, 1: 0.4})
    assert [len(hypothesis.token_ids) for hypothesis in found] == [12, 12]


def test_ending_token_beyond_the_best_is_no_hypothesis() -> None:
    search = BeamSearch(BeamParams(2), SamplingParams(max_tokens=9, eos_token_ids=(3,)), vocab_size=4)
    steps = search.advance([best_first({0: 0.4, 1: 0.3, 3: 0.2, 2: 0.1})])
    assert steps == (BeamStep(0, 0), BeamStep(0, 1))
    # Both beams must end now, and only these endings count.
    everywhere = best_first({3: 1.0})
    assert search.advance([everywhere, everywhere]) == ()
    assert {hypothesis.token_ids for hypothesis in search._hypotheses} == {(0, 3), (1, 3)}


def test_ending_tokens_leave_room_for_live_beams() -> None:
    search = BeamSearch(BeamParams(2), SamplingParams(max_tokens=9, eos_token_ids=(2, 3)), vocab_size=8)
    assert search.num_candidates == 6
    row = {2: 0.5, 3: 0.2, 0: 0.1, 1: 0.08, 4: 0.06, 5: 0.04, 6: 0.01, 7: 0.01}
    assert search.advance([best_first(row, search.num_candidates)]) == ()  # two are complete, and better than the rest
    assert [hypothesis.token_ids for hypothesis in search._hypotheses] == [(2,), (3,)]
    assert search.results()[0].finish == Finish(FinishKind.END_OF_SEQUENCE, token_id=2)


def test_early_stopping_takes_the_first_complete_ones() -> None:
    # After two steps 9 (0.3) and 0 9 (0.25) are complete, and 0 2 (0.225) lives: at a score of -0.75 under penalty 1,
    # better than -1.20 of the worse complete one. A third step gives 0 2 9 (0.2025), and nothing that lives is near.
    table = by_last(
        {
            None: {0: 0.5, 9: 0.3, 1: 0.2, 2: 0.0},
            0: {9: 0.5, 2: 0.45, 1: 0.05, 0: 0.0},
            1: {0: 0.45, 1: 0.45, 9: 0.1, 2: 0.0},
            2: {9: 0.9, 0: 0.05, 1: 0.05, 2: 0.0},
        }
    )
    sampling = SamplingParams(max_tokens=9, eos_token_ids=(9,))
    early = run(BeamSearch(BeamParams(2, 1.0, True, 2), sampling, 10), table)
    assert [hypothesis.token_ids for hypothesis in early] == [(0, 9), (9,)]
    late = run(BeamSearch(BeamParams(2, 1.0, False, 2), sampling, 10), table)
    assert [hypothesis.token_ids for hypothesis in late] == [(0, 2, 9), (0, 9)]


def test_live_beams_are_judged_by_their_present_score() -> None:
    # 0 9 would have 0.2 and a score of -0.80, better than -1.20 of 8; but 0 alone has -1.61, and so the search ends.
    table = by_last({None: {9: 0.5, 8: 0.3, 0: 0.2}, 0: {9: 1.0}})
    search = BeamSearch(BeamParams(2, 1.0, False, 2), SamplingParams(max_tokens=9, eos_token_ids=(8, 9)), 10)
    assert [hypothesis.token_ids for hypothesis in run(search, table)] == [(9,), (8,)]


@pytest.mark.parametrize(
    ("sampling", "finishes"),
    [
        (SamplingParams(2, eos_token_ids=(1,)), [(FinishKind.END_OF_SEQUENCE, (1,)), (FinishKind.LENGTH, (0, 0))]),
        (SamplingParams(2, stop_token_ids=(1,)), [(FinishKind.STOP_TOKEN, (1,)), (FinishKind.LENGTH, (0, 0))]),
        (
            SamplingParams(2, eos_token_ids=(1,), min_tokens=1),
            [(FinishKind.LENGTH, (0, 0)), (FinishKind.END_OF_SEQUENCE, (0, 1))],
        ),
        (
            SamplingParams(2, eos_token_ids=(1,), ignore_eos=True),
            [(FinishKind.LENGTH, (0, 0)), (FinishKind.LENGTH, (0, 1))],
        ),
    ],
)
def test_why_hypotheses_end(sampling: SamplingParams, finishes: list[tuple[FinishKind, tuple[int, ...]]]) -> None:
    search = BeamSearch(BeamParams(2, 0.0, num_returned=2), sampling, vocab_size=2)
    found = run(search, lambda token_ids: {0: 0.6, 1: 0.4})
    assert [(hypothesis.finish.kind, hypothesis.token_ids) for hypothesis in found] == finishes


def test_one_token_is_one_step() -> None:
    search = BeamSearch(BeamParams(2, num_returned=2), SamplingParams(max_tokens=1), vocab_size=3)
    assert search.advance([best_first({0: 0.2, 1: 0.5, 2: 0.3})]) == ()
    assert [(hypothesis.token_ids, hypothesis.finish) for hypothesis in search.results()] == [
        ((1,), LENGTH),
        ((2,), LENGTH),
    ]


@pytest.mark.parametrize(
    ("width", "sampling", "num_candidates"),
    [
        (4, SamplingParams(9), 8),
        (4, SamplingParams(9, eos_token_ids=(5,)), 8),
        (4, SamplingParams(9, eos_token_ids=(5, 6), stop_token_ids=(7,)), 16),
        (4, SamplingParams(9, eos_token_ids=(5, 6), stop_token_ids=(7,), ignore_eos=True), 8),
        (4, SamplingParams(9, eos_token_ids=(5, 6), stop_token_ids=(6,)), 12),
        (60, SamplingParams(9), 100),
    ],
)
def test_number_of_candidates(width: int, sampling: SamplingParams, num_candidates: int) -> None:
    assert BeamSearch(BeamParams(width), sampling, vocab_size=100).num_candidates == num_candidates


def test_small_vocabulary_starts_with_fewer_beams() -> None:
    search = BeamSearch(BeamParams(4, num_returned=4), SamplingParams(max_tokens=3), vocab_size=2)
    row = best_first({0: 0.6, 1: 0.4})
    assert len(search.advance([row])) == 2
    assert len(search.advance([row] * 2)) == 4
    assert search.advance([row] * 4) == () and len(search.results()) == 4


def test_no_way_to_go_on_ends_the_search() -> None:
    search = BeamSearch(BeamParams(2, num_returned=2), SamplingParams(max_tokens=3, eos_token_ids=(0,)), vocab_size=2)
    assert search.advance([best_first({0: 1.0, 1: 0.0})]) == ()  # token 1 is impossible
    assert [hypothesis.token_ids for hypothesis in search.results()] == [(0,)]


def test_among_equals_the_earlier_beam_then_the_lower_id() -> None:
    search = BeamSearch(BeamParams(2), SamplingParams(max_tokens=3), vocab_size=4)
    row = best_first(dict.fromkeys(range(4), 0.25))
    assert search.advance([row]) == (BeamStep(0, 0), BeamStep(0, 1))
    assert search.advance([row, row]) == (BeamStep(0, 0), BeamStep(0, 1))


# --- for any model ---------------------------------------------------------------------------------------------------


@st.composite
def random_searches(draw: st.DrawFn) -> tuple[BeamParams, SamplingParams, int, int, int]:
    """Parameters, a vocabulary size, a seed for the model, and of how many steps its log-probabilities are (ties)."""
    vocab_size = draw(st.integers(1, 9))
    width = draw(st.integers(1, 5))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=3).map(tuple)
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 6)),
        min_tokens=draw(st.integers(0, 3)),
        eos_token_ids=draw(tokens),
        stop_token_ids=draw(tokens),
        ignore_eos=draw(st.booleans()),
    )
    penalty = draw(st.sampled_from(PENALTIES))
    beam = BeamParams(width, penalty, draw(st.booleans()), num_returned=draw(st.integers(1, width)))
    return beam, sampling, vocab_size, draw(st.integers(0, 2**32)), draw(st.sampled_from((2, 7, 10**6)))


def random_model(seed: int, vocab_size: int, num_shares: int) -> Callable[[tuple[int, ...]], Row]:
    """A model drawn anew for every sequence, always the same for the same one."""

    def row(token_ids: tuple[int, ...]) -> Row:
        generator = random.Random(f"{seed} {token_ids}")
        shares = [generator.randint(1, num_shares) for _ in range(vocab_size)]
        return {token_id: share / sum(shares) for token_id, share in enumerate(shares)}

    return row


@settings(max_examples=300, deadline=None)
@given(random_searches())
def test_what_always_holds(drawn: tuple[BeamParams, SamplingParams, int, int, int]) -> None:
    beam, sampling, vocab_size, seed, num_shares = drawn
    model = random_model(seed, vocab_size, num_shares)
    search = BeamSearch(beam, sampling, vocab_size)
    all_tokens = BeamSearch(beam, sampling, vocab_size)  # sees every token, to show that `num_candidates` are enough
    num_steps = 0
    while not search.is_finished:
        before = search.live_token_ids
        rows = [best_first(model(token_ids)) for token_ids in before]
        steps = search.advance([row[: search.num_candidates] for row in rows])
        assert all_tokens.advance(rows) == steps
        num_steps += 1
        live = search.live_token_ids
        assert live == tuple((*before[step.parent], step.token_id) for step in steps)
        assert len(set(live)) == len(live) <= beam.width
        assert all(len(token_ids) == num_steps for token_ids in live)
        assert not any(sampling.ending_token_ids & set(token_ids) for token_ids in live)
        assert list(search.live_logprobs) == sorted(search.live_logprobs, reverse=True)
    assert num_steps <= sampling.max_tokens
    found = search.results()
    assert found == all_tokens.results()
    assert len({hypothesis.token_ids for hypothesis in found}) == len(found) <= beam.num_returned
    if vocab_size - len(sampling.ending_token_ids) >= beam.width:
        assert len(found) == beam.num_returned
    assert [hypothesis.score for hypothesis in found] == sorted((each.score for each in found), reverse=True)
    for hypothesis in found:
        check_hypothesis(hypothesis, beam, sampling, model)


def check_hypothesis(
    hypothesis: Hypothesis, beam: BeamParams, sampling: SamplingParams, model: Callable[[tuple[int, ...]], Row]
) -> None:
    """It ended where it had to, and its sum and score are those of its tokens, in float32."""
    token_ids = hypothesis.token_ids
    finishes = [sampling.finish_after(token_id, index + 1) for index, token_id in enumerate(token_ids)]
    assert finishes == [None] * (len(token_ids) - 1) + [hypothesis.finish] and hypothesis.finish is not None
    assert hypothesis.finish == LENGTH or len(token_ids) > sampling.min_tokens
    total = np.float32(0.0)
    for index, token_id in enumerate(token_ids):
        total += np.float32(math.log(model(token_ids[:index])[token_id]))
    assert hypothesis.cumulative_logprob == total
    assert hypothesis.score == np.float32(total / np.float32(float(len(token_ids)) ** beam.length_penalty))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4), st.sampled_from(PENALTIES), st.booleans())
def test_wide_enough_it_finds_the_best_of_all(
    seed: int, num_ordinary: int, max_tokens: int, penalty: float, early_stopping: bool
) -> None:
    ending = num_ordinary
    model = random_model(seed, num_ordinary + 1, 10**6)
    sampling = SamplingParams(max_tokens, eos_token_ids=(ending,))
    complete = [
        (*stem, last)
        for length in range(max_tokens)
        for stem in itertools.product(range(num_ordinary), repeat=length)
        for last in range(num_ordinary + 1)
        if last == ending or length + 1 == max_tokens
    ]
    beam = BeamParams(len(complete), penalty, early_stopping, num_returned=len(complete))
    found = run(BeamSearch(beam, sampling, num_ordinary + 1), model)
    assert {hypothesis.token_ids for hypothesis in found} == set(complete)
    fewer = run(BeamSearch(replace(beam, num_returned=1), sampling, num_ordinary + 1), model)
    assert fewer == found[:1]
