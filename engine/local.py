"""Single-process mode: the same engine without services. It is the oracle of every parity test.

`generate` adds sequences to an `EngineCore`, steps until all are done and returns what each produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.beam import Hypothesis
from engine.core import EngineCore
from engine.outputs import (
    BeamsFinished,
    CandidatesFound,
    Output,
    PromptScored,
    SequenceFailed,
    SequencePreempted,
    TokenSampled,
)
from engine.sequence import Sequence
from kvferry.errors import KvferryError
from kvferry.sampling import Finish, TokenLogprob


@dataclass(slots=True)
class LocalResult:
    """Output of one choice, or of a beam search."""

    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish: Finish | None = None
    beams: tuple[Hypothesis, ...] = ()
    error: KvferryError | None = None
    num_preemptions: int = 0


def choice_name(seq_id: str, choice: int) -> str:
    """The result's key of a choice: that of the first one is the sequence's own name."""
    return seq_id if choice == 0 else f"{seq_id}#{choice}"


def generate(
    core: EngineCore, sequences: Iterable[Sequence], *, before_step: Callable[[int], None] = lambda step: None
) -> dict[str, LocalResult]:
    """Runs `sequences` to their ends; `before_step` is told the number of the step and may add or remove sequences.

    A sequence added by `before_step` gets its result too; of several choices each has its own (`choice_name`).
    """
    results: dict[str, LocalResult] = {}
    for sequence in sequences:
        core.add(sequence)
    step = 0
    before_step(step)
    while core.has_work:
        for output in core.step():
            _take(output, results)
        step += 1
        before_step(step)
    return results


def _take(output: Output, results: dict[str, LocalResult]) -> None:
    choice = output.choice if isinstance(output, TokenSampled | SequencePreempted) else 0
    result = results.setdefault(choice_name(output.seq_id, choice), LocalResult())
    match output:
        case PromptScored():
            assert output.token_index == len(result.prompt_logprobs) + 1, "a log-probability was lost or doubled"
            assert not result.token_ids, "the prompt's log-probabilities come first"
            result.prompt_logprobs += output.logprobs
        case TokenSampled():
            assert output.token_index == len(result.token_ids), "a token was lost or doubled"
            result.token_ids.append(output.token_id)
            result.logprobs.append(output.logprob)
            result.finish = output.finish
        case BeamsFinished():
            result.beams = output.beams
        case CandidatesFound():
            raise AssertionError("only a prefill worker tells candidates")
        case SequenceFailed():
            result.error = output.error
        case SequencePreempted():
            result.num_preemptions += 1
