"""Log-probabilities of the prompt in a request's life: in order, each once, over attempts and routers."""

from __future__ import annotations

import pytest

from kvferry.errors import Unavailable
from kvferry.sampling import TokenLogprob
from kvferry.spec import PromptScoring
from router.events import (
    Action,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    Committed,
    Emit,
    EmitPromptLogprobs,
    Event,
    FirstToken,
    PrefillFailed,
    PromptScored,
    Registered,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import RequestLifecycle
from router.prompt_logprobs import PromptLogprobProgress

PROMPT = tuple(range(20, 30))
NUM_TOP = 2


def scores(first: int, last: int) -> tuple[TokenLogprob, ...]:
    """Of the places `first` … `last`."""
    return tuple(TokenLogprob(PROMPT[place], -float(place), 1) for place in range(first, last + 1))


def scored(first: int, last: int, attempt: int = 1) -> PromptScored:
    return PromptScored(attempt, first, scores(first, last))


def emitted(first: int, last: int) -> list[Action]:
    return [EmitPromptLogprobs(first, scores(first, last))]


def missing(life: RequestLifecycle) -> PromptScoring | None:
    return life.prompt_scoring


def begin(num_received: int = 0, *, local_prefill: bool = False) -> RequestLifecycle:
    progress = PromptLogprobProgress(len(PROMPT), NUM_TOP, num_received)
    life = RequestLifecycle(PROMPT, 8, local_prefill=local_prefill, prompt_logprobs=progress)
    life.start()
    open_attempt(life, 1, local_prefill=local_prefill)
    return life


def open_attempt(life: RequestLifecycle, attempt: int, *, local_prefill: bool = False) -> None:
    life.handle(WorkersChosen(None if local_prefill else f"p{attempt}", "d0"))
    life.handle(Registered(attempt, 5, "d0:9"))


def retries(actions: list[Action], attempt: int, message: str) -> bool:
    choose = next(action for action in actions if isinstance(action, ChooseWorkers))
    return choose.attempt == attempt and message in str(choose.cause)


def test_chunks_are_passed_on_before_the_first_token() -> None:
    life = begin()
    assert missing(life) == PromptScoring(1, NUM_TOP)
    assert life.handle(scored(1, 4)) == emitted(1, 4)
    assert life.handle(scored(5, 9)) == emitted(5, 9)
    assert missing(life) is None
    assert life.handle(FirstToken(1, 0, 50)) == [Emit(0, (50,))]
    assert life.handle(Committed(1)) == []


def test_what_comes_twice_or_too_much_is_dropped() -> None:
    life = begin()
    life.handle(scored(1, 4))
    assert life.handle(scored(1, 4)) == []
    assert life.handle(scored(3, 6)) == emitted(5, 6)
    too_many = PromptScored(1, 7, (*scores(7, 9), TokenLogprob(1, -1.0, 1)))
    assert life.handle(too_many) == emitted(7, 9)
    assert life.handle(too_many) == []


def test_an_attempt_that_is_repeated_computes_what_is_missing() -> None:
    life = begin()
    life.handle(scored(1, 4))
    actions = life.handle(PrefillFailed(1, Unavailable("gone")))
    assert retries(actions, 2, "gone")
    open_attempt(life, 2)
    assert missing(life) == PromptScoring(5, NUM_TOP)
    assert life.handle(scored(5, 9, attempt=1)) == [], "a late message of the attempt before"
    assert life.handle(scored(5, 9, attempt=2)) == emitted(5, 9)
    assert life.handle(FirstToken(2, 0, 50)) == [Emit(0, (50,))]


@pytest.mark.parametrize("told", [[], [scored(1, 4)], [scored(1, 4), scored(6, 9)]])
def test_a_first_token_without_all_of_them_ends_the_attempt(told: list[Event]) -> None:
    """As a worker of a version without them does."""
    life = begin()
    for event in told:
        life.handle(event)
    actions = life.handle(FirstToken(1, 0, 50))
    place = 5 if told else 1
    assert actions[:2] == [CancelPrefill(1), CancelDecode(1)]
    assert retries(actions, 2, f"prompt token {place} is missing")
    assert not any(isinstance(action, Emit) for action in actions)


def test_with_local_prefill_decode_tells_them() -> None:
    life = begin(local_prefill=True)
    assert life.handle(scored(1, 9)) == emitted(1, 9)
    assert life.handle(Tokens(1, 0, (50,))) == [Emit(0, (50,))]
    life = begin(local_prefill=True)
    assert retries(life.handle(Tokens(1, 0, (50,))), 2, "prompt token 1 is missing")


def test_decode_may_be_ahead_of_prefill() -> None:
    """Its tokens wait for the first one, and that comes behind the log-probabilities on one stream."""
    life = begin()
    life.handle(Committed(1))
    assert life.handle(Tokens(1, 1, (51,))) == []
    assert life.handle(scored(1, 9)) == emitted(1, 9)
    assert life.handle(FirstToken(1, 0, 50)) == [Emit(0, (50, 51))]


@pytest.mark.parametrize(("num_received", "first"), [(0, 1), (4, 5), (8, 9), (9, None)])
def test_a_client_that_has_some_gets_the_rest(num_received: int, first: int | None) -> None:
    life = begin(num_received)
    assert missing(life) == (None if first is None else PromptScoring(first, NUM_TOP))
    assert life.handle(scored(1, 9)) == ([] if first is None else emitted(first, 9))


def test_a_prompt_of_one_token_has_none() -> None:
    assert PromptLogprobProgress(1, NUM_TOP).missing is None


def test_what_was_not_asked_for_is_not_passed_on() -> None:
    life = RequestLifecycle(PROMPT, 8)
    life.start()
    open_attempt(life, 1)
    assert life.handle(scored(1, 9)) == []
