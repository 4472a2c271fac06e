from proto.kvferry.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptId(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("id", "token_ids", "num_prompt_tokens", "sampling", "tier_rank", "deadline_unix_ms", "cache_salt", "adapter", "bypass_prefix_cache", "choice", "num_choices", "beam", "tenant", "shared_salt", "prompt_scoring")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIER_RANK_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARED_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORING_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: EffectiveSampling
    tier_rank: int
    deadline_unix_ms: int
    cache_salt: str
    adapter: str
    bypass_prefix_cache: bool
    choice: int
    num_choices: int
    beam: BeamSpec
    tenant: str
    shared_salt: str
    prompt_scoring: PromptScoring
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[EffectiveSampling, _Mapping]] = ..., tier_rank: _Optional[int] = ..., deadline_unix_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., bypass_prefix_cache: _Optional[bool] = ..., choice: _Optional[int] = ..., num_choices: _Optional[int] = ..., beam: _Optional[_Union[BeamSpec, _Mapping]] = ..., tenant: _Optional[str] = ..., shared_salt: _Optional[str] = ..., prompt_scoring: _Optional[_Union[PromptScoring, _Mapping]] = ...) -> None: ...

class PromptScoring(_message.Message):
    __slots__ = ("first_index", "num_top_logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    num_top_logprobs: int
    def __init__(self, first_index: _Optional[int] = ..., num_top_logprobs: _Optional[int] = ...) -> None: ...

class BeamSpec(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping", "num_returned")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    NUM_RETURNED_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: bool
    num_returned: int
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ..., num_returned: _Optional[int] = ...) -> None: ...

class EffectiveSampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "ignore_eos", "eos_token_ids", "stop_token_ids", "logprobs", "rules", "num_top_logprobs", "logprob_token_ids", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    ignore_eos: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bool
    rules: LogitRules
    num_top_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bool] = ..., rules: _Optional[_Union[LogitRules, _Mapping]] = ..., num_top_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ...) -> None: ...

class LogitRules(_message.Message):
    __slots__ = ("presence_penalty", "frequency_penalty", "repetition_penalty", "bias", "allowed_token_ids", "bad_words")
    class BiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenIds]
    def __init__(self, presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[_types_pb2.TokenIds, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("progress_timeout_s",)
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    progress_timeout_s: float
    def __init__(self, progress_timeout_s: _Optional[float] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("worker_id", "role", "pid", "epoch", "capabilities", "draining", "load", "sequence_fields")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    pid: int
    epoch: int
    capabilities: _types_pb2.Capabilities
    draining: bool
    load: WorkerLoad
    sequence_fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., capabilities: _Optional[_Union[_types_pb2.Capabilities, _Mapping]] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., sequence_fields: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_running", "grace_left_s")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GRACE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    grace_left_s: float
    def __init__(self, num_running: _Optional[int] = ..., grace_left_s: _Optional[float] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("was_draining",)
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    was_draining: bool
    def __init__(self, was_draining: _Optional[bool] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchBlocksResponse(_message.Message):
    __slots__ = ("epoch", "sequence_number", "stored", "removed", "cleared")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence_number: int
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: BlocksCleared
    def __init__(self, epoch: _Optional[int] = ..., sequence_number: _Optional[int] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[BlocksCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_used_blocks", "num_steps", "num_prefill_tokens", "num_cached_tokens", "num_sampled_tokens", "num_blocks_shipped", "shipped_bytes", "num_nacks", "num_evictions", "num_recompute_preemptions", "num_swap_preemptions", "num_recomputed_tokens", "num_blocks_swapped_out", "num_blocks_swapped_in", "num_blocks_copied", "num_pinned_blocks", "tenant_hits", "num_integrity_faults", "num_unsound_hits", "max_running", "num_parked_prompts", "num_moved_sequences", "num_blocks_moved", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SHIPPED_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_NACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTE_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_COPIED_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_INTEGRITY_FAULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSOUND_HITS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_MOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_steps: int
    num_prefill_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int
    num_blocks_shipped: int
    shipped_bytes: int
    num_nacks: int
    num_evictions: int
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_recomputed_tokens: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_blocks_copied: int
    num_pinned_blocks: int
    tenant_hits: _containers.RepeatedCompositeFieldContainer[TenantHits]
    num_integrity_faults: int
    num_unsound_hits: int
    max_running: int
    num_parked_prompts: int
    num_moved_sequences: int
    num_blocks_moved: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., num_blocks_shipped: _Optional[int] = ..., shipped_bytes: _Optional[int] = ..., num_nacks: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_recompute_preemptions: _Optional[int] = ..., num_swap_preemptions: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_blocks_swapped_out: _Optional[int] = ..., num_blocks_swapped_in: _Optional[int] = ..., num_blocks_copied: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., tenant_hits: _Optional[_Iterable[_Union[TenantHits, _Mapping]]] = ..., num_integrity_faults: _Optional[int] = ..., num_unsound_hits: _Optional[int] = ..., max_running: _Optional[int] = ..., num_parked_prompts: _Optional[int] = ..., num_moved_sequences: _Optional[int] = ..., num_blocks_moved: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class TenantHits(_message.Message):
    __slots__ = ("tenant", "num_queried_tokens", "num_hit_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_queried_tokens: int
    num_hit_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_queried_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "target", "progress_timeout_s")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    target: ShipTarget
    progress_timeout_s: float
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., target: _Optional[_Union[ShipTarget, _Mapping]] = ..., progress_timeout_s: _Optional[float] = ...) -> None: ...

class ShipTarget(_message.Message):
    __slots__ = ("address", "epoch")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    address: str
    epoch: int
    def __init__(self, address: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("progress", "first_token", "done", "prompt_computed", "prompt_logprobs")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    progress: PrefillProgress
    first_token: FirstToken
    done: PrefillDone
    prompt_computed: PromptComputed
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., prompt_computed: _Optional[_Union[PromptComputed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class PromptComputed(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_s", "prefill_s")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("num_computed_tokens",)
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_computed_tokens: int
    def __init__(self, num_computed_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "token_index", "finish", "num_cached_tokens", "queue_s", "prefill_s", "choice", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    token_index: int
    finish: _types_pb2.Finish
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    choice: int
    logprob: _types_pb2.TokenLogprob
    def __init__(self, token_id: _Optional[int] = ..., token_index: _Optional[int] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., choice: _Optional[int] = ..., logprob: _Optional[_Union[_types_pb2.TokenLogprob, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("num_blocks_shipped", "num_blocks_reused", "shipped_bytes", "ship_s", "num_nacks")
    NUM_BLOCKS_SHIPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_REUSED_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHIP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_NACKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks_shipped: int
    num_blocks_reused: int
    shipped_bytes: int
    ship_s: float
    num_nacks: int
    def __init__(self, num_blocks_shipped: _Optional[int] = ..., num_blocks_reused: _Optional[int] = ..., shipped_bytes: _Optional[int] = ..., ship_s: _Optional[float] = ..., num_nacks: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("start", "stop", "heartbeat")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    start: DecodeStart
    stop: DecodeStop
    heartbeat: Heartbeat
    def __init__(self, start: _Optional[_Union[DecodeStart, _Mapping]] = ..., stop: _Optional[_Union[DecodeStop, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("sequence", "local_prefill", "progress_timeout_s", "min_moved_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MIN_MOVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    local_prefill: bool
    progress_timeout_s: float
    min_moved_tokens: int
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., local_prefill: _Optional[bool] = ..., progress_timeout_s: _Optional[float] = ..., min_moved_tokens: _Optional[int] = ...) -> None: ...

class DecodeStop(_message.Message):
    __slots__ = ("num_wanted_tokens", "choice")
    NUM_WANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    num_wanted_tokens: int
    choice: int
    def __init__(self, num_wanted_tokens: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("registered", "committed", "tokens", "heartbeat", "beams", "prompt_logprobs")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    committed: Committed
    tokens: DecodeTokens
    heartbeat: Heartbeat
    beams: Beams
    prompt_logprobs: _types_pb2.PromptLogprobs
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., tokens: _Optional[_Union[DecodeTokens, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., beams: _Optional[_Union[Beams, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("epoch", "ship_address", "keeps_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHIP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ship_address: str
    keeps_blocks: bool
    def __init__(self, epoch: _Optional[int] = ..., ship_address: _Optional[str] = ..., keeps_blocks: _Optional[bool] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("attempt", "num_cached_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    num_cached_tokens: int
    def __init__(self, attempt: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeTokens(_message.Message):
    __slots__ = ("token_index", "token_ids", "finish", "num_cached_tokens", "queue_s", "prefill_s", "choice", "logprobs")
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _types_pb2.Finish
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprob]
    def __init__(self, token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Beams(_message.Message):
    __slots__ = ("beams", "num_cached_tokens", "queue_s", "prefill_s")
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    beams: _containers.RepeatedCompositeFieldContainer[Beam]
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    def __init__(self, beams: _Optional[_Iterable[_Union[Beam, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class Beam(_message.Message):
    __slots__ = ("token_ids", "finish", "cumulative_logprob", "score")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _types_pb2.Finish
    cumulative_logprob: float
    score: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...
