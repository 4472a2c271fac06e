from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("worker_id", "role", "address", "progress_timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    address: str
    progress_timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., progress_timeout_s: _Optional[float] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("state", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
