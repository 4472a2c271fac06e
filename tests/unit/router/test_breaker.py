"""The breaker by hand: times are given, nothing is waited for."""

from __future__ import annotations

import pytest

from kvferry.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvferryError,
    ResourceExhausted,
    TargetUnavailable,
    Unavailable,
    WorkerDraining,
)
from router.breaker import FAULTS_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S, Breaker, Verdict, verdict_on


def _opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    assert [breaker.on_fault(at_s) for _ in range(FAULTS_TO_OPEN)] == [False] * (FAULTS_TO_OPEN - 1) + [True]
    return breaker


def test_it_opens_after_faults_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAULTS_TO_OPEN - 1):
            assert not breaker.on_fault(0.0)
        breaker.on_answer()
    assert not breaker.is_open(0.0)
    assert _opened().is_open(0.0)


def test_after_the_pause_one_request_tries_and_the_others_wait_for_it() -> None:
    breaker = _opened()
    assert breaker.is_open(FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(FIRST_PAUSE_S)
    breaker.on_chosen(FIRST_PAUSE_S)
    assert breaker.is_open(FIRST_PAUSE_S + 0.01)
    breaker.on_answer()
    assert not breaker.is_open(FIRST_PAUSE_S + 0.01)


def test_many_calls_that_break_together_cost_one_pause() -> None:
    breaker = _opened()
    assert not any(breaker.on_fault(0.01) for _ in range(16))
    assert breaker.is_open(FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(FIRST_PAUSE_S)
    assert breaker.on_fault(FIRST_PAUSE_S), "one that fails later opens it again"
    assert not breaker.is_open(2 * FIRST_PAUSE_S)
    breaker.on_chosen(2 * FIRST_PAUSE_S)
    assert breaker.on_fault(2 * FIRST_PAUSE_S), "and the trial makes the pause longer"
    assert breaker.is_open(4 * FIRST_PAUSE_S - 0.01)
    assert not breaker.on_fault(4 * FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(4 * FIRST_PAUSE_S)


def test_a_fault_of_the_trial_doubles_the_pause_up_to_the_limit() -> None:
    breaker, now_s, pause_s = _opened(), 0.0, FIRST_PAUSE_S
    for _ in range(8):
        now_s += pause_s
        assert not breaker.is_open(now_s)
        breaker.on_chosen(now_s)
        assert breaker.on_fault(now_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
        assert breaker.is_open(now_s + pause_s - 0.01)
    assert pause_s == MAX_PAUSE_S


def test_choosing_a_worker_that_is_well_changes_nothing() -> None:
    breaker = Breaker()
    breaker.on_chosen(0.0)
    assert not breaker.is_open(0.0)


@pytest.mark.parametrize("error", [Unavailable("gone"), Internal("broke"), DataLoss("twice wrong")])
def test_what_a_worker_is_to_blame_for(error: KvferryError) -> None:
    assert verdict_on(error) is Verdict.FAULT


@pytest.mark.parametrize(
    "error",
    [
        WorkerDraining("drains"),
        TargetUnavailable("the other one"),
        ResourceExhausted("full"),
        InvalidArgument("field", "bad"),
        FailedPrecondition("another epoch"),
    ],
)
def test_refusals_are_answers(error: KvferryError) -> None:
    assert verdict_on(error) is Verdict.ANSWER


@pytest.mark.parametrize("error", [Cancelled("the caller left"), DeadlineExceeded("of the caller")])
def test_what_the_caller_ended_says_nothing(error: KvferryError) -> None:
    assert verdict_on(error) is Verdict.NOTHING
