from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "grace_s", "force")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    grace_s: float
    force: bool
    def __init__(self, worker: _Optional[str] = ..., grace_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker", "role", "num_running", "grace_left_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GRACE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    num_running: int
    grace_left_s: float
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ..., num_running: _Optional[int] = ..., grace_left_s: _Optional[float] = ...) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ("worker", "role", "was_draining")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    was_draining: bool
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ..., was_draining: _Optional[bool] = ...) -> None: ...
