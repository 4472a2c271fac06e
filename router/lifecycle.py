"""The life of one request, as a plain state machine: events in, actions out; no clock, no sockets, no tasks.

    QUEUED ──WorkersChosen──► REGISTERING ──Registered──► PREFILLING ──FirstToken──► FIRST_TOKEN ──Committed──► DECODING
      ▲                                                                                                         │
      └───────────────── a retryable failure in any phase, with prompt + tokens so far ─────────────────────────┤
                                                                                              DONE or FAILED ◄──┘

Decode is opened first, because prefill must know where to ship. Tokens come from two streams and are emitted in order
of their index: a duplicate is dropped, a token that is early waits, and a gap that nothing can fill any more fails the
attempt. Whatever belongs to an older attempt is ignored, so a late message can never change the text.

`router/run.py` performs the actions. After `Finished` the calls that were not cancelled end by themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from kvferry.errors import Cancelled, DataLoss, Internal, KvferryError, TargetUnavailable, Unavailable
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
    Event,
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

DEFAULT_MAX_ATTEMPTS = 3
"""Attempts in a row that may fail without a new token; a token resets the count."""

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


class RequestLifecycle:
    """Admit, retry, resume and finish one request of one choice.

    Args:
        prompt_token_ids: the prompt.
        max_tokens: most output tokens, at least 1.
        local_prefill: there are no prefill workers; decode computes prompts itself.
        max_attempts: attempts in a row that may fail without a new token.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        local_prefill: bool = False,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    ) -> None:
        assert max_tokens >= 1
        self._max_attempts = max_attempts
        self._prompt = tuple(prompt_token_ids)
        self._max_tokens = max_tokens
        self._local_prefill = local_prefill
        self._phase = Phase.QUEUED
        self._output: list[int] = []
        self._attempt = 0
        self._excluding: frozenset[str] = frozenset()
        self._failures_without_progress = 0
        self._begin_attempt()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def ended(self) -> bool:
        return self._phase in (Phase.DONE, Phase.FAILED)

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1; 0 before `start`."""
        return self._attempt

    @property
    def num_emitted_tokens(self) -> int:
        return len(self._output)

    def start(self) -> list[Action]:
        """Ask for the first pair."""
        return self._next_attempt()

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
        self._base_index = len(self._output)  # index of the attempt's first token
        self._prefill_worker: str | None = None
        self._decode_worker: str | None = None
        self._prefill_open = False
        self._decode_open = False
        self._is_local = self._local_prefill  # this attempt's decode computes the prompt itself
        self._committed = False
        self._early: dict[int, int] = {}  # tokens by index that wait for one before them
        self._finish: Finish | None = None  # reported, perhaps while tokens before it are missing
        self._finish_length = 0  # output tokens there are at that finish

    def _next_attempt(self, cause: KvferryError | None = None) -> list[Action]:
        self._begin_attempt()
        self._attempt += 1
        self._phase = Phase.QUEUED
        return [
            ChooseWorkers(
                attempt=self._attempt,
                needs_prefill=not self._local_prefill,
                needs_decode=self._local_prefill or self._num_tokens_left > 1,
                excluding=self._excluding,
                cause=cause,
                is_resume=len(self._output) > 0,
            )
        ]

    @property
    def _num_tokens_left(self) -> int:
        return self._max_tokens - len(self._output)

    @property
    def _known_token_ids(self) -> tuple[int, ...]:
        return (*self._prompt, *self._output)

    def _on_workers_chosen(self, event: WorkersChosen) -> list[Action]:
        if self._phase is not Phase.QUEUED:
            return []
        self._prefill_worker, self._decode_worker = event.prefill, event.decode
        if event.decode is None:
            return self._open_prefill(target=None)
        self._is_local = event.prefill is None
        self._phase = Phase.REGISTERING
        self._decode_open = True
        return [OpenDecode(self._attempt, event.decode, self._known_token_ids, self._is_local)]

    def _on_registered(self, event: Registered) -> list[Action]:
        if self._phase is not Phase.REGISTERING:
            return []
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

    def _on_first_token(self, event: FirstToken) -> list[Action]:
        if self._phase is Phase.PREFILLING:
            self._phase = Phase.DECODING if self._committed else Phase.FIRST_TOKEN
        actions = self._accept(event.token_index, (event.token_id,), event.finish)
        if self.ended and self._decode_open:  # it ended the choice: nothing is committed, decode lets go
            return [self._cancel_decode(), *actions]
        return actions

    def _on_committed(self) -> list[Action]:
        self._committed = True
        if self._phase is Phase.FIRST_TOKEN:
            self._phase = Phase.DECODING
        return []

    def _on_tokens(self, event: Tokens) -> list[Action]:
        if not self._committed:
            return self._attempt_failed(Internal("decode sent tokens before it was committed"), self._decode_worker)
        if event.finish is not None:
            self._decode_open = False
        if self._is_local:
            self._phase = Phase.DECODING
        return self._accept(event.token_index, event.token_ids, event.finish)

    def _accept(self, token_index: int, token_ids: tuple[int, ...], finish: Finish | None) -> list[Action]:
        """Emit what is in order now; keep what is early; end when the finish is reached."""
        for index, token_id in enumerate(token_ids, start=token_index):
            if len(self._output) <= index < self._max_tokens:
                self._early.setdefault(index, token_id)
        if finish is not None:
            self._finish, self._finish_length = finish, token_index + len(token_ids)
        start = len(self._output)
        while (index := len(self._output)) in self._early:
            self._output.append(self._early.pop(index))
        new = tuple(self._output[start:])
        emitted: list[Action] = [Emit(start, new)] if new else []
        return [*emitted, *self._finish_or_fail_on_gap()]

    def _finish_or_fail_on_gap(self) -> list[Action]:
        """End the choice if its finish is reached; give the attempt up if a token that is missing cannot come."""
        if self._finish is not None and not self._early and self._finish_length == len(self._output):
            return self._done(self._finish)
        if (self._finish is None and not self._early) or self._first_token_may_come():
            return []
        error = DataLoss(f"output token {len(self._output)} is missing, though later ones or the end were reported")
        return self._attempt_failed(error, self._decode_worker)

    def _first_token_may_come(self) -> bool:
        """Whether the next token may still come: only prefill's first token is ever behind one of decode's."""
        return self._prefill_open and len(self._output) == self._base_index

    # --- ends ---

    def _on_prefill_done(self) -> list[Action]:
        self._prefill_open = False
        if len(self._output) == self._base_index:
            error = Internal("prefill ended without the first token")
            return self._attempt_failed(error, self._prefill_worker)
        if self._decode_worker is None:
            return self._attempt_failed(Internal("prefill's only token did not end the choice"), self._prefill_worker)
        return []

    def _on_prefill_failed(self, error: KvferryError) -> list[Action]:
        self._prefill_open = False
        if self._committed and len(self._output) > self._base_index:
            return []  # decode has everything: prefill is not needed any more
        is_targets_fault = isinstance(error, TargetUnavailable)
        return self._attempt_failed(error, self._decode_worker if is_targets_fault else self._prefill_worker)

    def _on_decode_failed(self, error: KvferryError) -> list[Action]:
        self._decode_open = False
        return self._attempt_failed(error, self._decode_worker)

    def _on_stop_found(self, event: StopFound) -> list[Action]:
        actions: list[Action] = []
        if not self._committed and self._prefill_open:
            actions.append(self._cancel_prefill())
        if self._decode_open and self._committed:
            actions.append(SendStop(self._attempt, event.num_wanted_tokens))
            self._decode_open = False
        return [*actions, *self._cancel_decode_if_open(), *self._done(event.finish)]

    def _cut_short(self, kind: FinishKind) -> list[Action]:
        return [*self._cancel_calls(), *self._done(Finish(kind))]

    def _done(self, finish: Finish) -> list[Action]:
        self._phase = Phase.DONE
        return [Finished(finish)]

    def _fail(self, error: KvferryError) -> list[Action]:
        actions = self._cancel_calls()
        self._phase = Phase.FAILED
        return [*actions, Failed(error)]

    def _attempt_failed(self, error: KvferryError, worker: str | None) -> list[Action]:
        """Give the attempt up; begin the next one where that may help."""
        if self._num_tokens_left == 0:  # only the word that it was the last is missing
            return self._cut_short(FinishKind.LENGTH)
        if not isinstance(error, RETRYABLE_ERRORS):
            return self._fail(error)
        blamed = {worker} if worker is not None else set()
        if len(self._output) > self._base_index:
            self._failures_without_progress = 0
            self._excluding = frozenset(blamed)
        else:
            self._failures_without_progress += 1
            self._excluding |= blamed
        if self._failures_without_progress >= self._max_attempts:
            # A worker's CANCELLED is its shutdown; the caller cancelled nothing.
            return self._fail(Unavailable(error.message) if isinstance(error, Cancelled) else error)
        return [*self._cancel_calls(), *self._next_attempt(error)]

    def _cancel_calls(self) -> list[Action]:
        cancelled: list[Action] = [self._cancel_prefill()] if self._prefill_open else []
        return [*cancelled, *self._cancel_decode_if_open()]

    def _cancel_decode_if_open(self) -> list[Action]:
        return [self._cancel_decode()] if self._decode_open else []

    def _cancel_prefill(self) -> CancelPrefill:
        self._prefill_open = False
        return CancelPrefill(self._attempt)

    def _cancel_decode(self) -> CancelDecode:
        self._decode_open = False
        return CancelDecode(self._attempt)
