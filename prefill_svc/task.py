"""One attempt's prefill, as a plain state machine: engine outputs and shipment results in, actions out.

    queued ──SequenceStarted──► computing ──TokenSampled──► shipping the rest ──shipped──► done
                 │ OpenShipment      │ ShipTokens a chunk        │ ShipFirstTokens
                 └───────────────────┴── anything fails ────────►└── Fail; the shell frees everything

While the shipment waits for its grant the engine may park the sequence. The shell secures it when the grant comes: one
that was parked is computed again, which brings chunks a second time and then SequenceRestored.

The shell (`service.py`, or the simulator) performs the actions in order. Whatever way the attempt ends, the shell first
ends the shipment, which reads the sequence's blocks, and only then removes the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.outputs import (
    CandidatesFound,
    ChunkComputed,
    Output,
    PromptScored,
    SequenceFailed,
    SequenceRestored,
    SequenceStarted,
    TokenSampled,
)
from kvferry.errors import Cancelled, DataLoss, Internal, KvferryError, TargetUnavailable
from kvferry.sampling import Finish, TokenLogprob
from kvtransfer.sender import ShipSummary

_OWN_ERRORS = (DataLoss, Internal, Cancelled)
"""What a shipment may fail with that does not say that its target is at fault."""


@dataclass(frozen=True, slots=True)
class OpenShipment:
    """Open the Ship stream and offer the sequence's blocks."""


@dataclass(frozen=True, slots=True)
class ShipTokens:
    """The KV of this many tokens is in the blocks."""

    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class ShipFirstTokens:
    """Everything is computed: ship the rest and commit with these tokens, one a choice.

    For beam search they are the most likely ones, with their log-probabilities.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ShipRestored:
    """The blocks that were given up are computed again: the shipment, which waits for that, may read them."""


@dataclass(frozen=True, slots=True)
class CancelShipment:
    """Nothing is left to decode: end the Ship stream without a commit."""


@dataclass(frozen=True, slots=True)
class ReportPromptLogprobs:
    """Tell the router log-probabilities of the prompt's tokens from place `token_index` on."""

    token_index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ReportFirstToken:
    """Tell the router the first token of a choice."""

    token_id: int
    token_index: int
    finish: Finish | None
    num_cached_tokens: int
    queue_ns: int
    prefill_ns: int
    choice: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ReportPromptComputed:
    """Tell the router that the prompt of a beam search is computed."""

    num_cached_tokens: int
    queue_ns: int
    prefill_ns: int


@dataclass(frozen=True, slots=True)
class ReportDone:
    """The attempt's prefill is complete; the last action."""

    summary: ShipSummary


@dataclass(frozen=True, slots=True)
class FailAttempt:
    """The attempt failed; the last action."""

    error: KvferryError


TaskAction = (
    OpenShipment
    | ShipTokens
    | ShipFirstTokens
    | ShipRestored
    | CancelShipment
    | ReportPromptLogprobs
    | ReportFirstToken
    | ReportPromptComputed
    | ReportDone
    | FailAttempt
)


class PrefillTask:
    """Decides what one attempt's prefill does next.

    Args:
        has_target: whether there is a decode worker to ship to; without one nothing can be left to decode.
        received_ns: when the attempt arrived.
        num_choices: first tokens there will be, in order of choice.
    """

    def __init__(self, *, has_target: bool, received_ns: int, num_choices: int = 1) -> None:
        self._has_target = has_target
        self._num_choices = num_choices
        self._tokens: list[TokenSampled] = []
        self._received_ns = received_ns
        self._started_ns = received_ns
        self._num_cached_tokens = 0
        self._num_computed_tokens = 0
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed_tokens

    def on_output(self, output: Output) -> list[TaskAction]:
        """Takes what the engine says of the sequence."""
        if self._is_over:
            return []
        match output:
            case SequenceStarted():
                return self._on_started(output)
            case ChunkComputed(num_computed_tokens=num_tokens):
                self._num_computed_tokens = num_tokens
                return [ShipTokens(num_tokens)] if self._has_target else []
            case PromptScored(token_index=token_index, logprobs=logprobs):
                return [ReportPromptLogprobs(token_index, logprobs)]
            case TokenSampled():
                return self._on_token(output)
            case CandidatesFound():
                return self._on_candidates(output)
            case SequenceRestored():
                return [ShipRestored()]
            case SequenceFailed(error=error):
                return self.on_failed(error)
        return []

    def on_shipped(self, summary: ShipSummary) -> list[TaskAction]:
        """The receiver acknowledged the commit."""
        return [] if self._is_over else self._end(ReportDone(summary))

    def on_ship_failed(self, error: KvferryError) -> list[TaskAction]:
        """The shipment failed.

        A silent receiver, or a refusal (it restarted, or has lost the attempt), is no fault of the request: it says
        that this decode worker cannot serve it now, which another may.
        """
        if isinstance(error, _OWN_ERRORS):
            return self.on_failed(error)
        return self.on_failed(TargetUnavailable(f"the shipment to decode failed: {error.message}"))

    def on_failed(self, error: KvferryError) -> list[TaskAction]:
        """Something the attempt needs failed."""
        return [] if self._is_over else self._end(FailAttempt(error))

    def _on_started(self, output: SequenceStarted) -> list[TaskAction]:
        self._started_ns = output.at_ns
        self._num_cached_tokens = output.num_cached_tokens
        self._num_computed_tokens = output.num_cached_tokens
        return [OpenShipment(), ShipTokens(output.num_cached_tokens)] if self._has_target else []

    def _on_token(self, output: TokenSampled) -> list[TaskAction]:
        report = ReportFirstToken(
            token_id=output.token_id,
            token_index=output.token_index,
            finish=output.finish,
            num_cached_tokens=self._num_cached_tokens,
            queue_ns=self._started_ns - self._received_ns,
            prefill_ns=output.at_ns - self._started_ns,
            choice=output.choice,
            logprob=output.logprob,
        )
        self._tokens.append(output)
        return [report] if len(self._tokens) < self._num_choices else [report, *self._after_tokens()]

    def _on_candidates(self, output: CandidatesFound) -> list[TaskAction]:
        report = ReportPromptComputed(
            num_cached_tokens=self._num_cached_tokens,
            queue_ns=self._started_ns - self._received_ns,
            prefill_ns=output.at_ns - self._started_ns,
        )
        token_ids = tuple(one.token_id for one in output.candidates)
        return [report, ShipFirstTokens(token_ids, tuple(one.logprob for one in output.candidates))]

    def _after_tokens(self) -> list[TaskAction]:
        """Every choice has its first token: ship, unless they ended all of them."""
        if any(token.finish is None for token in self._tokens):
            return [ShipFirstTokens(tuple(token.token_id for token in self._tokens))]
        cancel: list[TaskAction] = [CancelShipment()] if self._has_target else []
        return [*cancel, *self._end(ReportDone(ShipSummary()))]

    def _end(self, action: TaskAction) -> list[TaskAction]:
        self._is_over = True
        return [action]
