"""Values to and from their protobuf messages: one pair of functions a value, used by every process.

`*_from_pb` checks what a peer sent and raises InvalidArgument naming the field, so that a malformed message fails one
call and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from kvferry.block_changes import BlockChanges, NumberedChanges
from kvferry.block_hash import HASH_BYTES
from kvferry.errors import InvalidArgument
from kvferry.kv_layout import DTYPE_BYTES, KvLayout
from kvferry.sampling import NO_RULES, BeamParams, Finish, FinishKind, LogitRules, SamplingParams, TokenLogprob
from kvferry.spec import AttemptId, PromptScoring, SequenceSpec
from kvferry.stats import EngineStats, MemorySnapshot, ShipCounters, TenantMemory
from proto.kvferry.v1 import cache_pb2, types_pb2, worker_pb2

MAX_CHOICES = 256
"""Most choices or beams of one request that a worker takes: all are made at once when the prompt is done."""

MAX_HASHES_PER_MESSAGE = 4_096
"""Block hashes of one message: 140 KB, far below gRPC's 4 MiB, and a millisecond or two of an event loop's time."""

_REASONS: dict[FinishKind, types_pb2.FinishReason] = {
    FinishKind.END_OF_SEQUENCE: types_pb2.FINISH_REASON_END_OF_SEQUENCE,
    FinishKind.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishKind.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishKind.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishKind.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishKind.DEADLINE: types_pb2.FINISH_REASON_DEADLINE,
}
_KINDS = {reason: kind for kind, reason in _REASONS.items()}


def finish_to_pb(finish: Finish) -> types_pb2.Finish:
    """Message of the end of a choice."""
    message = types_pb2.Finish(reason=_REASONS[finish.kind])
    if finish.token_id is not None:
        message.token_id = finish.token_id
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    return message


def finish_from_pb(message: types_pb2.Finish) -> Finish:
    """Raises InvalidArgument for a reason that is unset or unknown."""
    kind = _KINDS.get(message.reason)
    if kind is None:
        raise InvalidArgument("finish.reason", f"unknown value {message.reason}")
    matched = message.WhichOneof("matched")
    return Finish(
        kind,
        token_id=message.token_id if matched == "token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
    )


def layout_to_pb(layout: KvLayout) -> types_pb2.KvLayout:
    """Message of a layout."""
    return types_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        model_fingerprint=layout.model_fingerprint,
        wire_version=layout.wire_version,
        rope_digest=layout.rope_digest,
    )


def layout_from_pb(message: types_pb2.KvLayout) -> KvLayout:
    """Raises InvalidArgument for an unknown dtype or an empty shape."""
    if message.dtype not in DTYPE_BYTES:
        raise InvalidArgument("layout.dtype", f"{message.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    layout = KvLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
        model_fingerprint=message.model_fingerprint,
        wire_version=message.wire_version,
        rope_digest=message.rope_digest,
    )
    if layout.block_bytes == 0:
        raise InvalidArgument("layout", "a block has no bytes")
    return layout


def sampling_to_pb(sampling: SamplingParams) -> worker_pb2.EffectiveSampling:
    """Message of effective sampling parameters."""
    return worker_pb2.EffectiveSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        eos_token_ids=sampling.eos_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        num_top_logprobs=sampling.num_top_logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
        rules=None if sampling.rules == NO_RULES else _rules_to_pb(sampling.rules),
        grammar=sampling.grammar,
    )


def _rules_to_pb(rules: LogitRules) -> worker_pb2.LogitRules:
    return worker_pb2.LogitRules(
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        repetition_penalty=rules.repetition_penalty,
        bias=dict(rules.bias),
        allowed_token_ids=rules.allowed_token_ids,
        bad_words=[types_pb2.TokenIds(ids=ids) for ids in rules.bad_words],
    )


def _rules_from_pb(message: worker_pb2.LogitRules) -> LogitRules:
    """Raises InvalidArgument for rules that no sampler could apply."""
    numbers = (message.presence_penalty, message.frequency_penalty, message.repetition_penalty, *message.bias.values())
    if not all(map(math.isfinite, numbers)) or message.repetition_penalty <= 0:
        raise InvalidArgument("sampling.rules", "a penalty or bias is not finite, or repetition_penalty not above 0")
    if not all(word.ids for word in message.bad_words):
        raise InvalidArgument("sampling.rules.bad_words", "a word has no tokens")
    return LogitRules(
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        bias=tuple(sorted(message.bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
    )


def sampling_from_pb(message: worker_pb2.EffectiveSampling) -> SamplingParams:
    """Raises InvalidArgument when max_tokens is 0, or for rules that no sampler could apply."""
    if message.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1")
    if message.grammar and not message.eos_token_ids:
        raise InvalidArgument("sampling.grammar", "needs an end-of-sequence id")
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        eos_token_ids=tuple(message.eos_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs,
        num_top_logprobs=message.num_top_logprobs,
        logprob_token_ids=tuple(message.logprob_token_ids),
        rules=_rules_from_pb(message.rules) if message.HasField("rules") else NO_RULES,
        grammar=message.grammar,
    )


def logprob_to_pb(one: TokenLogprob) -> types_pb2.TokenLogprob:
    """Message of a token's log-probability and of its alternatives'."""
    top = [logprob_to_pb(other) for other in one.alternatives]
    return types_pb2.TokenLogprob(token_id=one.token_id, logprob=one.logprob, rank=one.rank, top=top)


def logprob_from_pb(message: types_pb2.TokenLogprob) -> TokenLogprob:
    """Alternatives have none of their own; raises InvalidArgument for what is no logarithm of a probability."""
    if not (math.isfinite(message.logprob) and message.logprob <= 0.0):
        raise InvalidArgument("logprob", f"{message.logprob} is no logarithm of a probability")
    top = tuple(TokenLogprob(other.token_id, other.logprob, other.rank) for other in message.top)
    return TokenLogprob(message.token_id, message.logprob, message.rank, top)


def prompt_logprobs_to_pb(token_index: int, logprobs: Iterable[TokenLogprob]) -> types_pb2.PromptLogprobs:
    """Message of the log-probabilities of prompt tokens, `token_index` being the place of the first."""
    return types_pb2.PromptLogprobs(token_index=token_index, logprobs=map(logprob_to_pb, logprobs))


def _scoring_from_pb(message: worker_pb2.PromptScoring) -> PromptScoring:
    """Raises InvalidArgument for a token that has no log-probability."""
    if message.first_index < 1:
        raise InvalidArgument("sequence.prompt_scoring.first_index", "must be at least 1")
    return PromptScoring(message.first_index, message.num_top_logprobs)


def beam_to_pb(beam: BeamParams) -> worker_pb2.BeamSpec:
    """Message of beam search parameters."""
    return worker_pb2.BeamSpec(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        num_returned=beam.num_returned,
    )


def beam_from_pb(message: worker_pb2.BeamSpec) -> BeamParams:
    """Raises InvalidArgument when more hypotheses are to be returned than there are beams."""
    if not 1 <= message.width <= MAX_CHOICES:
        raise InvalidArgument("sequence.beam.width", f"must be 1 … {MAX_CHOICES}, got {message.width}")
    if not math.isfinite(message.length_penalty):
        raise InvalidArgument("sequence.beam.length_penalty", f"{message.length_penalty} is not a finite number")
    if not 1 <= message.num_returned <= message.width:
        raise InvalidArgument("sequence.beam.num_returned", f"must be 1 … {message.width}, got {message.num_returned}")
    return BeamParams(
        width=message.width,
        length_penalty=message.length_penalty,
        early_stopping=message.early_stopping,
        num_returned=message.num_returned,
    )


def attempt_to_pb(attempt: AttemptId) -> worker_pb2.AttemptId:
    """Message of an attempt's identity."""
    return worker_pb2.AttemptId(request_id=attempt.request_id, attempt=attempt.attempt)


def attempt_from_pb(message: worker_pb2.AttemptId) -> AttemptId:
    """Raises InvalidArgument when a part is missing."""
    if not message.request_id or message.attempt < 1:
        raise InvalidArgument("id", "request_id and an attempt of at least 1 are needed")
    return AttemptId(message.request_id, message.attempt)


def spec_to_pb(spec: SequenceSpec) -> worker_pb2.SequenceSpec:
    """Message of a sequence for a worker."""
    return worker_pb2.SequenceSpec(
        id=attempt_to_pb(spec.id),
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=sampling_to_pb(spec.sampling),
        tier_rank=spec.tier_rank,
        deadline_unix_ms=spec.deadline_unix_ms,
        cache_salt=spec.cache_salt,
        adapter=spec.adapter,
        bypass_prefix_cache=spec.bypass_prefix_cache,
        choice=spec.choice,
        num_choices=spec.num_choices,
        beam=beam_to_pb(spec.beam) if spec.beam is not None else None,
        tenant=spec.tenant,
        shared_salt=spec.shared_salt,
        prompt_scoring=None
        if (scoring := spec.prompt_scoring) is None
        else worker_pb2.PromptScoring(first_index=scoring.first_index, num_top_logprobs=scoring.num_top_logprobs),
    )


def spec_from_pb(message: worker_pb2.SequenceSpec) -> SequenceSpec:
    """Raises InvalidArgument for missing tokens or a boundary beyond them."""
    if not message.token_ids:
        raise InvalidArgument("sequence.token_ids", "the prompt has no tokens")
    if not 1 <= message.num_prompt_tokens <= len(message.token_ids):
        raise InvalidArgument(
            "sequence.num_prompt_tokens", f"must be 1 … {len(message.token_ids)}, got {message.num_prompt_tokens}"
        )
    if message.num_choices > MAX_CHOICES:
        raise InvalidArgument("sequence.num_choices", f"must be at most {MAX_CHOICES}, got {message.num_choices}")
    if message.HasField("beam") and message.sampling.grammar:
        raise InvalidArgument("sequence.beam", "cannot be combined with sampling.grammar")
    return SequenceSpec(
        id=attempt_from_pb(message.id),
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_pb(message.sampling),
        tier_rank=message.tier_rank,
        deadline_unix_ms=message.deadline_unix_ms,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        bypass_prefix_cache=message.bypass_prefix_cache,
        choice=message.choice,
        num_choices=message.num_choices or 1,
        beam=beam_from_pb(message.beam) if message.HasField("beam") else None,
        tenant=message.tenant,
        shared_salt=message.shared_salt,
        prompt_scoring=_scoring_from_pb(message.prompt_scoring) if message.HasField("prompt_scoring") else None,
    )


def load_to_pb(
    stats: EngineStats, shipped: ShipCounters, *, num_waiting_grants: int = 0, moved: ShipCounters | None = None
) -> worker_pb2.WorkerLoad:
    """Message of a worker's figures; sequences and grants that wait are one number. On any thread.

    `moved`: what a decode worker shipped on.
    """
    memory, moved = stats.memory, moved or ShipCounters()
    return worker_pb2.WorkerLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting + num_waiting_grants,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_used_blocks=stats.num_used_blocks,
        num_steps=stats.num_steps,
        num_prefill_tokens=stats.num_prefill_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_sampled_tokens=stats.num_sampled_tokens,
        num_blocks_shipped=shipped.num_blocks,
        shipped_bytes=shipped.num_bytes,
        num_nacks=shipped.num_nacks,
        num_moved_sequences=moved.num_sequences,
        num_blocks_moved=moved.num_blocks,
        num_evictions=stats.num_evictions,
        num_recompute_preemptions=memory.num_recompute_preemptions,
        num_swap_preemptions=memory.num_swap_preemptions,
        num_parked_prompts=memory.num_parked_prompts,
        num_recomputed_tokens=memory.num_recomputed_tokens,
        num_blocks_swapped_out=memory.num_blocks_swapped_out,
        num_blocks_swapped_in=memory.num_blocks_swapped_in,
        num_blocks_copied=memory.num_blocks_copied,
        num_pinned_blocks=stats.num_pinned_blocks,
        num_integrity_faults=stats.num_integrity_faults,
        num_unsound_hits=stats.num_unsound_hits,
        max_running=stats.max_running,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        tenant_hits=[
            worker_pb2.TenantHits(
                tenant=tenant, num_queried_tokens=hits.num_queried_tokens, num_hit_tokens=hits.num_hit_tokens
            )
            for tenant, hits in memory.hits.copy().items()
        ],
    )


def memory_to_pb(snapshot: MemorySnapshot) -> cache_pb2.MemorySnapshot:
    """Message of a snapshot; tiers have their rank only."""
    counters = snapshot.counters
    num_blocks_swapped = counters.num_blocks_swapped_out + counters.num_blocks_swapped_in
    return cache_pb2.MemorySnapshot(
        num_blocks=snapshot.num_blocks,
        block_size=snapshot.block_size,
        block_bytes=snapshot.block_bytes,
        num_free_blocks=snapshot.num_free_blocks,
        num_cached_blocks=snapshot.num_cached_blocks,
        num_used_blocks=snapshot.num_used_blocks,
        num_pinned_blocks=snapshot.num_pinned_blocks,
        num_filled_slots=snapshot.num_filled_slots,
        num_tail_slots=snapshot.num_tail_slots,
        fragmentation=snapshot.fragmentation,
        ref_counts=snapshot.ref_counts,
        tenants=[_tenant_to_pb(tenant) for tenant in snapshot.tenants],
        tiers=[cache_pb2.TierMemory(rank=rank, num_used_blocks=n) for rank, n in snapshot.tier_blocks.items()],
        num_swap_blocks=snapshot.num_swap_blocks,
        num_used_swap_blocks=snapshot.num_used_swap_blocks,
        num_evictions=snapshot.num_evictions,
        num_recompute_preemptions=counters.num_recompute_preemptions,
        num_swap_preemptions=counters.num_swap_preemptions,
        num_parked_prompts=counters.num_parked_prompts,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_blocks_swapped_out=counters.num_blocks_swapped_out,
        num_blocks_swapped_in=counters.num_blocks_swapped_in,
        swapped_bytes=num_blocks_swapped * snapshot.block_bytes,
        swap_s=counters.swap_s,
        num_blocks_copied=counters.num_blocks_copied,
        num_prefix_waits=counters.num_prefix_waits,
    )


def _tenant_to_pb(tenant: TenantMemory) -> cache_pb2.TenantMemory:
    return cache_pb2.TenantMemory(
        tenant=tenant.tenant,
        num_used_blocks=tenant.num_used_blocks,
        num_cached_blocks=tenant.num_cached_blocks,
        num_pinned_blocks=tenant.num_pinned_blocks,
        max_used_blocks=tenant.max_used_blocks,
        max_cached_blocks=tenant.max_cached_blocks,
        num_queried_tokens=tenant.num_queried_tokens,
        num_hit_tokens=tenant.num_hit_tokens,
    )


def block_changes_to_pb(changes: BlockChanges) -> Iterator[worker_pb2.WatchBlocksResponse]:
    """Messages of changes, each of one kind and bounded, made one by one; epoch and number are the stream's to set."""
    if changes.is_reset:
        yield worker_pb2.WatchBlocksResponse(cleared=worker_pb2.BlocksCleared())
    for hashes in _parts(changes.removed):
        yield worker_pb2.WatchBlocksResponse(removed=worker_pb2.BlocksRemoved(block_hashes=hashes))
    for hashes in _parts(changes.stored):
        yield worker_pb2.WatchBlocksResponse(stored=worker_pb2.BlocksStored(block_hashes=hashes))


def _parts(hashes: Collection[bytes]) -> Iterator[list[bytes]]:
    rest = iter(hashes)
    while part := list(islice(rest, MAX_HASHES_PER_MESSAGE)):
        yield part


def numbered_changes_from_pb(message: worker_pb2.WatchBlocksResponse) -> NumberedChanges:
    """Raises InvalidArgument for an event that is unknown and for hashes of another length."""
    match message.WhichOneof("event"):
        case "stored":
            changes = BlockChanges(stored=_hashes("stored.block_hashes", message.stored.block_hashes))
        case "removed":
            changes = BlockChanges(removed=_hashes("removed.block_hashes", message.removed.block_hashes))
        case "cleared":
            changes = BlockChanges(is_reset=True)
        case _:
            raise InvalidArgument("event", "is not set, or unknown to this version")
    return NumberedChanges(message.epoch, message.sequence_number, changes)


def _hashes(field: str, found: Collection[bytes]) -> tuple[bytes, ...]:
    hashes = tuple(found)
    for one in hashes:
        if len(one) != HASH_BYTES:
            raise InvalidArgument(field, f"a hash has {HASH_BYTES} bytes, one here has {len(one)}")
    return hashes
