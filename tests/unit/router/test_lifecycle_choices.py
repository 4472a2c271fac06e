"""Several choices in one lifecycle, and beam search, event by event."""

from __future__ import annotations

import itertools

import pytest

from kvferry.errors import Cancelled, FailedPrecondition, Internal, Unavailable
from kvferry.sampling import Finish, FinishKind, TokenLogprob
from router.events import (
    Abort,
    BeamsFound,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Committed,
    DecodeEnded,
    DecodeFailed,
    Emit,
    Failed,
    Finished,
    FirstToken,
    Hypothesis,
    OpenDecode,
    OpenPrefill,
    PrefillDone,
    PrefillFailed,
    Registered,
    SendStop,
    ShipTo,
    SplitChoice,
    SplitChoices,
    StopFound,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import Phase, RequestLifecycle

PROMPT = (7, 8, 9)
LENGTH = Finish(FinishKind.LENGTH)
HALF, ONE = TokenLogprob(50, -0.5), TokenLogprob(51, -1.0)
EOS = Finish(FinishKind.END_OF_SEQUENCE, token_id=2)
STOP = Finish(FinishKind.STOP_STRING, stop_string="x")
GONE = Unavailable("the connection broke")


def at_prefilling(num_choices: int = 2, max_tokens: int = 8, *, is_beam_search: bool = False) -> RequestLifecycle:
    life = RequestLifecycle(PROMPT, max_tokens, num_choices=num_choices, is_beam_search=is_beam_search)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, epoch=5, ship_address="d0:9"))
    return life


def at_decoding(num_choices: int = 2, max_tokens: int = 8) -> RequestLifecycle:
    life = at_prefilling(num_choices, max_tokens)
    for choice in range(num_choices):
        life.handle(FirstToken(1, 0, 50 + choice, choice=choice))
    life.handle(PrefillDone(1))
    life.handle(Committed(1))
    return life


def test_choices_share_a_pair_and_end_one_by_one() -> None:
    life = at_prefilling()
    assert life.choices == (0, 1)
    assert life.handle(FirstToken(1, 0, 50, logprob=HALF)) == [Emit(0, (50,), 0, (HALF,))]
    assert life.handle(FirstToken(1, 0, 60, choice=1)) == [Emit(0, (60,), 1)]
    assert life.handle(PrefillDone(1)) == []
    life.handle(Committed(1))
    assert life.handle(Tokens(1, 1, (61, 2), EOS, choice=1)) == [Emit(1, (61, 2), 1), Finished(EOS, 1)]
    assert not life.ended
    assert life.handle(Tokens(1, 1, (51,), logprobs=(ONE,))) == [Emit(1, (51,), 0, (ONE,))]
    assert life.handle(Tokens(1, 2, (2,), EOS)) == [Emit(2, (2,)), Finished(EOS)]
    assert life.phase is Phase.DONE


def test_a_first_token_that_ends_its_choice_leaves_the_others_running() -> None:
    life = at_prefilling()
    assert life.handle(FirstToken(1, 0, 2, EOS)) == [Emit(0, (2,)), Finished(EOS)]
    assert life.handle(FirstToken(1, 0, 60, choice=1)) == [Emit(0, (60,), 1)]
    life.handle(PrefillDone(1))
    life.handle(Committed(1))
    assert life.handle(Tokens(1, 1, (2,), EOS, choice=1)) == [Emit(1, (2,), 1), Finished(EOS, 1)]
    assert life.phase is Phase.DONE


def test_nothing_is_committed_when_first_tokens_end_every_choice() -> None:
    life = at_prefilling()
    life.handle(FirstToken(1, 0, 2, EOS))
    actions = life.handle(FirstToken(1, 0, 2, EOS, choice=1))
    assert actions == [CancelDecode(1), Emit(0, (2,), 1), Finished(EOS, 1)]


def test_one_token_each_needs_no_decode() -> None:
    life = RequestLifecycle(PROMPT, 1, num_choices=2)
    assert life.start() == [ChooseWorkers(1, needs_prefill=True, needs_decode=False, excluding=frozenset())]
    assert life.handle(WorkersChosen("p0", None)) == [OpenPrefill(1, "p0", PROMPT, None)]
    life.handle(FirstToken(1, 0, 50, LENGTH))
    assert life.handle(FirstToken(1, 0, 60, LENGTH, choice=1)) == [Emit(0, (60,), 1), Finished(LENGTH, 1)]


# --- stop strings ---


def test_stop_of_one_choice_leaves_the_others_and_the_last_one_ends_the_call() -> None:
    life = at_decoding()
    life.handle(Tokens(1, 1, (51,)))
    assert life.handle(StopFound(2, STOP)) == [SendStop(1, 2, 0), Finished(STOP, 0)]
    assert life.handle(Tokens(1, 2, (52,))) == [], "overshoot"
    assert life.handle(Tokens(1, 1, (61,), choice=1)) == [Emit(1, (61,), 1)]
    assert life.handle(StopFound(2, STOP, 1)) == [SendStop(1, 2, 1), Finished(STOP, 1)]
    assert life.phase is Phase.DONE


def test_stop_before_the_commit_is_told_after_it() -> None:
    life = at_prefilling()
    life.handle(FirstToken(1, 0, 50))
    assert life.handle(StopFound(1, STOP)) == [Finished(STOP)]
    life.handle(FirstToken(1, 0, 60, choice=1))
    assert life.handle(Committed(1)) == [SendStop(1, 1, 0)]
    assert life.handle(Tokens(1, 1, (2,), EOS, choice=1)) == [Emit(1, (2,), 1), Finished(EOS, 1)]


def test_stops_and_first_tokens_that_end_all_choices_cancel_the_shipment() -> None:
    life = at_prefilling()
    life.handle(FirstToken(1, 0, 50))
    life.handle(StopFound(1, STOP))
    actions = life.handle(FirstToken(1, 0, 2, EOS, choice=1))
    assert actions == [CancelPrefill(1), CancelDecode(1), Emit(0, (2,), 1), Finished(EOS, 1)]


# --- decode's end ---


def test_a_clean_end_of_decode_before_every_finish_is_a_failure() -> None:
    life = at_decoding()
    life.handle(Tokens(1, 1, (2,), EOS))
    split = life.handle(DecodeEnded(1))[-1]
    assert isinstance(split, SplitChoices)
    assert [(choice.choice, choice.token_ids) for choice in split.choices] == [(1, (51,))]
    assert isinstance(split.choices[0].cause, Unavailable)


def test_a_late_first_token_may_still_end_its_choice_after_decode_has_ended() -> None:
    life = at_prefilling()
    life.handle(FirstToken(1, 0, 60, choice=1))
    life.handle(Committed(1))
    life.handle(Tokens(1, 1, (2,), EOS, choice=1))
    assert life.handle(DecodeEnded(1)) == []
    assert life.handle(FirstToken(1, 0, 2, EOS)) == [Emit(0, (2,)), Finished(EOS)]


# --- failures ---


def test_while_nothing_was_emitted_the_group_is_repeated() -> None:
    life = at_prefilling()
    assert life.handle(PrefillFailed(1, GONE)) == [
        CancelDecode(1),
        ChooseWorkers(2, needs_prefill=True, needs_decode=True, excluding=frozenset({"p0"})),
    ]
    assert life.handle(WorkersChosen("p1", "d0")) == [OpenDecode(2, "d0", PROMPT, local_prefill=False)]
    assert life.choices == (0, 1)


def test_after_a_token_unfinished_choices_part_ways() -> None:
    attempts = itertools.count(1)
    life = RequestLifecycle(PROMPT, 3, num_choices=4, attempts=attempts)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, 5, "d0:9"))
    life.handle(FirstToken(1, 0, 2, EOS))
    for choice in (1, 2, 3):
        life.handle(FirstToken(1, 0, 50 + choice, choice=choice))
    life.handle(Committed(1))
    life.handle(Tokens(1, 1, (61, 62), choice=1))
    life.handle(Tokens(1, 1, (71,), choice=2))
    actions = life.handle(DecodeFailed(1, GONE))
    split = SplitChoices(
        (SplitChoice(2, (52, 71), frozenset({"d0"}), GONE), SplitChoice(3, (53,), frozenset({"d0"}), GONE))
    )
    assert actions == [CancelPrefill(1), Finished(LENGTH, 1), split], "choice 1 lacked only the word of its end"
    assert life.phase is Phase.SPLIT

    two, three = (RequestLifecycle(PROMPT, 3, num_choices=4, resumes=part, attempts=attempts) for part in split.choices)
    (choose,) = two.start()
    assert choose == ChooseWorkers(2, needs_prefill=True, needs_decode=False, excluding=frozenset({"d0"}))
    assert isinstance(choose, ChooseWorkers)
    assert choose.cause == GONE
    assert choose.is_resume
    assert two.choices == (2,)
    (choose,) = three.start()
    assert choose == ChooseWorkers(3, needs_prefill=True, needs_decode=True, excluding=frozenset({"d0"}))
    assert three.handle(WorkersChosen("p0", "d1")) == [OpenDecode(3, "d1", (*PROMPT, 53), local_prefill=False)]
    assert three.handle(Registered(3, 5, "d1:9")) == [OpenPrefill(3, "p0", (*PROMPT, 53), ShipTo("d1:9", 5))]
    assert three.handle(FirstToken(3, 1, 54, choice=3)) == [Emit(1, (54,), 3)]


def test_a_choice_without_a_token_is_resumed_from_the_prompt() -> None:
    life = at_prefilling()
    life.handle(FirstToken(1, 0, 50))
    split = life.handle(PrefillFailed(1, GONE))[-1]
    assert isinstance(split, SplitChoices)
    part = RequestLifecycle(PROMPT, 8, resumes=split.choices[1])
    (choose,) = part.start()
    assert isinstance(choose, ChooseWorkers)
    assert choose.is_resume, "the client has tokens of the request"
    assert part.handle(WorkersChosen("p1", "d0")) == [OpenDecode(1, "d0", PROMPT, local_prefill=False)]


def test_prefill_that_fails_after_the_commit_is_needed_while_a_first_token_is_missing() -> None:
    life = at_prefilling()
    life.handle(FirstToken(1, 0, 50))
    life.handle(Committed(1))
    assert isinstance(life.handle(PrefillFailed(1, GONE))[-1], SplitChoices)
    assert at_decoding().handle(PrefillFailed(1, GONE)) == []


def test_an_error_that_nothing_can_mend_fails_all_choices() -> None:
    error = FailedPrecondition("other layout")
    assert at_decoding().handle(DecodeFailed(1, error)) == [Failed(error)]


def test_tokens_of_a_choice_that_there_is_not_fail_the_attempt() -> None:
    assert isinstance(at_prefilling().handle(FirstToken(1, 0, 50, choice=2))[-1], ChooseWorkers)


def test_what_ends_a_request_from_outside_ends_all_choices() -> None:
    cancelled = Finish(FinishKind.CANCELLED)
    assert at_decoding().handle(Abort()) == [CancelDecode(1), Finished(cancelled, 0), Finished(cancelled, 1)]
    life = at_decoding()
    life.handle(Tokens(1, 1, (2,), EOS))
    assert life.handle(Abort()) == [CancelDecode(1), Finished(cancelled, 1)]
    error = Cancelled("the client left")
    assert at_decoding().handle(ClientGone(error)) == [CancelDecode(1), Failed(error)]


# --- beam search ---

BEAMS = (Hypothesis((50, 51), LENGTH, -1.5), Hypothesis((60, 2), EOS, -2.5))


def test_a_beam_search_gives_everything_at_its_end() -> None:
    life = RequestLifecycle(PROMPT, 1, num_choices=2, is_beam_search=True)
    (choose,) = life.start()
    assert choose == ChooseWorkers(1, needs_prefill=True, needs_decode=True, excluding=frozenset())
    life.handle(WorkersChosen("p0", "d0"))
    assert life.handle(Registered(1, 5, "d0:9")) == [OpenPrefill(1, "p0", PROMPT, ShipTo("d0:9", 5))]
    assert life.handle(PrefillDone(1)) == []
    assert life.handle(Committed(1)) == []
    assert life.phase.name == "DECODING"
    assert life.handle(BeamsFound(1, BEAMS)) == [
        Emit(0, (50, 51), 0),
        Finished(LENGTH, 0, -1.5),
        Emit(0, (60, 2), 1),
        Finished(EOS, 1, -2.5),
    ]
    assert life.phase is Phase.DONE


def test_a_failed_beam_search_is_repeated_whole() -> None:
    life = at_prefilling(is_beam_search=True)
    life.handle(PrefillDone(1))
    life.handle(Committed(1))
    assert life.handle(DecodeFailed(1, GONE)) == [
        ChooseWorkers(2, needs_prefill=True, needs_decode=True, excluding=frozenset({"d0"}))
    ]
    life = at_prefilling(is_beam_search=True)
    life.handle(Committed(1))
    assert life.handle(PrefillFailed(1, GONE)) == [], "decode has everything"


@pytest.mark.parametrize("event", [BeamsFound(1, BEAMS[:1]), Tokens(1, 0, (50,))])
def test_an_answer_that_is_not_the_beam_searchs_fails_the_attempt(event: BeamsFound | Tokens) -> None:
    life = at_prefilling(is_beam_search=True)
    life.handle(Committed(1))
    choose = life.handle(event)[-1]
    assert isinstance(choose, ChooseWorkers)
    assert isinstance(choose.cause, Internal)
