"""A worker that would overlook a part of a request is never given it."""

from __future__ import annotations

from kvferry.sampling import BeamParams, LogitRules, SamplingParams
from kvferry.sequence_fields import FIRST_FIELDS, own_fields, set_fields
from kvferry.spec import AttemptId, PromptScoring, SequenceSpec
from kvferry.wire import spec_to_pb

PLAIN = SequenceSpec(
    id=AttemptId("a", 1),
    token_ids=(1, 2, 3),
    num_prompt_tokens=2,
    sampling=SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=7,
        min_tokens=2,
        ignore_eos=True,
        eos_token_ids=(5, 6),
        stop_token_ids=(7,),
        logprobs=True,
    ),
    tier_rank=2,
    deadline_unix_ms=3,
    cache_salt="salt",
    bypass_prefix_cache=True,
    choice=1,
    num_choices=2,
    beam=BeamParams(width=2, num_returned=2),
    tenant="t",
    shared_salt="s",
)


def fields_with(**sampling: object) -> frozenset[str]:
    spec = SequenceSpec(AttemptId("a", 1), (1,), 1, SamplingParams(max_tokens=1, **sampling))  # type: ignore[arg-type]
    return set_fields(spec_to_pb(spec)) - FIRST_FIELDS


def test_a_worker_that_tells_none_may_have_what_the_first_ones_knew() -> None:
    assert set_fields(spec_to_pb(PLAIN)) <= FIRST_FIELDS <= own_fields()


def test_what_came_later_counts_only_where_it_is_set() -> None:
    assert fields_with() == frozenset()
    assert fields_with(grammar="start: A", eos_token_ids=(1,)) == {"sampling.grammar"}
    assert fields_with(logprobs=True, num_top_logprobs=2) == {"sampling.num_top_logprobs"}
    rules = LogitRules(bias=((1, 2.0),), bad_words=((3, 4),))
    assert fields_with(rules=rules) == {
        "sampling.rules",
        "sampling.rules.bias",
        "sampling.rules.bad_words",
        "sampling.rules.bad_words.ids",
        "sampling.rules.repetition_penalty",
    }
    scored = SequenceSpec(
        AttemptId("a", 1), (1, 2), 2, SamplingParams(max_tokens=1), prompt_scoring=PromptScoring(1, 0)
    )
    assert set_fields(spec_to_pb(scored)) - FIRST_FIELDS == {"prompt_scoring", "prompt_scoring.first_index"}


def test_whatever_can_be_set_can_be_told() -> None:
    told = own_fields()
    assert {"sampling.rules.bad_words.ids", "prompt_scoring.num_top_logprobs", "sampling.grammar"} <= told
    assert not any(path.endswith(("bias.key", "bias.value")) for path in told)
