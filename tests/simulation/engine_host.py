"""The step loop of one worker in virtual time: what `EngineLoop` does with a thread.

    submit ─► (next boundary) commands ─► before_step ─► step ─► (later) deliver

Commands run between two steps, their results and the outputs of steps reach the event loop later, in order. A step
takes time, during which the event loop goes on; whether its work counts as done at its begin or at its end is drawn,
because the real one happens somewhere in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.block_events import BlockEvents, PendingChanges
from engine.core import EngineCore
from engine.outputs import Output
from kvferry.block_changes import NumberedChanges
from kvferry.errors import KvferryError
from router.block_index import BlockIndex
from tests.simulation.network import Life
from tests.simulation.oracle import BlockOracle
from tests.simulation.world import MS, InvariantViolation

Command = Callable[[EngineCore], object]
Done = Callable[[object], object]


class PendingCommand:
    """A command on its way to the engine; one that is cancelled in time does not run, and its result reaches nobody."""

    __slots__ = ("command", "done", "is_cancelled")

    def __init__(self, command: Command, done: Done | None) -> None:
        self.command = command
        self.done = done
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def tell(self, result: object) -> None:
        if self.done is not None and not self.is_cancelled:
            self.done(result)


class BlockReader:
    """A router that follows the published blocks of one engine and takes changes at every third look."""

    def __init__(self, core: EngineCore) -> None:
        self._pool, self._events, self._index = core.pool, BlockEvents(core.pool), BlockIndex()
        self._watcher = PendingChanges(core.pool.num_blocks // 2, int)  # few, so that it needs snapshots, too
        self._events.open(self._watcher)
        self._num_looks = self._num_taken = 0

    def check(self) -> None:
        """Raises unless the index is what is published, whenever all changes are taken."""
        self._num_looks += 1
        if self._num_looks % 3:
            return
        self._num_taken += 1
        self._index.take("worker", NumberedChanges(1, self._num_taken, self._events.take(self._watcher)))
        published = self._pool.published_hashes()
        found = all(self._index.longest_run([block_hash]) for block_hash in published)
        if not found or self._index.known("worker").num_blocks != len(published):
            raise InvariantViolation("the index of a router is not what its worker published")


class EngineHost:
    """Runs one `EngineCore`, checking its books after everything that happens to it.

    Args:
        life: the process.
        core: the engine.
        oracle: what must be in published blocks.
        before_step: as `EngineLoop`.
        deliver: takes outputs on the event loop's side.
    """

    def __init__(
        self,
        life: Life,
        core: EngineCore,
        oracle: BlockOracle,
        *,
        before_step: Callable[[], list[Output]],
        deliver: Callable[[list[Output]], None],
    ) -> None:
        self.core = core
        self._life = life
        self._world = life.world
        self._oracle = oracle
        self._block_reader = BlockReader(core)
        self._before_step = before_step
        self._deliver = deliver
        self._commands: deque[PendingCommand] = deque()
        self._is_turning = False
        self._may_step = False
        self._told_at_ns = 0  # when the event loop learns the last thing told so far

    def submit(self, command: Command, done: Done | None = None) -> PendingCommand:
        """Runs `command(core)` at the next boundary; `done` gets its result, or the exception it raised."""
        pending = PendingCommand(command, done)
        self._commands.append(pending)
        self._wake()
        return pending

    @property
    def is_idle(self) -> bool:
        return not (self._commands or self._is_turning or self._may_step)

    def check(self) -> None:
        """Raises unless every block is accounted for, and published blocks hold what their hash says and are told."""
        self.core.check_integrity()
        self._oracle.check(self.core)
        self._block_reader.check()

    def check_holds(self, seq_id: str, block_index: int, block_id: int) -> None:
        """Raises unless the block, which the event loop is about to read or write, is the sequence's own."""
        sequence = self.core.sequences.get(seq_id)
        if sequence is None or sequence.block_table[block_index : block_index + 1] != [block_id]:
            raise InvariantViolation(f"a shipment of {seq_id} touches block {block_id}, which was freed")

    def _wake(self) -> None:
        if not self._is_turning and (self._commands or self._may_step):
            self._is_turning = True
            self._life.after(5_000, self._begin_turn)

    def _begin_turn(self) -> None:
        while self._commands:
            self._run(self._commands.popleft())
        outputs = self._before_step()
        has_work = self.core.has_work
        duration_ns = self._world.between(0.2 * MS, 1.5 * MS) if has_work else 5_000
        if has_work and self._world.happens(0.5):
            self._life.after(duration_ns, self._end_turn, outputs, *self._step(outputs))
        else:
            self._life.after(duration_ns, self._step_and_end_turn, outputs)

    def _run(self, pending: PendingCommand) -> None:
        if pending.is_cancelled:
            return
        result: object
        try:
            result = pending.command(self.core)
        except KvferryError as error:  # goes to whoever waits; any other exception is a fault of ours and ends the run
            result = error
        self.core.check_integrity()
        if pending.done is not None:
            self._tell(pending.tell, result)

    def _step(self, before: list[Output]) -> tuple[list[Output], bool]:
        """What a step said at its end, and whether it computed anything; `before` is told with what it says earlier."""

        def tell(early: list[Output]) -> None:
            self._world.counts["told early"] += 1
            self._tell(self._deliver, [*before, *early])
            before.clear()

        outputs = self.core.step(tell) if self.core.has_work else []
        return outputs, not self.core.is_blocked

    def _step_and_end_turn(self, outputs: list[Output]) -> None:
        stepped = self._step(outputs)
        self._end_turn(outputs, *stepped)

    def _end_turn(self, before: list[Output], stepped: list[Output], has_computed: bool) -> None:
        self.check()
        outputs = before + stepped
        self._may_step = self.core.has_work and (bool(outputs) or has_computed)
        if outputs:
            self._tell(self._deliver, outputs)
        self._is_turning = False
        self._wake()

    def _tell(self, call: Callable[..., object], argument: object) -> None:
        """The event loop's side learns it a little later, in order."""
        world = self._world
        self._told_at_ns = max(self._told_at_ns, world.now_ns + 5_000 + int(200_000 * world.random() ** 4))
        world.at(self._told_at_ns, self._life.run, call, argument)
