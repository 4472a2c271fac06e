"""From what a worker is told about a sequence to the sequence."""

from __future__ import annotations

from engine.constraint import Constraint
from engine.core import EngineCore
from engine.sequence import Priority, Sequence
from kvferry.spec import SequenceSpec


def sequence_from_spec(
    spec: SequenceSpec,
    core: EngineCore,
    *,
    arrival: int,
    hold_after_prefill: bool = False,
    constraint: Constraint | None = None,
) -> Sequence:
    """A sequence for `core`; `arrival` orders sequences of one tier and deadline.

    `constraint`: opened for it where its sampling has a grammar.
    """
    assert (constraint is None) == (not spec.sampling.grammar)
    scoring = spec.prompt_scoring
    return Sequence(
        spec.id.seq_id,
        spec.token_ids,
        spec.sampling,
        num_prompt_tokens=spec.num_prompt_tokens,
        priority=Priority(tier_rank=spec.tier_rank, deadline_unix_ms=spec.deadline_unix_ms, arrival=arrival),
        hash_root=core.hash_root(
            adapter=spec.adapter, cache_salt=spec.cache_salt, tenant=spec.tenant, shared_salt=spec.shared_salt
        ),
        hold_after_prefill=hold_after_prefill,
        use_prefix_cache=not spec.bypass_prefix_cache,
        choice=spec.choice,
        num_choices=spec.num_choices,
        beam=spec.beam,
        tenant=spec.tenant,
        scoring=scoring if scoring is not None and scoring.first_index < spec.num_prompt_tokens else None,
        constraint=constraint,
    )
