"""One worker as the router sees it: where it is, what it said last, and whether requests may go there."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import InvalidArgument
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel
from kvferry.sequence_fields import FIRST_FIELDS
from kvferry.wire import layout_from_pb
from proto.kvferry.v1 import inference_pb2, worker_pb2
from router.auth import without_places
from router.block_index import BlockIndex, KnownBlocks
from router.breaker import Breaker


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class MemberState(enum.Enum):
    """Whether requests may go to a worker, as `ListWorkers` shows it."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all workers of a deployment agree on."""

    model: str
    vocab_size: int
    layout: KvLayout

    def differences(self, other: ServedModel) -> tuple[str, ...]:
        """One line for each value that differs, naming both."""
        own = (("model", self.model, other.model), ("vocab_size", self.vocab_size, other.vocab_size))
        lines = [f"{name}: {here} here, {there} there" for name, here, there in own if here != there]
        return (*lines, *self.layout.differences(other.layout))


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker said last, checked.

    Attributes:
        worker_id: its name.
        role: `prefill` or `decode`.
        epoch: life of its process.
        served: what it serves.
        max_context: most tokens of one of its sequences.
        load: load and counters since its start.
        sequence_fields: fields of a sequence that it knows (`kvferry/sequence_fields.py`).
    """

    worker_id: str
    role: Role
    pid: int
    epoch: int
    served: ServedModel
    model_path: str
    version: str
    max_context: int
    draining: bool
    load: worker_pb2.WorkerLoad
    sequence_fields: frozenset[str]

    @classmethod
    def from_pb(cls, message: worker_pb2.WatchResponse) -> WorkerStatus:
        """Raises InvalidArgument for a role or layout that cannot be."""
        roles = {role.value: role for role in Role}
        if message.role not in roles:
            raise InvalidArgument("role", f"{message.role!r} is not one of {', '.join(roles)}")
        offered = message.capabilities
        return cls(
            worker_id=message.worker_id,
            role=roles[message.role],
            pid=message.pid,
            epoch=message.epoch,
            served=ServedModel(offered.model, offered.vocab_size, layout_from_pb(offered.layout)),
            model_path=offered.model_path,
            version=offered.version,
            max_context=offered.max_context,
            draining=message.draining,
            load=message.load,
            sequence_fields=frozenset(message.sequence_fields) or FIRST_FIELDS,
        )


NOT_REACHED = "not reached yet"
"""Reason of a worker that has not answered since the router began."""


class Worker:
    """One worker: its channel, its state, and the requests this router runs there.

    Attributes:
        address: host:port it is reached at; with the role its key in this router.
        role: what it is listed as.
        channel: carries requests; traced.
        blocks: knows the blocks of all workers by address.
        num_requests: attempts of this router that hold a call there.
        status: what it said last, None until it said something.
        was_accepted: that status fits the deployment.
        breaker: whether its last calls failed; a new life begins with a closed one.
    """

    def __init__(self, address: str, role: Role, channel: RpcChannel, blocks: BlockIndex) -> None:
        self.address = address
        self.role = role
        self.channel = channel
        self.blocks = blocks
        self.num_requests = 0
        self.state = MemberState.CONNECTING
        self.reason = NOT_REACHED
        self.status: WorkerStatus | None = None
        self.was_accepted = False
        self.breaker = Breaker()
        self._released = asyncio.Event()

    @property
    def name(self) -> str:
        """Its own name for people, its address until it told one."""
        return self.status.worker_id if self.status is not None and self.status.worker_id else self.address

    @property
    def public_name(self) -> str:
        """Its own name, its role until it told one: never where it runs."""
        return self.name if self.name != self.address else self.role.value

    @property
    def model(self) -> str:
        """Name of the model it serves; empty until it told."""
        return self.status.served.model if self.status is not None else ""

    @property
    def load(self) -> int:
        """How busy it is: what this router runs there and what it reports itself."""
        reported = self.status.load.num_running + self.status.load.num_waiting if self.status is not None else 0
        return self.num_requests + reported

    @property
    def num_blocks(self) -> int:
        return self.status.load.num_blocks if self.status is not None else 0

    @property
    def max_running(self) -> int:
        """Places in its batch; 0 where it has not said."""
        return self.status.load.max_running if self.status is not None else 0

    @property
    def sequence_fields(self) -> frozenset[str]:
        """Fields of a sequence that it knows; none until it told."""
        return self.status.sequence_fields if self.status is not None else frozenset()

    @property
    def known_blocks(self) -> KnownBlocks:
        """What the router knows of its prefix cache."""
        return self.blocks.known(self.address)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Counts one attempt as running there for the length of the block."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._released.set()

    async def unused(self) -> None:
        """Returns once no attempt runs there."""
        while self.num_requests:
            self._released.clear()
            await self._released.wait()

    def to_pb(self, *, shows_place: bool = True) -> inference_pb2.WorkerInfo:
        """The worker as `ListWorkers` shows it; without `shows_place` lacking process id, address and known blocks."""
        info = inference_pb2.WorkerInfo(
            id=self.name if shows_place else self.public_name,
            role=self.role.value,
            address=self.address if shows_place else "",
            state=self.state.value,
            reason=self.reason if shows_place else without_places(self.reason),
            num_requests=self.num_requests,
            model=self.model,
        )
        if self.status is not None and self.state is not MemberState.CONNECTING:
            load = self.status.load
            info.pid = self.status.pid if shows_place else 0
            info.num_blocks = load.num_blocks
            info.num_available_blocks = load.num_free_blocks + load.num_cached_blocks
            info.num_known_blocks = self.known_blocks.num_blocks if shows_place else 0
        return info
