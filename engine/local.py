"""Single-process mode: the same engine without services. It is the oracle of every parity test.

`generate` adds sequences to an `EngineCore`, steps until all are done and returns what each produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.outputs import SequenceFailed, SequencePreempted, TokenSampled
from engine.sequence import Sequence
from kvferry.errors import KvferryError
from kvferry.sampling import Finish


@dataclass(slots=True)
class LocalResult:
    """Output of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: KvferryError | None = None
    num_preemptions: int = 0


def generate(
    core: EngineCore, sequences: Iterable[Sequence], *, before_step: Callable[[int], None] = lambda step: None
) -> dict[str, LocalResult]:
    """Runs `sequences` to their ends; `before_step` is told the number of the step and may add or remove sequences.

    A sequence added by `before_step` gets its result too.
    """
    results: dict[str, LocalResult] = {}
    for sequence in sequences:
        core.add(sequence)
    step = 0
    before_step(step)
    while core.has_work:
        for output in core.step():
            result = results.setdefault(output.seq_id, LocalResult())
            match output:
                case TokenSampled():
                    assert output.token_index == len(result.token_ids), "a token was lost or doubled"
                    result.token_ids.append(output.token_id)
                    result.finish = output.finish
                case SequenceFailed():
                    result.error = output.error
                case SequencePreempted():
                    result.num_preemptions += 1
        step += 1
        before_step(step)
    return results
