from proto.kvferry.v1 import types_pb2 as _types_pb2
from proto.kvferry.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_GRPC: Transport
TRANSPORT_SHARED_MEMORY: Transport

class LinkRequest(_message.Message):
    __slots__ = ("hello", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: _worker_pb2.Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "epoch", "min_wire_version", "max_wire_version", "layout", "transports", "host_id", "max_frame_bytes", "progress_timeout_s", "max_inflight_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIN_WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    min_wire_version: int
    max_wire_version: int
    layout: _types_pb2.KvLayout
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    host_id: str
    max_frame_bytes: int
    progress_timeout_s: float
    max_inflight_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., min_wire_version: _Optional[int] = ..., max_wire_version: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ..., host_id: _Optional[str] = ..., max_frame_bytes: _Optional[int] = ..., progress_timeout_s: _Optional[float] = ..., max_inflight_bytes: _Optional[int] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    heartbeat: _worker_pb2.Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("wire_version", "epoch", "link_id", "transport", "staging", "max_frame_bytes")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    epoch: int
    link_id: int
    transport: Transport
    staging: StagingSegment
    max_frame_bytes: int
    def __init__(self, wire_version: _Optional[int] = ..., epoch: _Optional[int] = ..., link_id: _Optional[int] = ..., transport: _Optional[_Union[Transport, str]] = ..., staging: _Optional[_Union[StagingSegment, _Mapping]] = ..., max_frame_bytes: _Optional[int] = ...) -> None: ...

class StagingSegment(_message.Message):
    __slots__ = ("pid", "fd", "num_bytes", "token")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    num_bytes: int
    token: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., num_bytes: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class ShipRequest(_message.Message):
    __slots__ = ("offer", "block", "commit", "heartbeat", "staged", "blocks")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    block: BlockFrame
    commit: Commit
    heartbeat: _worker_pb2.Heartbeat
    staged: StagedFrames
    blocks: _containers.RepeatedCompositeFieldContainer[BlockFrame]
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., block: _Optional[_Union[BlockFrame, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ..., staged: _Optional[_Union[StagedFrames, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockFrame, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("id", "receiver_epoch", "layout", "block_hashes", "num_tokens", "progress_timeout_s", "link_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    id: _worker_pb2.AttemptId
    receiver_epoch: int
    layout: _types_pb2.KvLayout
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_tokens: int
    progress_timeout_s: float
    link_id: int
    def __init__(self, id: _Optional[_Union[_worker_pb2.AttemptId, _Mapping]] = ..., receiver_epoch: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., num_tokens: _Optional[int] = ..., progress_timeout_s: _Optional[float] = ..., link_id: _Optional[int] = ...) -> None: ...

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

class StagedFrames(_message.Message):
    __slots__ = ("id", "frames")
    ID_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    id: _worker_pb2.AttemptId
    frames: _containers.RepeatedCompositeFieldContainer[StagedFrame]
    def __init__(self, id: _Optional[_Union[_worker_pb2.AttemptId, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[StagedFrame, _Mapping]]] = ...) -> None: ...

class StagedFrame(_message.Message):
    __slots__ = ("block_index", "offset", "staging_offset", "num_bytes", "digest", "num_tokens")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    offset: int
    staging_offset: int
    num_bytes: int
    digest: bytes
    num_tokens: int
    def __init__(self, block_index: _Optional[int] = ..., offset: _Optional[int] = ..., staging_offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("want", "nack", "commit_ack", "heartbeat", "credit")
    WANT_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_ACK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    want: Want
    nack: Nack
    commit_ack: CommitAck
    heartbeat: _worker_pb2.Heartbeat
    credit: Credit
    def __init__(self, want: _Optional[_Union[Want, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., commit_ack: _Optional[_Union[CommitAck, _Mapping]] = ..., heartbeat: _Optional[_Union[_worker_pb2.Heartbeat, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("num_frames",)
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    def __init__(self, num_frames: _Optional[int] = ...) -> None: ...

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
