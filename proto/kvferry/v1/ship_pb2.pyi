from proto.kvferry.v1 import types_pb2 as _types_pb2
from proto.kvferry.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShipRequest(_message.Message):
    __slots__ = ("offer", "block", "commit", "heartbeat")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    block: BlockFrame
    commit: Commit
    heartbeat: _worker_pb2.Heartbeat
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., block: _Optional[_Union[BlockFrame, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("id", "receiver_epoch", "layout", "block_hashes", "num_tokens", "progress_timeout_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    id: _worker_pb2.AttemptId
    receiver_epoch: int
    layout: _types_pb2.KvLayout
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_tokens: int
    progress_timeout_s: float
    def __init__(self, id: _Optional[_Union[_worker_pb2.AttemptId, _Mapping]] = ..., receiver_epoch: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., num_tokens: _Optional[int] = ..., progress_timeout_s: _Optional[float] = ...) -> None: ...

class BlockFrame(_message.Message):
    __slots__ = ("id", "block_index", "offset", "payload", "digest", "num_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: _worker_pb2.AttemptId
    block_index: int
    offset: int
    payload: bytes
    digest: bytes
    num_tokens: int
    def __init__(self, id: _Optional[_Union[_worker_pb2.AttemptId, _Mapping]] = ..., block_index: _Optional[int] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("id", "first_token_ids", "first_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: _worker_pb2.AttemptId
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[_Union[_worker_pb2.AttemptId, _Mapping]] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., first_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ShipResponse(_message.Message):
    __slots__ = ("want", "nack", "commit_ack", "heartbeat")
    WANT_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    want: Want
    nack: Nack
    commit_ack: CommitAck
    heartbeat: _worker_pb2.Heartbeat
    def __init__(self, want: _Optional[_Union[Want, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., commit_ack: _Optional[_Union[CommitAck, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("block_indices",)
    BLOCK_INDICES_FIELD_NUMBER: _ClassVar[int]
    block_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("block_index",)
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    def __init__(self, block_index: _Optional[int] = ...) -> None: ...

class CommitAck(_message.Message):
    __slots__ = ("already_committed",)
    ALREADY_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    already_committed: bool
    def __init__(self, already_committed: _Optional[bool] = ...) -> None: ...
