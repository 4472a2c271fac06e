"""Log-probabilities of prompts in the engine: what is told, and how many rows a step has."""

from __future__ import annotations

from engine.core import EngineLimits
from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.outputs import Output, PromptScored, SequenceFailed, TokenSampled
from engine.scheduler import MAX_SCORED_TOKENS
from engine.scripted import scripted_logprob
from engine.sequence import SequenceStatus
from kvferry.sampling import TokenLogprob
from kvferry.spec import PromptScoring
from tests.support.engines import make_core, make_sequence, run_to_end

PROMPT = list(range(30, 60))


def told(outputs: list[Output], seq_id: str) -> list[TokenLogprob]:
    """What was told of a sequence's prompt; each place once, in order, from the first on."""
    logprobs: list[TokenLogprob] = []
    for output in outputs:
        if isinstance(output, PromptScored) and output.seq_id == seq_id:
            assert output.token_index == len(logprobs) + 1
            logprobs += output.logprobs
    return logprobs


def test_every_place_comes_once_before_the_first_token() -> None:
    core = make_core(64)
    sequence = make_sequence(core, "a", PROMPT, 3)
    sequence.scoring = PromptScoring(1, 2)
    core.add(sequence)
    outputs = run_to_end(core)
    logprobs = told(outputs, "a")
    assert [one.token_id for one in logprobs] == PROMPT[1:]
    assert [one.logprob for one in logprobs] == [scripted_logprob(token_id) for token_id in PROMPT[1:]]
    assert all(len(one.alternatives) == 2 for one in logprobs)
    kinds = [type(output) for output in outputs]
    assert max(place for place, kind in enumerate(kinds) if kind is PromptScored) < kinds.index(TokenSampled)


def test_rows_of_a_step_are_bounded_over_all_sequences() -> None:
    core = make_core(512, EngineLimits(max_batched_tokens=1024, max_running=8))
    for name in "abc":
        sequence = make_sequence(core, name, [ord(name), *range(300)], 2, arrival=ord(name))
        sequence.scoring = PromptScoring(1, 0)
        core.add(sequence)
    core.add(make_sequence(core, "plain", range(400, 900), 2, arrival=999))
    most, run = 0, core.runner.run

    def watched(slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        nonlocal most
        most = max(most, sum(len(part.score.token_ids) for part in slices if part.score is not None))
        return run(slices, on_kv_written)

    core.runner.run = watched  # type: ignore[method-assign]
    outputs = run_to_end(core)
    assert MAX_SCORED_TOKENS - 1 <= most <= MAX_SCORED_TOKENS
    for name in "abc":
        assert [one.token_id for one in told(outputs, name)] == list(range(300))


def test_it_does_not_wait_for_blocks_it_cannot_use() -> None:
    core = make_core(64, EngineLimits(max_batched_tokens=16, max_running=8, max_chunk_tokens=4))
    plain, other, scored = (make_sequence(core, name, PROMPT, 2, arrival=n) for n, name in enumerate("abc"))
    scored.scoring = PromptScoring(1, 0)
    core.add(plain)
    core.step()
    core.add(other)
    core.add(scored)
    outputs = core.step()
    assert scored.status is SequenceStatus.RUNNING and other.status is SequenceStatus.WAITING
    outputs += run_to_end(core)
    assert len(told(outputs, "c")) == len(PROMPT) - 1


def test_a_prompt_that_cannot_be_scored_fails_alone() -> None:
    core = make_core(64)
    run = core.runner.run

    def broken(slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        return [
            one if part.score is None else Sampled(None, "non-finite logits in the prompt").joined(one)
            for part, one in zip(slices, run(slices, on_kv_written), strict=True)
        ]

    core.runner.run = broken  # type: ignore[method-assign]
    bad = make_sequence(core, "bad", PROMPT, 3)
    bad.scoring = PromptScoring(1, 0)
    core.add(bad)
    core.add(make_sequence(core, "good", PROMPT[::-1], 3))
    outputs = run_to_end(core)
    assert [output.seq_id for output in outputs if isinstance(output, SequenceFailed)] == ["bad"]
    assert sum(isinstance(output, TokenSampled) and output.seq_id == "good" for output in outputs) == 3
