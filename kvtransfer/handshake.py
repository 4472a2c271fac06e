"""What two processes agree on before blocks travel between them: wire version, layout, transport. No sockets here.

    Hello (versions, layout, transports it can) ─► agree ─► Welcome (version, transport) or a refusal naming both values

The version spoken is the newer one that both know; each knows two. The package's version plays no part.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.config import TransferConfig
from kvferry.errors import FailedPrecondition
from kvferry.kv_layout import KV_WIRE_VERSION, OLDEST_WIRE_VERSION, KvLayout
from kvtransfer.frames import MAX_FRAME_BYTES
from kvtransfer.staging import SegmentName, can_share_memory, host_id


class Transport(enum.Enum):
    """How payloads of blocks travel; the values are those of the configuration."""

    GRPC = "grpc"
    SHARED_MEMORY = "shm"


@dataclass(frozen=True, slots=True)
class WireVersions:
    """The versions one side speaks."""

    oldest: int = OLDEST_WIRE_VERSION
    newest: int = KV_WIRE_VERSION

    def __str__(self) -> str:
        return f"{self.oldest} … {self.newest}"


@dataclass(frozen=True, slots=True)
class Hello:
    """Who the sender is and what it can.

    Attributes:
        transports: that it can use, best first.
        host_id: of the machine it runs on; memory is shared between equal, non-empty ones.
        max_frame_bytes: largest payload of a frame it will send.
        progress_timeout_s: the longest silence either side bears on this link.
        max_inflight_bytes: most payload it will have on its way to this receiver; 0 for no bound.
    """

    worker_id: str
    epoch: int
    versions: WireVersions
    layout: KvLayout
    transports: tuple[Transport, ...]
    host_id: str
    max_frame_bytes: int
    progress_timeout_s: float
    max_inflight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """What was agreed on; `segment` with shared memory only."""

    wire_version: int
    epoch: int
    link_id: int
    transport: Transport
    max_frame_bytes: int
    segment: SegmentName | None = None


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What one process is ready to agree on, as a sender or as a receiver.

    Attributes:
        transports: that it may use, best first.
        peer_bytes: most payload on its way between the pair, and the size of a staging segment.
        max_staging_bytes: a receiver's segments together; further senders use gRPC.
    """

    layout: KvLayout
    transports: tuple[Transport, ...] = (Transport.GRPC,)
    versions: WireVersions = WireVersions()
    host_id: str = ""
    max_frame_bytes: int = MAX_FRAME_BYTES
    peer_bytes: int = 16 << 20
    max_staging_bytes: int = 256 << 20

    def hello(self, worker_id: str, epoch: int, progress_timeout_s: float) -> Hello:
        """What a sender with these terms says of itself."""
        return Hello(
            worker_id,
            epoch,
            self.versions,
            self.layout,
            self.transports,
            self.host_id,
            self.max_frame_bytes,
            progress_timeout_s,
            self.peer_bytes,
        )


def transports_of(config: TransferConfig, *, can_share_memory: bool) -> tuple[Transport, ...]:
    """What the configuration allows, best first. Raises FailedPrecondition where it asks for what is not there."""
    if config.transport == "grpc":
        return (Transport.GRPC,)
    if config.transport == "shm":
        if not can_share_memory:
            raise FailedPrecondition("transfer.transport: shm needs Linux's memfd and /proc; use grpc or auto here")
        return (Transport.SHARED_MEMORY,)
    return (Transport.SHARED_MEMORY, Transport.GRPC) if can_share_memory else (Transport.GRPC,)


def terms_of(config: TransferConfig, layout: KvLayout) -> LinkTerms:
    """What a process with this configuration is ready to agree on."""
    return LinkTerms(
        layout=layout,
        transports=transports_of(config, can_share_memory=can_share_memory()),
        host_id=host_id(),
        max_frame_bytes=config.max_frame_bytes,
        peer_bytes=min(config.max_inflight_bytes_per_peer, config.max_inflight_bytes),
        max_staging_bytes=config.max_staging_bytes,
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """The receiver's answer before it sets memory aside."""

    wire_version: int
    transport: Transport
    max_frame_bytes: int


def agree(hello: Hello, terms: LinkTerms) -> Agreement:
    """What this receiver agrees on with that sender. Raises FailedPrecondition naming what does not go together."""
    wire_version = min(hello.versions.newest, terms.versions.newest)
    if wire_version < max(hello.versions.oldest, terms.versions.oldest):
        raise FailedPrecondition(
            f"wire version: {terms.versions} here, {hello.versions} there; workers may be one version apart",
            field="wire_version",
        )
    differences = terms.layout.differences(hello.layout)
    if differences:
        raise FailedPrecondition(f"another layout: {'; '.join(differences)}", field="layout")
    max_frame_bytes = min(hello.max_frame_bytes, terms.max_frame_bytes)
    return Agreement(wire_version, _best_transport(hello, terms), max_frame_bytes)


def _best_transport(hello: Hello, terms: LinkTerms) -> Transport:
    is_one_host = bool(hello.host_id) and hello.host_id == terms.host_id
    for transport in hello.transports:
        if transport in terms.transports and (is_one_host or transport is not Transport.SHARED_MEMORY):
            return transport
    receiver, sender = (", ".join(one.value for one in side) or "none" for side in (terms.transports, hello.transports))
    hosts = "" if is_one_host else "; shared memory needs one machine, these are two"
    raise FailedPrecondition(
        f"transfer.transport: {receiver} at the decode worker, {sender} at prefill worker {hello.worker_id}{hosts}; "
        "auto finds what both can",
        field="transfer.transport",
    )
