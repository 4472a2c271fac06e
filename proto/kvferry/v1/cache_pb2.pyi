from proto.kvferry.v1 import inference_pb2 as _inference_pb2
from proto.kvferry.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetMemoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMemoryResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerMemory]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerMemory, _Mapping]]] = ...) -> None: ...

class WorkerMemory(_message.Message):
    __slots__ = ("worker", "role", "address", "error", "memory")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    address: str
    error: str
    memory: MemorySnapshot
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., error: _Optional[str] = ..., memory: _Optional[_Union[MemorySnapshot, _Mapping]] = ...) -> None: ...

class MemorySnapshot(_message.Message):
    __slots__ = ("num_blocks", "block_size", "block_bytes", "num_free_blocks", "num_cached_blocks", "num_used_blocks", "num_pinned_blocks", "num_filled_slots", "num_tail_slots", "fragmentation", "ref_counts", "tenants", "tiers", "num_swap_blocks", "num_used_swap_blocks", "num_evictions", "num_recompute_preemptions", "num_swap_preemptions", "num_recomputed_tokens", "num_blocks_swapped_out", "num_blocks_swapped_in", "swapped_bytes", "swap_s", "num_blocks_copied", "num_prefix_waits", "num_parked_prompts")
    class RefCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FILLED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAIL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTE_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_COPIED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_WAITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    block_bytes: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_pinned_blocks: int
    num_filled_slots: int
    num_tail_slots: int
    fragmentation: float
    ref_counts: _containers.ScalarMap[int, int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantMemory]
    tiers: _containers.RepeatedCompositeFieldContainer[TierMemory]
    num_swap_blocks: int
    num_used_swap_blocks: int
    num_evictions: int
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_recomputed_tokens: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    swapped_bytes: int
    swap_s: float
    num_blocks_copied: int
    num_prefix_waits: int
    num_parked_prompts: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_filled_slots: _Optional[int] = ..., num_tail_slots: _Optional[int] = ..., fragmentation: _Optional[float] = ..., ref_counts: _Optional[_Mapping[int, int]] = ..., tenants: _Optional[_Iterable[_Union[TenantMemory, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierMemory, _Mapping]]] = ..., num_swap_blocks: _Optional[int] = ..., num_used_swap_blocks: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_recompute_preemptions: _Optional[int] = ..., num_swap_preemptions: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_blocks_swapped_out: _Optional[int] = ..., num_blocks_swapped_in: _Optional[int] = ..., swapped_bytes: _Optional[int] = ..., swap_s: _Optional[float] = ..., num_blocks_copied: _Optional[int] = ..., num_prefix_waits: _Optional[int] = ..., num_parked_prompts: _Optional[int] = ...) -> None: ...

class TenantMemory(_message.Message):
    __slots__ = ("tenant", "num_used_blocks", "num_cached_blocks", "num_pinned_blocks", "max_used_blocks", "max_cached_blocks", "num_queried_tokens", "num_hit_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_used_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    max_used_blocks: int
    max_cached_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., max_used_blocks: _Optional[int] = ..., max_cached_blocks: _Optional[int] = ..., num_queried_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ...) -> None: ...

class TierMemory(_message.Message):
    __slots__ = ("rank", "tier", "num_used_blocks")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    tier: str
    num_used_blocks: int
    def __init__(self, rank: _Optional[int] = ..., tier: _Optional[str] = ..., num_used_blocks: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerBlocks]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerBlocks, _Mapping]]] = ...) -> None: ...

class WorkerBlocks(_message.Message):
    __slots__ = ("worker", "role", "address", "error", "num_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    address: str
    error: str
    num_blocks: int
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., error: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("name", "text", "token_ids", "chat", "adapter", "cache", "tenant", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    token_ids: _types_pb2.TokenIds
    chat: _inference_pb2.Chat
    adapter: str
    cache: _inference_pb2.CacheOptions
    tenant: str
    model: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_inference_pb2.Chat, _Mapping]] = ..., adapter: _Optional[str] = ..., cache: _Optional[_Union[_inference_pb2.CacheOptions, _Mapping]] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("num_tokens", "num_full_blocks", "workers")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_full_blocks: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerBlocks]
    def __init__(self, num_tokens: _Optional[int] = ..., num_full_blocks: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerBlocks, _Mapping]]] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("name", "tenant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerBlocks]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerBlocks, _Mapping]]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("memory",)
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory: MemorySnapshot
    def __init__(self, memory: _Optional[_Union[MemorySnapshot, _Mapping]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "tenant", "token_ids", "adapter", "cache_salt", "shared_salt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SHARED_SALT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: str
    cache_salt: str
    shared_salt: str
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., shared_salt: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name", "tenant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
