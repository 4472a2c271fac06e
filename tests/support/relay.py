"""A TCP relay that stands in one hop of a deployment and misbehaves on command: client, router, prefill or decode side.

    async with Relay() as relay:
        relay.forward_to(worker_address)        # peers are told `relay.address` (`--advertise`, the router's lists)
        relay.delay(0.2)                        # … throttle, hold, drop, cut, refuse; `pass_on` ends them all

bytes read at one end ─► held until they are due ─► written at the other end, in the same order

It runs in the test's own event loop: what a method did is done when it returns, and nothing in it is random. Each
direction has its own conduct, the same for every connection. A connection that lost bytes (`drop`) stays silent until
one of its ends goes away, also after `pass_on`, because nothing that came later could be understood; those that are
opened afterwards pass. On leaving the block all connections are cut.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
MAX_HELD_CHUNKS = 64
"""Of one direction of one connection: 4 MiB are under way on a slow line, as in a network; then the sender waits."""
THROTTLED_PIECES_PER_S = 50
"""A throttled line writes this often, so that it is slow and not jerky."""
BACKLOG = 64
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 seconds: closing sends RST, as a host that has gone does, instead of an orderly end."""


class Direction(enum.Enum):
    """Which way bytes go: to the address the relay stands in front of, or back."""

    TO_TARGET = enum.auto()
    FROM_TARGET = enum.auto()


BOTH = tuple(Direction)


@dataclass(frozen=True, slots=True)
class Conduct:
    """What happens to the bytes of one direction.

    Attributes:
        delay_s: how late they arrive.
        bytes_per_s: how many get through each connection; None for all.
        holds: none get through now, all of them later.
        drops: none get through, and they are lost.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    holds: bool = False
    drops: bool = False


class Relay:
    """Forwards every connection to the address given to `forward_to`; use it as `async with`."""

    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._conducts = dict.fromkeys(Direction, Conduct())
        self._changed = asyncio.Event()
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._num_read, self._num_passed = dict.fromkeys(Direction, 0), dict.fromkeys(Direction, 0)
        self._place = _bound_socket(0)  # keeps the port while nobody listens, so that connections are refused there
        self._port = int(self._place.getsockname()[1])
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        await self.cut()
        self._place.close()

    @property
    def address(self) -> str:
        """host:port where peers reach it."""
        return f"{HOST}:{self._port}"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def num_passed_bytes(self, direction: Direction) -> int:
        """How many got through so far."""
        return self._num_passed[direction]

    def num_read_bytes(self, direction: Direction) -> int:
        """How many came here so far, whatever became of them."""
        return self._num_read[direction]

    # --- what a test asks for ---

    def forward_to(self, address: str) -> None:
        """Where new connections lead; those before are reset."""
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))

    def delay(self, delay_s: float, *directions: Direction) -> None:
        """Bytes arrive this much later, in both directions unless some are named."""
        self._change(directions, delay_s=delay_s)

    def throttle(self, bytes_per_s: float, *directions: Direction) -> None:
        """So many bytes get through each connection."""
        self._change(directions, bytes_per_s=bytes_per_s)

    def hold(self, *directions: Direction) -> None:
        """Nothing gets through until `pass_on`, then everything: a network that was parted for a while."""
        self._change(directions, holds=True)

    def drop(self, *directions: Direction) -> None:
        """All bytes are lost from now on, ends of connections included: half-open."""
        self._change(directions, drops=True)

    async def cut(self) -> None:
        """Resets all connections at both ends."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refuse(self) -> None:
        """New connections are refused, as where nobody listens; those that are open stay."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None

    def pass_on(self) -> None:
        """Everything passes at once again, what was held included, and new connections are taken."""
        self._change((), delay_s=0.0, bytes_per_s=None, holds=False, drops=False)
        if self._accepting is None:
            self._accept()

    # --- what connections ask for ---

    def _change(self, directions: tuple[Direction, ...], **values: float | bool | None) -> None:
        for direction in directions or BOTH:
            self._conducts[direction] = dataclasses.replace(self._conducts[direction], **values)  # type: ignore[arg-type]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def conduct(self, direction: Direction) -> Conduct:
        return self._conducts[direction]

    async def wait_changed(self, timeout_s: float | None) -> None:
        """Returns at the next change of any conduct, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def count_read(self, direction: Direction, num_bytes: int) -> None:
        self._num_read[direction] += num_bytes

    def count(self, direction: Direction, num_bytes: int) -> None:
        self._num_passed[direction] += num_bytes

    def _accept(self) -> None:
        listener = _bound_socket(self._port)
        listener.listen(BACKLOG)  # here, so that peers get through from now on
        self._accepting = asyncio.create_task(self._accept_from(listener))
        self._accepting.add_done_callback(lambda _: listener.close())

    async def _accept_from(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(_Connection(self, peer).run(self._target))
            self._connections[task] = peer
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()  # also where it was cut before it began


class _Connection:
    """One connection and the one it leads to, until both directions have ended or one of them broke."""

    def __init__(self, relay: Relay, peer: socket.socket) -> None:
        self._relay = relay
        self._peer = peer

    async def run(self, target: tuple[str, int] | None) -> None:
        peer = self._peer
        with _stream_socket() as other, peer:
            is_orderly = False
            try:
                if target is None:
                    return
                await asyncio.get_running_loop().sock_connect(other, target)
                async with asyncio.TaskGroup() as group:
                    for way in (
                        _Way(self._relay, Direction.TO_TARGET, peer, other),
                        _Way(self._relay, Direction.FROM_TARGET, other, peer),
                    ):
                        group.create_task(way.read())
                        group.create_task(way.write())
                is_orderly = True
            except* OSError:
                pass  # one end is gone or refuses: so is the other, below
            finally:
                if not is_orderly:
                    for end in (peer, other):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)


class _Way:
    """One direction of one connection."""

    def __init__(self, relay: Relay, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        self._relay = relay
        self._direction = direction
        self._source, self._sink = source, sink
        self._held = asyncio.Queue[tuple[float, bytes]](MAX_HELD_CHUNKS)  # when it was read, and what; empty: the end
        self._is_lossy = False

    @property
    def _conduct(self) -> Conduct:
        return self._relay.conduct(self._direction)

    async def read(self) -> None:
        """Takes everything up to the end; an end that comes as a reset breaks the connection, unless it is lost."""
        loop = asyncio.get_running_loop()
        data = b" "
        while data:
            try:
                data = await loop.sock_recv(self._source, CHUNK_BYTES)
            except ConnectionError:
                if not self._is_lossy and not self._conduct.drops:
                    raise
                data = b""
            self._relay.count_read(self._direction, len(data))
            await self._held.put((loop.time(), data))

    async def write(self) -> None:
        """Gives on what is due up to the end; a direction that lost bytes gives on nothing more, not even its end."""
        while True:
            read_s, data = await self._held.get()
            await self._give_on(read_s, data)
            if not data:
                if not self._is_lossy:
                    self._sink.shutdown(socket.SHUT_WR)
                return

    async def _due(self, read_s: float) -> None:
        """Waits as long as the conduct wants it, which may change meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            conduct = self._conduct
            rest_s = read_s + conduct.delay_s - loop.time()
            if conduct.drops or (rest_s <= 0 and not conduct.holds):
                return
            await self._relay.wait_changed(None if conduct.holds else rest_s)

    async def _give_on(self, read_s: float, data: bytes) -> None:
        loop, rest = asyncio.get_running_loop(), memoryview(data)
        while True:
            await self._due(read_s)
            self._is_lossy = self._is_lossy or self._conduct.drops
            if self._is_lossy or not rest:
                return
            rate = self._conduct.bytes_per_s
            num_bytes = len(rest) if rate is None else max(1, int(rate / THROTTLED_PIECES_PER_S))
            piece, rest = rest[:num_bytes], rest[num_bytes:]
            await loop.sock_sendall(self._sink, piece)
            self._relay.count(self._direction, len(piece))
            if rate is not None:
                await self._relay.wait_changed(len(piece) / rate)


def _stream_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _bound_socket(port: int) -> socket.socket:
    """A socket at this port (0 for any), which several of ours may be bound to and at most one listens at."""
    made = _stream_socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((HOST, port))
    return made
