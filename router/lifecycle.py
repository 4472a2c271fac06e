"""The life of one request, as a plain state machine: events in, actions out; no clock, no sockets, no tasks.

    QUEUED ──WorkersChosen──► REGISTERING ──Registered──► PREFILLING ──FirstToken──► FIRST_TOKEN ──Committed──► DECODING
      ▲                                                                                                         │
      └───────────────── a retryable failure in any phase, with prompt + tokens so far ─────────────────────────┤
                                                                                   DONE, FAILED or SPLIT ◄──────┘

Decode is opened first, because prefill must know where to ship. Tokens come from two streams and are emitted in order
of their index: a duplicate is dropped, a token that is early waits, and a gap that nothing can fill any more fails the
attempt. Whatever belongs to an older attempt is ignored, so a late message can never change the text.

Several choices share an attempt: one prompt, one shipment, one decode call, in which they end one by one. While the
client has no token of any, a failed attempt is repeated for all; later each choice that is not over goes on as a
lifecycle of its own (`SplitChoices`), since their tokens differ. A beam search gives all its tokens at its end, so its
attempts are repeated whole.

What a draining decode worker let go of takes its blocks along where that pays (`kvferry/moves.py`): the next attempt
has that worker in the place of prefill, which holds prompt and output and ships them. Should it fail, the one after it
is an ordinary resume.

`router/lifecycle_run.py` performs the actions. After the last `Finished` the calls that were not cancelled end by
themselves.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence

from kvferry.errors import (
    Cancelled,
    DataLoss,
    Internal,
    KvferryError,
    TargetUnavailable,
    Unavailable,
    WorkerDraining,
)
from kvferry.moves import is_worth_moving
from kvferry.sampling import Finish, FinishKind, TokenLogprob
from kvferry.spec import PromptScoring
from router.choice_progress import ChoiceProgress
from router.events import (
    Abort,
    Action,
    BeamsFound,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Committed,
    DecodeEnded,
    DecodeFailed,
    Emit,
    Event,
    Failed,
    Finished,
    FirstToken,
    MoveSource,
    NoWorkers,
    OpenDecode,
    OpenPrefill,
    PrefillDone,
    PrefillFailed,
    PromptScored,
    Registered,
    SendStop,
    ShipTo,
    SplitChoice,
    SplitChoices,
    StopFound,
    TimeLimit,
    Tokens,
    WorkersChosen,
)
from router.prompt_logprobs import PromptLogprobProgress

DEFAULT_MAX_ATTEMPTS = 3
"""Attempts in a row that may fail without progress. A commit is progress: what only prefill's first token reached could
go on for ever, one token an attempt, where no shipment gets through."""

MAX_MOVES = 16
"""Workers in a row that may turn the request away or let go of it because they drain, which is no failure; enough for a
rolling restart of a large deployment, and an end to a worker that drains and says it does not."""

RETRYABLE_ERRORS = (Unavailable, DataLoss, Internal, Cancelled)
"""Failures of a worker that another attempt may mend. A worker's CANCELLED is its shutdown; the caller's an event."""


class Phase(enum.Enum):
    """Where a request is."""

    QUEUED = enum.auto()
    REGISTERING = enum.auto()
    PREFILLING = enum.auto()
    FIRST_TOKEN = enum.auto()
    DECODING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    SPLIT = enum.auto()


class RequestLifecycle:
    """Admit, retry, resume and finish the choices of one request, or one of them that parted from the others.

    Args:
        prompt_token_ids: the prompt.
        max_tokens: most output tokens of a choice, at least 1.
        num_choices: choices 0 … num_choices - 1; for a beam search, the hypotheses returned.
        is_beam_search: tokens come at the end, in one event.
        resumes: go on with this choice alone.
        attempts: numbers of the attempts, shared by all lifecycles of a request.
        local_prefill: there are no prefill workers; decode computes prompts itself.
        max_attempts: attempts in a row that may fail without progress.
        prompt_logprobs: which log-probabilities of the prompt the client has; None where it wants none.
        min_moved_tokens: from how many output tokens on a choice leaves a draining worker with its blocks; 0: never.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        num_choices: int = 1,
        is_beam_search: bool = False,
        resumes: SplitChoice | None = None,
        attempts: Iterator[int] | None = None,
        local_prefill: bool = False,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        prompt_logprobs: PromptLogprobProgress | None = None,
        min_moved_tokens: int = 0,
    ) -> None:
        assert max_tokens >= 1
        assert num_choices >= 1
        self._max_attempts = max_attempts
        self._prompt = tuple(prompt_token_ids)
        self._max_tokens = max_tokens
        self._min_moved_tokens = min_moved_tokens
        self._is_beam_search = is_beam_search
        self._resumes = resumes
        self._local_prefill = local_prefill
        self._prompt_logprobs = prompt_logprobs
        self._phase = Phase.QUEUED
        self._progress = {choice: ChoiceProgress(choice, max_tokens) for choice in range(num_choices)}
        self._excluding: frozenset[str] = frozenset()
        if resumes is not None:
            self._progress = {resumes.choice: ChoiceProgress(resumes.choice, max_tokens, resumes.token_ids)}
            self._excluding = resumes.excluding
        self._attempts = attempts or itertools.count(1)
        self._attempt = 0
        self._failures_without_progress = 0
        self._moves_without_progress = 0
        self._begin_attempt()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def ended(self) -> bool:
        return self._phase in (Phase.DONE, Phase.FAILED, Phase.SPLIT)

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1; 0 before `start`."""
        return self._attempt

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of the choices, those included that are over."""
        return tuple(self._progress)

    @property
    def prompt_scoring(self) -> PromptScoring | None:
        """Log-probabilities of the prompt that are still missing, for the worker that computes it."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.missing

    @property
    def num_emitted_tokens(self) -> int:
        """Over all its choices."""
        return sum(progress.num_tokens for progress in self._progress.values())

    def start(self) -> list[Action]:
        """Ask for the first pair."""
        if self._resumes is None:
            return self._next_attempt()
        return self._next_attempt(self._resumes.cause, self._resumes.source)

    def handle(self, event: Event) -> list[Action]:
        """Take one event; what comes after the end or from an older attempt changes nothing."""
        if self.ended or getattr(event, "attempt", self._attempt) != self._attempt:
            return []
        match event:
            case WorkersChosen():
                return self._on_workers_chosen(event)
            case NoWorkers(error) | ClientGone(error):
                return self._fail(error)
            case Registered():
                return self._on_registered(event)
            case PromptScored():
                return self._on_prompt_scored(event)
            case FirstToken():
                return self._on_first_token(event)
            case PrefillDone():
                return self._on_prefill_done()
            case PrefillFailed(error=error):
                return self._on_prefill_failed(error)
            case Committed():
                return self._on_committed()
            case Tokens():
                return self._on_tokens(event)
            case BeamsFound():
                return self._on_beams_found(event)
            case DecodeEnded():
                return self._on_decode_ended()
            case DecodeFailed(error=error):
                return self._on_decode_failed(error)
            case StopFound():
                return self._on_stop_found(event)
            case TimeLimit():
                return self._cut_short(FinishKind.DEADLINE)
            case Abort():
                return self._cut_short(FinishKind.CANCELLED)

    # --- opening an attempt ---

    def _begin_attempt(self) -> None:
        self._prefill_worker: str | None = None
        self._decode_worker: str | None = None
        self._source: MoveSource | None = None  # offered to be the prefill worker
        self._is_move = False  # and taken
        self._epoch = 0  # of the decode worker
        self._keeps_blocks = False
        self._kept_by: MoveSource | None = None  # the decode worker, once it has let go of the attempt
        self._prefill_open = False
        self._decode_open = False
        self._decode_ended = False  # cleanly: it says nothing more
        self._is_local = self._local_prefill  # this attempt's decode computes the prompt itself
        self._committed = False
        self._decoding = {progress.choice for progress in self._unfinished}  # those that decode has not ended
        self._stops: list[SendStop] = []  # for choices that ended before the commit, while others went on
        for progress in self._unfinished:
            progress.begin_attempt()

    def _next_attempt(self, cause: KvferryError | None = None, source: MoveSource | None = None) -> list[Action]:
        self._begin_attempt()
        self._source = source
        self._attempt = next(self._attempts)
        self._phase = Phase.QUEUED
        return [
            ChooseWorkers(
                attempt=self._attempt,
                needs_prefill=not self._local_prefill,
                needs_decode=self._needs_decode,
                excluding=self._excluding,
                cause=cause,
                is_resume=self.num_emitted_tokens > 0 or self._resumes is not None,
                source=source,
            )
        ]

    @property
    def _needs_decode(self) -> bool:
        has_more = any(progress.num_tokens_left > 1 for progress in self._unfinished)
        return self._local_prefill or self._is_beam_search or has_more

    @property
    def _unfinished(self) -> list[ChoiceProgress]:
        return [progress for progress in self._progress.values() if not progress.is_over]

    @property
    def _known_token_ids(self) -> tuple[int, ...]:
        """Several choices have no output yet when an attempt begins; a single one may."""
        return (*self._prompt, *self._unfinished[0].token_ids)

    def _on_workers_chosen(self, event: WorkersChosen) -> list[Action]:
        if self._phase is not Phase.QUEUED:
            return []
        self._prefill_worker, self._decode_worker = event.prefill, event.decode
        if event.decode is None:
            return self._open_prefill(target=None)
        self._is_local = event.prefill is None
        self._is_move = self._source is not None and event.prefill == self._source.worker
        self._phase = Phase.REGISTERING
        self._decode_open = True
        return [OpenDecode(self._attempt, event.decode, self._known_token_ids, self._is_local)]

    def _on_registered(self, event: Registered) -> list[Action]:
        if self._phase is not Phase.REGISTERING:
            return []
        self._epoch, self._keeps_blocks = event.epoch, event.keeps_blocks
        if self._is_local:
            self._phase = Phase.PREFILLING
            self._committed = True  # nothing has to arrive
            return []
        return self._open_prefill(ShipTo(event.ship_address, event.epoch))

    def _open_prefill(self, target: ShipTo | None) -> list[Action]:
        assert self._prefill_worker is not None
        self._phase = Phase.PREFILLING
        self._prefill_open = True
        return [OpenPrefill(self._attempt, self._prefill_worker, self._known_token_ids, target)]

    # --- tokens ---

    def _on_prompt_scored(self, event: PromptScored) -> list[Action]:
        """They come in order; a gap will not close, and shows before a token is emitted (`_unscored`)."""
        emitted = self._prompt_logprobs.accept(event.token_index, event.logprobs) if self._prompt_logprobs else None
        return [] if emitted is None else [emitted]

    def _unscored(self) -> DataLoss | None:
        """What is wrong with a prompt of which the worker sends the first token, and not all that was asked for."""
        missing = self.prompt_scoring
        if missing is None:
            return None
        return DataLoss(f"the log-probability of prompt token {missing.first_index} is missing, and the prompt is done")

    def _on_first_token(self, event: FirstToken) -> list[Action]:
        if (error := self._unscored()) is not None:
            return self._attempt_failed(error, self._prefill_worker)
        if self._phase is Phase.PREFILLING:
            self._phase = Phase.DECODING if self._committed else Phase.FIRST_TOKEN
        if event.finish is not None:
            self._leave_decode(event.choice)  # decode ends that choice by the same rule, silently
        logprobs = () if event.logprob is None else (event.logprob,)
        actions = self._accept(event.choice, event.token_index, (event.token_id,), event.finish, logprobs)
        if self._phase is Phase.DONE and self._decode_open:  # no choice goes on: nothing is committed, decode lets go
            is_shipping = self._prefill_open and bool(self._stops)  # prefill knows nothing of stop strings
            cancelled: list[Action] = [self._cancel_prefill()] if is_shipping else []
            return [*cancelled, self._cancel_decode(), *actions]
        return actions

    def _on_committed(self) -> list[Action]:
        self._committed = True
        if self._phase is Phase.FIRST_TOKEN or self._is_beam_search:
            self._phase = Phase.DECODING
        stops, self._stops = self._stops, []
        for stop in stops:
            self._leave_decode(stop.choice)
        return list(stops)

    def _on_tokens(self, event: Tokens) -> list[Action]:
        if not self._committed:
            return self._attempt_failed(Internal("decode sent tokens before it was committed"), self._decode_worker)
        if self._is_local and (error := self._unscored()) is not None:
            return self._attempt_failed(error, self._decode_worker)
        if event.finish is not None:
            self._leave_decode(event.choice)
        if self._is_local:
            self._phase = Phase.DECODING
        return self._accept(event.choice, event.token_index, event.token_ids, event.finish, event.logprobs)

    def _leave_decode(self, choice: int) -> None:
        """Decode ends the choice, and its call with the last one."""
        self._decoding.discard(choice)
        if self._committed and not self._decoding:
            self._decode_open = False

    def _accept(
        self,
        choice: int,
        token_index: int,
        token_ids: tuple[int, ...],
        finish: Finish | None,
        logprobs: tuple[TokenLogprob, ...],
    ) -> list[Action]:
        """Emit what is in order now; keep what is early; end when the finish is reached."""
        progress = self._progress.get(choice)
        if progress is None or self._is_beam_search:
            error = Internal(f"a worker sent tokens of choice {choice}, which the attempt does not have")
            return self._attempt_failed(error, self._decode_worker)
        if progress.is_over:
            return []
        emitted = progress.accept(token_index, token_ids, finish, logprobs)
        return [*emitted, *self._finish_or_fail_on_gap(progress)]

    def _finish_or_fail_on_gap(self, progress: ChoiceProgress) -> list[Action]:
        """End the choice if its finish is reached; give the attempt up if something that is missing cannot come."""
        if (finish := progress.reached_finish) is not None:
            return self._finish(progress, finish)
        if self._first_token_may_come(progress) or not (progress.is_missing_tokens or self._decode_ended):
            return []
        missing = f"output token {progress.num_tokens} is missing"
        if progress.is_missing_tokens:
            error: KvferryError = DataLoss(f"{missing}, though later ones or the end were reported")
        else:
            error = Unavailable(f"{missing}: decode ended the call before its finish")
        return self._attempt_failed(error, self._decode_worker)

    def _first_token_may_come(self, progress: ChoiceProgress) -> bool:
        """Whether the next token may still come: only prefill's first token is ever behind one of decode's."""
        return self._prefill_open and not progress.has_advanced

    def _on_beams_found(self, event: BeamsFound) -> list[Action]:
        """The whole output of all choices."""
        self._decode_open = False
        if not self._is_beam_search or not self._committed or len(event.hypotheses) != len(self._progress):
            error = Internal(f"decode sent {len(event.hypotheses)} hypotheses that were not asked for")
            return self._attempt_failed(error, self._decode_worker)
        actions: list[Action] = []
        for progress, hypothesis in zip(self._unfinished, event.hypotheses, strict=True):
            if hypothesis.token_ids:
                actions.append(Emit(0, hypothesis.token_ids, progress.choice))
            actions += self._finish(progress, hypothesis.finish, hypothesis.cumulative_logprob)
        return actions

    # --- ends ---

    def _on_prefill_done(self) -> list[Action]:
        self._prefill_open = False
        if self._is_beam_search:
            return []
        if not all(progress.has_advanced for progress in self._unfinished):
            error = Internal("prefill ended without the first token")
            return self._attempt_failed(error, self._prefill_worker)
        if self._decode_worker is None:
            return self._attempt_failed(Internal("prefill's only token did not end the choice"), self._prefill_worker)
        return []

    def _on_prefill_failed(self, error: KvferryError) -> list[Action]:
        self._prefill_open = False
        if self._committed and (self._is_beam_search or all(progress.has_advanced for progress in self._unfinished)):
            return []  # decode has everything: prefill is not needed any more
        if isinstance(error, TargetUnavailable):
            return self._attempt_failed(error, self._decode_worker)
        if self._is_move:  # it was not bound to serve us; what is wrong with the request an ordinary attempt will show
            error = WorkerDraining(f"{self._prefill_worker} did not ship what it let go of: {error.message}")
        return self._attempt_failed(error, self._prefill_worker)

    def _on_decode_ended(self) -> list[Action]:
        """Every choice must have its finish now, or be able to get it from prefill's first token."""
        self._decode_open = False
        self._decode_ended = True
        for progress in self._unfinished:
            actions = self._finish_or_fail_on_gap(progress)
            if actions:
                return actions
        return []

    def _on_decode_failed(self, error: KvferryError) -> list[Action]:
        self._decode_open = False
        if isinstance(error, WorkerDraining) and self._committed and self._keeps_blocks:
            assert self._decode_worker is not None
            self._kept_by = MoveSource(self._decode_worker, self._epoch)
        return self._attempt_failed(error, self._decode_worker)

    def _on_stop_found(self, event: StopFound) -> list[Action]:
        progress = self._progress[event.choice]
        if progress.is_over:
            return []
        stop = SendStop(self._attempt, event.num_wanted_tokens, event.choice)
        finished = self._finish(progress, event.finish)
        if not self._committed:
            self._stops.append(stop)
            return [*(self._cancel_calls() if self.ended else []), *finished]
        sent: list[Action] = []
        if self._decode_open and event.choice in self._decoding:
            sent.append(stop)
            self._leave_decode(event.choice)
        return [*sent, *finished]

    def _cut_short(self, kind: FinishKind) -> list[Action]:
        cancelled = self._cancel_calls()
        return [*cancelled, *self._finish_all(self._unfinished, Finish(kind))]

    def _finish_all(self, ending: Sequence[ChoiceProgress], finish: Finish) -> list[Action]:
        return [action for progress in ending for action in self._finish(progress, finish)]

    def _finish(
        self, progress: ChoiceProgress, finish: Finish, cumulative_logprob: float | None = None
    ) -> list[Action]:
        progress.is_over = True
        if not self._unfinished:
            self._phase = Phase.DONE
        return [Finished(finish, progress.choice, cumulative_logprob)]

    def _fail(self, error: KvferryError) -> list[Action]:
        actions = self._cancel_calls()
        self._phase = Phase.FAILED
        return [*actions, Failed(error)]

    def _attempt_failed(self, error: KvferryError, worker: str | None) -> list[Action]:
        """Give the attempt up; begin the next one, or one for each choice, where that may help."""
        # Of those with all their tokens only the word that it was the last is missing.
        complete = [progress for progress in self._unfinished if progress.num_tokens_left == 0]
        finished = self._finish_all(complete, Finish(FinishKind.LENGTH))
        if self.ended:
            return [*self._cancel_calls(), *finished]
        if not isinstance(error, RETRYABLE_ERRORS):
            return [*finished, *self._fail(error)]
        blamed = {worker} if worker is not None else set()
        has_advanced = any(progress.has_advanced for progress in self._progress.values())
        has_progressed = has_advanced and self._committed
        if has_progressed:
            self._failures_without_progress = self._moves_without_progress = 0
            self._excluding = frozenset(blamed)
        else:
            self._excluding |= blamed
        if isinstance(error, WorkerDraining):
            self._moves_without_progress += 1
        elif not has_progressed:
            self._failures_without_progress += 1
        if self._failures_without_progress >= self._max_attempts or self._moves_without_progress > MAX_MOVES:
            # A worker's CANCELLED is its shutdown; the caller cancelled nothing.
            return self._fail(Unavailable(error.message) if isinstance(error, Cancelled) else error)
        if len(self._progress) > 1 and (has_advanced or len(self._unfinished) < len(self._progress)):
            return [*self._cancel_calls(), *finished, self._split(error)]
        source = self._source_of(self._unfinished[0])  # several have no tokens yet
        return [*self._cancel_calls(), *self._next_attempt(error, source)]

    def _split(self, cause: KvferryError) -> SplitChoices:
        self._phase = Phase.SPLIT
        return SplitChoices(
            tuple(
                SplitChoice(progress.choice, progress.token_ids, self._excluding, cause, self._source_of(progress))
                for progress in self._unfinished
            )
        )

    def _source_of(self, progress: ChoiceProgress) -> MoveSource | None:
        """The worker that keeps a choice it let go of, where that one is to ship it."""
        pays = is_worth_moving(progress.num_tokens, self._max_tokens, self._min_moved_tokens)
        return self._kept_by if pays else None

    def _cancel_calls(self) -> list[Action]:
        cancelled: list[Action] = [self._cancel_prefill()] if self._prefill_open else []
        return [*cancelled, *([self._cancel_decode()] if self._decode_open else [])]

    def _cancel_prefill(self) -> CancelPrefill:
        self._prefill_open = False
        return CancelPrefill(self._attempt)

    def _cancel_decode(self) -> CancelDecode:
        self._decode_open = False
        return CancelDecode(self._attempt)
