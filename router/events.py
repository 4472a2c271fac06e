"""What the request lifecycle takes in and gives out: plain values, so that a simulator can drive the real machine.

An event names the attempt it belongs to where it comes from a worker's call; an action names the attempt whose call it
means. Both name the choice where they are about one. `Action`s are performed in the order they are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import KvferryError
from kvferry.sampling import Finish, TokenLogprob


@dataclass(frozen=True, slots=True)
class WorkersChosen:
    """The pair for the next attempt; a role that the attempt does not need is None.

    Without a prefill worker the decode worker computes the prompt itself.
    """

    prefill: str | None
    decode: str | None


@dataclass(frozen=True, slots=True)
class NoWorkers:
    """No worker can take the next attempt."""

    error: KvferryError


@dataclass(frozen=True, slots=True)
class Registered:
    """Decode knows the attempt and names where its blocks go; `keeps_blocks`: they can be shipped on if it drains."""

    attempt: int
    epoch: int
    ship_address: str
    keeps_blocks: bool = False


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from place `token_index` on, from the worker that computes it."""

    attempt: int
    token_index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Prefill sampled a choice's first token of the attempt; `finish` when that token ends the choice."""

    attempt: int
    token_index: int
    token_id: int
    finish: Finish | None = None
    choice: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The shipment is acknowledged, or there was nothing to ship; the prefill call has ended."""

    attempt: int
    num_blocks_shipped: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prefill call ended otherwise than by `PrefillDone`."""

    attempt: int
    error: KvferryError


@dataclass(frozen=True, slots=True)
class Committed:
    """Decode has everything and the choices are in its batch."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens decode sampled, `token_index` being the index of the first; `finish` when the last ends the choice.

    `logprobs`: one a token, or none where they were not asked for.
    """

    attempt: int
    token_index: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result of a beam search: all its output, and the sum of its tokens' log-probabilities."""

    token_ids: tuple[int, ...]
    finish: Finish
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class BeamsFound:
    """Decode's beam search ended; hypotheses best first, one a choice."""

    attempt: int
    hypotheses: tuple[Hypothesis, ...]


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The decode call ended cleanly: what decode had to say of its choices has been said."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The decode call ended before its finish."""

    attempt: int
    error: KvferryError


@dataclass(frozen=True, slots=True)
class StopFound:
    """The text of the choice's first `num_wanted_tokens` output tokens completes a stop string."""

    num_wanted_tokens: int
    finish: Finish
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The caller cancelled, left, or its deadline passed; `error` says which."""

    error: KvferryError


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The request's own time limit passed: what there is, is the answer."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The request was aborted by its id: what there is, is the answer."""


Event = (
    WorkersChosen
    | NoWorkers
    | Registered
    | PromptScored
    | FirstToken
    | PrefillDone
    | PrefillFailed
    | Committed
    | Tokens
    | BeamsFound
    | DecodeEnded
    | DecodeFailed
    | StopFound
    | ClientGone
    | TimeLimit
    | Abort
)


@dataclass(frozen=True, slots=True)
class MoveSource:
    """A decode worker that drains and keeps the blocks of prompt and output, and its life."""

    worker: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ChooseWorkers:
    """Choose a pair for attempt number `attempt`, if possible without the workers in `excluding`.

    `cause` is what ended the attempt before it; `is_resume`: the client has tokens of it; `source`: the prefill worker
    to choose, if it is still there.
    """

    attempt: int
    needs_prefill: bool
    needs_decode: bool
    excluding: frozenset[str]
    cause: KvferryError | None = field(default=None, compare=False)
    is_resume: bool = field(default=False, compare=False)
    source: MoveSource | None = None


@dataclass(frozen=True, slots=True)
class OpenDecode:
    """Open the decode call with these tokens; with `local_prefill` decode computes them itself."""

    attempt: int
    worker: str
    token_ids: tuple[int, ...]
    local_prefill: bool


@dataclass(frozen=True, slots=True)
class ShipTo:
    """The receiving end of an attempt's blocks."""

    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class OpenPrefill:
    """Open the prefill call with these tokens; without a target there is nothing to ship."""

    attempt: int
    worker: str
    token_ids: tuple[int, ...]
    target: ShipTo | None


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    """Cancel the attempt's prefill call."""

    attempt: int


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """Cancel the attempt's decode call."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SendStop:
    """Tell decode that no more than `num_wanted_tokens` output tokens of the choice are wanted.

    Decode ends the choice, and with the last one the call.
    """

    attempt: int
    num_wanted_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class EmitPromptLogprobs:
    """Log-probabilities of the prompt's tokens for the client, the next ones in order."""

    token_index: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens of a choice for the client, the next ones in order."""

    token_index: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice ended well. With the last one the lifecycle has ended; calls that are open then end by themselves."""

    finish: Finish
    choice: int = 0
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """A choice to be gone on with as a request of its own.

    Attributes:
        token_ids: its output so far.
        excluding: workers to avoid.
        cause: what ended the attempt that it shared with others; None where another router had begun it.
        source: as in `ChooseWorkers`.
    """

    choice: int
    token_ids: tuple[int, ...]
    excluding: frozenset[str]
    cause: KvferryError | None = field(compare=False)
    source: MoveSource | None = None


@dataclass(frozen=True, slots=True)
class SplitChoices:
    """An attempt failed after tokens had gone out: its unfinished choices part ways; the last action."""

    choices: tuple[SplitChoice, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; the last action."""

    error: KvferryError


Action = (
    ChooseWorkers
    | OpenDecode
    | OpenPrefill
    | CancelPrefill
    | CancelDecode
    | SendStop
    | EmitPromptLogprobs
    | Emit
    | Finished
    | SplitChoices
    | Failed
)
