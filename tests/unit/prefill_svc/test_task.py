"""Prefill task: what an attempt does next, event by event."""

from __future__ import annotations

from engine.forward_batch import Candidate
from engine.outputs import (
    CandidatesFound,
    ChunkComputed,
    PromptScored,
    SequenceFailed,
    SequenceRestored,
    SequenceStarted,
    TokenSampled,
)
from kvferry.errors import Internal, Unavailable
from kvferry.sampling import Finish, FinishKind, TokenLogprob
from kvtransfer.sender import ShipSummary
from prefill_svc.task import (
    CancelShipment,
    FailAttempt,
    OpenShipment,
    PrefillTask,
    ReportDone,
    ReportFirstToken,
    ReportPromptComputed,
    ReportPromptLogprobs,
    ShipFirstTokens,
    ShipRestored,
    ShipTokens,
)

LENGTH = Finish(FinishKind.LENGTH)


def test_blocks_leave_with_every_chunk_and_the_first_token_commits() -> None:
    task = PrefillTask(has_target=True, received_ns=10)
    assert task.on_output(SequenceStarted("a", 16, at_ns=30)) == [OpenShipment(), ShipTokens(16)]
    assert task.on_output(ChunkComputed("a", 16, 32, 30, 40)) == [ShipTokens(32)]
    report = ReportFirstToken(7, 0, None, num_cached_tokens=16, queue_ns=20, prefill_ns=15)
    assert task.on_output(TokenSampled("a", 0, 7, None, at_ns=45)) == [report, ShipFirstTokens((7,))]
    summary = ShipSummary(num_blocks_shipped=2)
    assert not task.is_over
    assert task.on_shipped(summary) == [ReportDone(summary)]
    assert task.is_over


def test_log_probabilities_of_the_prompt_are_told_as_they_come() -> None:
    task, logprobs = PrefillTask(has_target=True, received_ns=0), (TokenLogprob(5, -1.0, 2), TokenLogprob(6, -0.5, 1))
    task.on_output(SequenceStarted("a", 0, at_ns=0))
    assert task.on_output(PromptScored("a", 3, logprobs)) == [ReportPromptLogprobs(3, logprobs)]
    task.on_failed(Internal("x"))
    assert task.on_output(PromptScored("a", 5, logprobs)) == []


def test_without_a_target_nothing_is_shipped() -> None:
    task = PrefillTask(has_target=False, received_ns=0)
    assert task.on_output(SequenceStarted("a", 0, at_ns=0)) == []
    assert task.on_output(ChunkComputed("a", 4, 4, 0, 0)) == []
    report, done = task.on_output(TokenSampled("a", 0, 7, LENGTH, at_ns=0))
    assert isinstance(report, ReportFirstToken) and report.finish == LENGTH
    assert done == ReportDone(ShipSummary())


def test_a_first_token_that_ends_the_choice_commits_nothing() -> None:
    task = PrefillTask(has_target=True, received_ns=0)
    task.on_output(SequenceStarted("a", 0, at_ns=0))
    finish = Finish(FinishKind.END_OF_SEQUENCE, token_id=2)
    actions = task.on_output(TokenSampled("a", 0, 2, finish, at_ns=0))
    assert [type(action) for action in actions] == [ReportFirstToken, CancelShipment, ReportDone]
    assert task.on_shipped(ShipSummary()) == []


def test_any_failure_ends_it_once() -> None:
    task = PrefillTask(has_target=True, received_ns=0)
    error = Unavailable("gone")
    assert task.on_failed(error) == [FailAttempt(error)]
    assert task.on_failed(error) == []
    assert task.on_output(SequenceStarted("a", 0, at_ns=0)) == []
    other = PrefillTask(has_target=True, received_ns=0)
    assert other.on_output(SequenceFailed("a", Internal("x")))[0].__class__ is FailAttempt


def test_the_first_tokens_of_all_choices_are_shipped_together() -> None:
    """Those that ended their choice too: the receiver knows which by the same rules."""
    task = PrefillTask(has_target=True, received_ns=0, num_choices=3)
    task.on_output(SequenceStarted("a", 0, at_ns=0))
    assert len(task.on_output(TokenSampled("a", 0, 7, None, at_ns=1, choice=0))) == 1
    assert len(task.on_output(TokenSampled("a", 0, 2, LENGTH, at_ns=1, choice=1))) == 1
    report, ship = task.on_output(TokenSampled("a", 0, 9, None, at_ns=1, choice=2, logprob=TokenLogprob(9, -0.5)))
    assert isinstance(report, ReportFirstToken) and (report.choice, report.logprob) == (2, TokenLogprob(9, -0.5))
    assert ship == ShipFirstTokens((7, 2, 9))


def test_when_every_choice_ended_at_once_nothing_is_shipped() -> None:
    task = PrefillTask(has_target=True, received_ns=0, num_choices=2)
    task.on_output(TokenSampled("a", 0, 7, LENGTH, at_ns=1, choice=0))
    actions = task.on_output(TokenSampled("a", 0, 7, LENGTH, at_ns=1, choice=1))
    assert [type(action) for action in actions] == [ReportFirstToken, CancelShipment, ReportDone]
    assert task.is_over


def test_a_parked_prompt_that_is_computed_again_is_only_shipped() -> None:
    task = PrefillTask(has_target=True, received_ns=0)
    task.on_output(SequenceStarted("a", 0, at_ns=0))
    task.on_output(ChunkComputed("a", 8, 8, 0, 1))
    task.on_output(TokenSampled("a", 0, 7, None, at_ns=1))
    assert task.on_output(ChunkComputed("a", 4, 4, 5, 6)) == [ShipTokens(4)]
    assert task.on_output(ChunkComputed("a", 4, 8, 6, 7)) == [ShipTokens(8)]
    assert task.on_output(SequenceRestored("a", at_ns=7)) == [ShipRestored()]
    task.on_shipped(ShipSummary())
    assert task.on_output(SequenceRestored("a", at_ns=9)) == []


def test_candidates_of_a_beam_search_are_shipped_and_only_figures_reported() -> None:
    task = PrefillTask(has_target=True, received_ns=10)
    task.on_output(SequenceStarted("a", 16, at_ns=30))
    found = CandidatesFound("a", (Candidate(5, -0.1), Candidate(3, -2.0)), at_ns=45)
    assert task.on_output(found) == [
        ReportPromptComputed(num_cached_tokens=16, queue_ns=20, prefill_ns=15),
        ShipFirstTokens((5, 3), (-0.1, -2.0)),
    ]
