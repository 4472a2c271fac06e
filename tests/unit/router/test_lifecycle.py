"""The request lifecycle, event by event; `test_lifecycle_orders.py` drives it through random orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    Internal,
    KvferryError,
    TargetUnavailable,
    Unavailable,
    WorkerDraining,
)
from kvferry.sampling import Finish, FinishKind
from router.events import (
    Abort,
    Action,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Committed,
    DecodeFailed,
    Emit,
    Failed,
    Finished,
    FirstToken,
    NoWorkers,
    OpenDecode,
    OpenPrefill,
    PrefillDone,
    PrefillFailed,
    Registered,
    SendStop,
    ShipTo,
    StopFound,
    TimeLimit,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import DEFAULT_MAX_ATTEMPTS, MAX_MOVES, RequestLifecycle

PROMPT = (7, 8, 9)
LENGTH = Finish(FinishKind.LENGTH)
EOS = Finish(FinishKind.END_OF_SEQUENCE, token_id=2)
STOP = Finish(FinishKind.STOP_STRING, stop_string="x")
GONE = Unavailable("the connection broke")


def at_prefilling(max_tokens: int = 8) -> RequestLifecycle:
    life = RequestLifecycle(PROMPT, max_tokens)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, epoch=5, ship_address="d0:9"))
    return life


def at_first_token(max_tokens: int = 8) -> RequestLifecycle:
    life = at_prefilling(max_tokens)
    life.handle(FirstToken(1, 0, 50))
    return life


def at_decoding(max_tokens: int = 8) -> RequestLifecycle:
    life = at_first_token(max_tokens)
    life.handle(PrefillDone(1))
    life.handle(Committed(1))
    return life


def test_the_usual_way() -> None:
    life = RequestLifecycle(PROMPT, 3)
    assert life.start() == [ChooseWorkers(1, needs_prefill=True, needs_decode=True, excluding=frozenset())]
    assert life.handle(WorkersChosen("p0", "d0")) == [OpenDecode(1, "d0", PROMPT, local_prefill=False)]
    assert life.handle(Registered(1, 5, "d0:9")) == [OpenPrefill(1, "p0", PROMPT, ShipTo("d0:9", 5))]
    assert life.handle(FirstToken(1, 0, 50)) == [Emit(0, (50,))]
    assert life.phase.name == "FIRST_TOKEN"
    assert life.handle(PrefillDone(1)) == []
    assert life.handle(Committed(1)) == []
    assert life.phase.name == "DECODING"
    assert life.handle(Tokens(1, 1, (51,))) == [Emit(1, (51,))]
    assert life.handle(Tokens(1, 2, (52,), LENGTH)) == [Emit(2, (52,)), Finished(LENGTH)]
    assert life.phase.name == "DONE"


def test_one_token_opens_no_decode_and_ships_nowhere() -> None:
    life = RequestLifecycle(PROMPT, 1)
    assert life.start() == [ChooseWorkers(1, needs_prefill=True, needs_decode=False, excluding=frozenset())]
    assert life.handle(WorkersChosen("p0", None)) == [OpenPrefill(1, "p0", PROMPT, None)]
    assert life.handle(FirstToken(1, 0, 50, LENGTH)) == [Emit(0, (50,)), Finished(LENGTH)]


def test_first_token_that_ends_the_choice_cancels_decode() -> None:
    life = at_prefilling()
    assert life.handle(FirstToken(1, 0, 2, EOS)) == [CancelDecode(1), Emit(0, (2,)), Finished(EOS)]


def test_local_prefill_opens_decode_alone() -> None:
    life = RequestLifecycle(PROMPT, 1, local_prefill=True)
    assert life.start() == [ChooseWorkers(1, needs_prefill=False, needs_decode=True, excluding=frozenset())]
    assert life.handle(WorkersChosen(None, "d0")) == [OpenDecode(1, "d0", PROMPT, local_prefill=True)]
    assert life.handle(Registered(1, 5, "d0:9")) == []
    assert life.handle(Tokens(1, 0, (50,), LENGTH)) == [Emit(0, (50,)), Finished(LENGTH)]


def test_tokens_before_the_first_wait_for_it_even_with_a_finish() -> None:
    life = at_prefilling()
    life.handle(Committed(1))
    assert life.handle(Tokens(1, 1, (51, 2), EOS)) == []
    assert life.handle(FirstToken(1, 0, 50)) == [Emit(0, (50, 51, 2)), Finished(EOS)]


def test_duplicates_are_dropped() -> None:
    life = at_decoding()
    life.handle(Tokens(1, 1, (51, 52)))
    assert life.handle(Tokens(1, 1, (99, 99, 53))) == [Emit(3, (53,))]
    assert life.handle(FirstToken(1, 0, 99)) == []


def test_a_gap_that_cannot_be_filled_fails_the_attempt_and_emits_nothing() -> None:
    life = at_decoding()
    assert life.handle(Tokens(1, 2, (52,))) == [
        CancelDecode(1),
        ChooseWorkers(2, needs_prefill=True, needs_decode=True, excluding=frozenset({"d0"})),
    ]


def test_a_finish_beyond_what_arrived_is_a_gap() -> None:
    life = at_decoding()
    assert isinstance(life.handle(Tokens(1, 3, (), EOS))[-1], ChooseWorkers)


def test_dead_prefill_is_retried_elsewhere_with_the_same_prompt() -> None:
    life = at_prefilling()
    assert life.handle(PrefillFailed(1, GONE)) == [
        CancelDecode(1),
        ChooseWorkers(2, needs_prefill=True, needs_decode=True, excluding=frozenset({"p0"})),
    ]
    assert life.handle(WorkersChosen("p1", "d0")) == [OpenDecode(2, "d0", PROMPT, local_prefill=False)]


def test_retry_after_the_first_token_has_it_in_its_prompt() -> None:
    life = at_first_token()
    life.handle(PrefillFailed(1, GONE))
    assert life.handle(WorkersChosen("p1", "d0")) == [OpenDecode(2, "d0", (*PROMPT, 50), local_prefill=False)]
    life.handle(Registered(2, 5, "d0:9"))
    assert life.handle(FirstToken(2, 1, 51)) == [Emit(1, (51,))]


def test_resume_in_mid_stream() -> None:
    life = at_decoding(max_tokens=4)
    life.handle(Tokens(1, 1, (51,)))
    assert life.handle(DecodeFailed(1, GONE)) == [
        ChooseWorkers(2, needs_prefill=True, needs_decode=True, excluding=frozenset({"d0"}))
    ]
    assert life.handle(WorkersChosen("p0", "d1")) == [OpenDecode(2, "d1", (*PROMPT, 50, 51), local_prefill=False)]


def test_resume_with_one_token_left_needs_no_decode() -> None:
    life = at_decoding(max_tokens=3)
    life.handle(Tokens(1, 1, (51,)))
    actions = life.handle(DecodeFailed(1, GONE))
    assert actions == [ChooseWorkers(2, needs_prefill=True, needs_decode=False, excluding=frozenset({"d0"}))]


def test_all_tokens_without_the_word_that_it_was_the_last_are_an_answer() -> None:
    life = at_decoding(max_tokens=2)
    life.handle(Tokens(1, 1, (51,)))
    assert life.handle(DecodeFailed(1, GONE)) == [Finished(LENGTH)]


def test_prefill_that_fails_after_the_commit_is_not_needed() -> None:
    life = at_first_token()
    life.handle(Committed(1))
    assert life.handle(PrefillFailed(1, GONE)) == []


def test_prefill_that_fails_after_the_commit_but_never_gave_its_token_is() -> None:
    life = at_prefilling()
    life.handle(Committed(1))
    assert life.handle(PrefillFailed(1, GONE))[0] == CancelDecode(1)


def test_a_clean_end_of_prefill_without_a_token_is_a_failure() -> None:
    assert isinstance(at_prefilling().handle(PrefillDone(1))[-1], ChooseWorkers)


def test_tokens_before_the_commit_are_a_failure() -> None:
    assert isinstance(at_prefilling().handle(Tokens(1, 1, (51,)))[-1], ChooseWorkers)


@pytest.mark.parametrize("error", [FailedPrecondition("other layout"), KvferryError("odd")])
def test_errors_that_another_attempt_cannot_mend_fail_at_once(error: KvferryError) -> None:
    assert at_prefilling().handle(PrefillFailed(1, error)) == [CancelDecode(1), Failed(error)]


@pytest.mark.parametrize("error", [GONE, DataLoss("digest"), Internal("NaN"), Cancelled("shutting down")])
def test_three_attempts_without_progress(error: KvferryError) -> None:
    life = RequestLifecycle(PROMPT, 8)
    life.start()
    for attempt in (1, 2, 3):
        life.handle(WorkersChosen("p0", "d0"))
        actions = life.handle(DecodeFailed(attempt, error))
    (failed,) = actions
    assert isinstance(failed, Failed) and failed.error.message == error.message
    # A worker's CANCELLED is its shutdown: the caller cancelled nothing and may try again.
    assert type(failed.error) is (Unavailable if isinstance(error, Cancelled) else type(error))
    assert life.attempt == 3


def test_progress_resets_the_count() -> None:
    life = RequestLifecycle(PROMPT, 100)
    life.start()
    for attempt in range(1, 50):
        life.handle(WorkersChosen("p0", "d0"))
        life.handle(Registered(attempt, 5, "d0:9"))
        if attempt % 3 == 0:
            life.handle(FirstToken(attempt, life.num_emitted_tokens, 1))
            life.handle(Committed(attempt))
        actions = life.handle(DecodeFailed(attempt, GONE))
        assert isinstance(actions[-1], ChooseWorkers)


def test_first_tokens_alone_are_no_progress_where_no_shipment_gets_through() -> None:
    """Found in use: with a transport that cannot work, each attempt brought one token, computed by prefill."""
    life = RequestLifecycle(PROMPT, 100)
    life.start()
    for attempt in range(1, DEFAULT_MAX_ATTEMPTS + 1):
        life.handle(WorkersChosen("p0", "d0"))
        life.handle(Registered(attempt, 5, "d0:9"))
        life.handle(FirstToken(attempt, life.num_emitted_tokens, 1))
        actions = life.handle(PrefillFailed(attempt, TargetUnavailable("transfer.transport: grpc here, shm there")))
    assert isinstance(actions[-1], Failed)
    assert "transfer.transport" in actions[-1].error.message


def test_workers_that_drain_are_no_failures_but_have_an_end() -> None:
    life = RequestLifecycle(PROMPT, 100)
    life.start()
    for attempt in range(1, MAX_MOVES + 1):
        life.handle(WorkersChosen("p0", f"d{attempt}"))
        choose = life.handle(DecodeFailed(attempt, WorkerDraining("drains")))[-1]
        assert isinstance(choose, ChooseWorkers)
        assert len(choose.excluding) == attempt
    life.handle(WorkersChosen("p0", "d0"))
    actions = life.handle(DecodeFailed(MAX_MOVES + 1, WorkerDraining("drains")))
    assert isinstance(actions[-1], Failed)


def test_a_shipment_that_fails_blames_decode_and_not_prefill() -> None:
    life = at_prefilling()
    choose = life.handle(PrefillFailed(1, TargetUnavailable("decode refused")))[-1]
    assert isinstance(choose, ChooseWorkers)
    assert choose.excluding == {"d0"}
    life.handle(WorkersChosen("p0", "d1"))
    life.handle(Registered(2, 5, "d1:9"))
    choose = life.handle(PrefillFailed(2, GONE))[-1]
    assert isinstance(choose, ChooseWorkers)
    assert choose.excluding == {"d0", "p0"}


def test_messages_of_an_older_attempt_change_nothing() -> None:
    life = at_first_token()
    life.handle(PrefillFailed(1, GONE))
    late = (Registered(1, 5, "d0:9"), FirstToken(1, 1, 9), Tokens(1, 1, (9,), EOS), Committed(1), PrefillDone(1))
    for event in (*late, DecodeFailed(1, GONE), PrefillFailed(1, GONE)):
        assert life.handle(event) == []


def test_stop_string_in_the_first_token_stops_the_shipment() -> None:
    assert at_first_token().handle(StopFound(1, STOP)) == [CancelPrefill(1), CancelDecode(1), Finished(STOP)]


def test_stop_string_in_decode_is_told_to_decode() -> None:
    life = at_decoding()
    life.handle(Tokens(1, 1, (51, 52)))
    assert life.handle(StopFound(2, STOP)) == [SendStop(1, 2), Finished(STOP)]


@pytest.mark.parametrize("make", [at_prefilling, at_first_token])
def test_client_gone_cancels_both_calls(make: Callable[[], RequestLifecycle]) -> None:
    error = Cancelled("the client left")
    life = make()
    assert life.handle(ClientGone(error)) == [CancelPrefill(1), CancelDecode(1), Failed(error)]
    assert life.handle(ClientGone(error)) == []


def test_client_gone_while_queued_and_registering() -> None:
    error = Cancelled("the client left")
    life = RequestLifecycle(PROMPT, 4)
    life.start()
    assert life.handle(ClientGone(error)) == [Failed(error)]
    life = RequestLifecycle(PROMPT, 4)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    assert life.handle(ClientGone(error)) == [CancelDecode(1), Failed(error)]


def test_time_limit_and_abort_end_with_what_there_is() -> None:
    assert at_decoding().handle(TimeLimit()) == [CancelDecode(1), Finished(Finish(FinishKind.DEADLINE))]
    assert at_decoding().handle(Abort()) == [CancelDecode(1), Finished(Finish(FinishKind.CANCELLED))]


def test_no_workers_fails_with_its_reason() -> None:
    life = RequestLifecycle(PROMPT, 4)
    life.start()
    assert life.handle(NoWorkers(GONE)) == [Failed(GONE)]


def test_what_a_worker_adds_beyond_max_tokens_is_never_emitted() -> None:
    life = at_decoding(max_tokens=2)
    actions: list[Action] = life.handle(Tokens(1, 1, (51, 52, 53)))
    assert actions == [Emit(1, (51,))]


def test_without_a_prefill_worker_decode_computes_what_is_known_by_now() -> None:
    life = RequestLifecycle(PROMPT, 8)
    life.start()
    assert life.handle(WorkersChosen(None, "d0")) == [OpenDecode(1, "d0", PROMPT, local_prefill=True)]
    assert life.handle(Registered(1, 5, "d0:9")) == []
    assert life.handle(Tokens(1, 0, (7,))) == [Emit(0, (7,))]
    life.handle(DecodeFailed(1, GONE))
    assert life.handle(WorkersChosen("p0", "d1")) == [OpenDecode(2, "d1", (*PROMPT, 7), local_prefill=False)]
