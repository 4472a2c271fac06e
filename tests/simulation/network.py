"""Processes that crash and freeze, and the streams between them: FIFO each way, with random delay, until they break.

    connect ─► (delay) ─► accept at whatever lives at the address then
    send ─► (delay, never overtaking) ─► on_message         close ─► on_end at the peer, behind what was sent
    break: both ends learn, at different times, or one only by the silence of the other

Heartbeats are not sent one by one. A frozen process is silent, so whoever waits for it gives up once the progress
timeout has passed; that is the same, and costs one event instead of thousands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import KvferryError, Unavailable
from tests.simulation.world import MS, World

PROGRESS_TIMEOUT_NS = 150 * MS
"""Silence after which a peer counts as dead; far above any delay of the network."""


class StreamHandler(Protocol):
    """What one end of a stream does with what arrives; nothing comes after `on_end`."""

    def on_message(self, message: object) -> None: ...

    def on_end(self, error: KvferryError | None) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """How often streams suffer.

    Attributes:
        break_probability: that a stream breaks some time after it was opened.
        slow_probability: that one message is much later than others.
    """

    break_probability: float = 0.0
    slow_probability: float = 0.0


class Life:
    """One life of one process: until it crashes. While it is frozen nothing happens in it, and nothing is lost."""

    def __init__(self, world: World, name: str, epoch: int) -> None:
        self.world = world
        self.name = name
        self.epoch = epoch
        self.is_alive = True
        self.is_frozen = False
        self.num_freezes = 0
        self.ends: dict[End, None] = {}  # open ends of streams; a dict, because its order is the same every time
        self._frozen_at_ns = 0
        self._deferred: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()

    def run(self, call: Callable[..., object], *args: object) -> None:
        """Calls now, after the thaw, or never."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._deferred.append((call, args))
        else:
            call(*args)

    def after(self, delay_ns: int, call: Callable[..., object], *args: object) -> None:
        self.world.after(delay_ns, self.run, call, *args)

    def freeze(self) -> None:
        self.is_frozen = True
        self.num_freezes += 1
        self._frozen_at_ns = self.world.now_ns
        for end in list(self.ends):
            if end.is_heard:
                end.peer.wait_for(self)

    def thaw(self) -> None:
        """Wakes up: own deadlines that passed may come before the messages that piled up, or after."""
        if not self.is_alive:
            return
        self.is_frozen = False
        if self.world.now_ns - self._frozen_at_ns > PROGRESS_TIMEOUT_NS:
            for end in list(self.ends):
                if end.peer.is_heard and self.world.happens(0.5):
                    end.give_up()
        while self._deferred and self.is_alive:
            call, args = self._deferred.popleft()
            call(*args)

    def crash(self, *, is_noticed: bool) -> None:
        """Ends for good. Peers learn by a reset, or only by the silence."""
        self.is_alive = False
        self._deferred.clear()
        for end in list(self.ends):
            low, high = (0.0, 5 * MS) if is_noticed else (0.67 * PROGRESS_TIMEOUT_NS, PROGRESS_TIMEOUT_NS)
            end.peer.lose(self.world.between(low, high), f"{self.name} is gone")
        self.ends.clear()


class End:
    """One end of a stream, owned by one life.

    Attributes:
        tag: the attempt the stream serves.
        is_heard: whether this end sends heartbeats, so that its peer notices when they stop.
    """

    peer: End

    def __init__(self, network: Network, tag: str, *, is_heard: bool) -> None:
        self.tag = tag
        self.life: Life | None = None
        self.handler: StreamHandler | None = None
        self.is_closed = False
        self.is_heard = is_heard
        self._network = network
        self._is_cut = False  # what is sent from here gets nowhere
        self._num_losses = 0  # messages on their way to here from before the last loss never arrive
        self._clear_at_ns = 0  # when the last message sent from here arrives

    def attach(self, life: Life, handler: StreamHandler | None) -> None:
        self.life = life
        self.handler = handler
        life.ends[self] = None

    def send(self, message: object) -> None:
        """Sends a message; into the void when the stream is over."""
        if not self.is_closed:
            self._post(self.peer._receive, message)

    def close(self, error: KvferryError | None = None, *, is_abrupt: bool = False) -> None:
        """Ends the stream from here. Abruptly: what is on its way may be lost, as with a cancelled call."""
        if self.is_closed:
            return
        self._shut()
        if is_abrupt and self._network.world.happens(0.5):
            self.peer._num_losses += 1
        self._post(self.peer._receive_end, error)

    def blame(self, why: str) -> None:
        """A fault touches the attempt that it serves."""
        self._network.blame(self.tag, why)

    def give_up(self) -> None:
        """The peer was silent for too long."""
        if not self.is_closed:
            self.close(Unavailable("the peer gave up"), is_abrupt=True)
            self._tell(Unavailable("no progress for the progress timeout"))

    def wait_for(self, silent: Life) -> None:
        """Gives up unless `silent` wakes up in time."""
        delay_ns = self._network.world.between(0.67 * PROGRESS_TIMEOUT_NS, PROGRESS_TIMEOUT_NS)
        self._network.world.after(delay_ns, self._on_deadline, silent, silent.num_freezes)

    def lose(self, delay_ns: int, reason: str) -> None:
        """This end learns after `delay_ns` that the stream is lost."""
        self._is_cut = True
        self._network.world.after(delay_ns, self._on_lost, reason)

    def break_off(self) -> None:
        """The stream breaks: each end learns in its own time, perhaps only by the silence; messages are lost."""
        world = self._network.world
        self._network.blame(self.tag, "a stream breaks", is_link=True)
        for end in (self, self.peer):
            if world.happens(0.5):
                end._num_losses += 1
            is_noticed = world.happens(0.7)
            low, high = (0.0, 10 * MS) if is_noticed else (0.67 * PROGRESS_TIMEOUT_NS, PROGRESS_TIMEOUT_NS)
            end.lose(world.between(low, high), "the stream broke")

    def _post(self, call: Callable[..., object], argument: object) -> None:
        if self._is_cut:
            return
        self._clear_at_ns = max(self._network.arrival_ns(), self._clear_at_ns)
        self._network.world.at(self._clear_at_ns, self.peer._arrive, self.peer._num_losses, call, argument)

    def _arrive(self, num_losses: int, call: Callable[..., object], argument: object) -> None:
        if num_losses == self._num_losses and not self.is_closed and self.life is not None:
            self.life.run(call, argument)

    def _receive(self, message: object) -> None:
        if not self.is_closed and self.handler is not None:
            self.handler.on_message(message)

    def _receive_end(self, error: KvferryError | None) -> None:
        if not self.is_closed:
            self._shut()
            self._tell(error)

    def _on_deadline(self, silent: Life, num_freezes: int) -> None:
        if silent.is_frozen and silent.num_freezes == num_freezes and self.life is not None:
            self.life.run(self.give_up)

    def _on_lost(self, reason: str) -> None:
        if self.life is not None:
            self.life.run(self._receive_end, Unavailable(reason))
        else:
            self.is_closed = True  # the call never gets there

    def _shut(self) -> None:
        self.is_closed = True
        if self.life is not None:
            self.life.ends.pop(self, None)

    def _tell(self, error: KvferryError | None) -> None:
        if self.handler is not None:
            self.handler.on_end(error)


class _Deaf:
    """An end that was closed at once."""

    def on_message(self, message: object) -> None:
        """Too late."""

    def on_end(self, error: KvferryError | None) -> None:
        """It has ended here already."""


def refuse(end: End, life: Life) -> StreamHandler:
    """A process that drains takes no new call."""
    end.blame(f"{life.name} is draining")
    end.close(Unavailable(f"{life.name} is draining"))
    return _Deaf()


Accept = Callable[[str, End], StreamHandler]
"""A process's reaction to a new call of a method."""


class Network:
    """Addresses, and the streams opened to them."""

    def __init__(self, world: World, faults: LinkFaults) -> None:
        self.world = world
        self.faulted: set[str] = set()  # attempts that a fault has touched, and which may therefore fail
        self.unlucky: set[str] = set()  # those of them for which the fault was not a sick worker's
        self._faults = faults
        self._servers: dict[str, tuple[Life, Accept]] = {}

    def listen(self, address: str, life: Life, accept: Accept) -> None:
        """From now on calls to `address` reach this life."""
        self._servers[address] = (life, accept)

    def connect(self, client: Life, address: str, method: str, handler: StreamHandler, tag: str) -> End:
        """Opens a call; messages may be sent at once."""
        near = End(self, tag, is_heard=method != "prefill")  # the request of a server stream is one message
        far = End(self, tag, is_heard=True)
        near.peer, far.peer = far, near
        near.attach(client, handler)
        near._clear_at_ns = self.arrival_ns()
        self.world.at(near._clear_at_ns, self._arrive, address, method, far)
        if self.world.happens(self._faults.break_probability):
            delay_ns = self.world.between(0, 25 * MS)
            self.world.after(delay_ns, self._break, near)
        return near

    def arrival_ns(self) -> int:
        """When a message sent now would arrive."""
        world = self.world
        quarter = world.random() * world.random()
        delay_ns = 30_000 + int(1_500_000 * quarter * quarter)
        if world.random() < self._faults.slow_probability:
            delay_ns += world.below(20 * MS)
        return world.now_ns + delay_ns

    def blame(self, tag: str, why: str, *, is_link: bool = False) -> None:
        """A fault touches the attempt: the link's, or a worker's."""
        self.world.note(tag, "FAULT", why)
        self.faulted.add(tag)
        if is_link:
            self.unlucky.add(tag)

    def _arrive(self, address: str, method: str, far: End) -> None:
        life, accept = self._servers[address]
        near = far.peer
        if not life.is_alive or far.is_closed:
            self.blame(far.tag, f"{address} is out of reach")
            near.lose(self.world.below(2 * MS), f"{address} refuses connections")
            return
        far.attach(life, None)
        if life.is_frozen:
            self.blame(far.tag, f"{address} is frozen")
            near.wait_for(life)
        life.run(self._accept, accept, method, far)

    def _accept(self, accept: Accept, method: str, far: End) -> None:
        if not far.is_closed:
            far.handler = accept(method, far)

    def _break(self, near: End) -> None:
        if not (near.is_closed and near.peer.is_closed):
            self.world.counts["streams broken"] += 1
            near.break_off()
