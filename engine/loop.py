"""The step loop: one thread that owns an `EngineCore` and runs it while there is work.

The service's event loop hands in closures (`submit`), which run between two steps, so nothing of the core is touched by
two threads but for `engine/hold.py`; results and the outputs of steps go back through `deliver`, in order, once a step,
and where blocks are shipped once more within it, when they are complete (`EngineCore.step`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine.core import EngineCore
from engine.outputs import Output

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], None]

STOP_TIMEOUT_S = 5.0
"""How long a step may hold up the end of the process."""


class EngineLoop:
    """Runs one engine.

    Args:
        core: the engine; after `start` only this loop's thread may touch it.
        deliver: takes the outputs of a step; called on the loop's thread, must not block.
        before_step: called between commands and step; what it returns is delivered before the step's outputs.
        on_crash: called once when the loop itself fails, which is a fault of ours; the process should end.
    """

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[list[Output]], None],
        *,
        before_step: Callable[[], list[Output]] = list,
        on_crash: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.core = core
        self._deliver = deliver
        self._before_step = before_step
        self._on_crash = on_crash
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()  # bounded by the live calls: each has at most a few on the way
        self._is_stopping = False
        self._may_step = False  # whether a step could progress without a new command
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._main, name="kvferry-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the step that runs and the commands handed in; a step that hangs is left behind."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def submit(self, command: Callable[[EngineCore], T]) -> Future[T]:
        """Runs `command(core)` between two steps; the future holds its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command(self.core)
            except Exception as error:  # noqa: BLE001 - whoever submitted the command gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._condition:
            if self._is_stopping:
                future.cancel()
            else:
                self._commands.append(run)
                self._condition.notify()
        return future

    async def run(self, command: Callable[[EngineCore], T]) -> T:
        """`submit`, awaited on an event loop."""
        return await asyncio.wrap_future(self.submit(command))

    def is_stuck(self, max_step_s: float) -> bool:
        """Whether a step has been running for longer than `max_step_s`, or the loop is dead."""
        busy_since_s = self._busy_since_s
        if not self._thread.is_alive():
            return True
        return busy_since_s is not None and time.monotonic() - busy_since_s > max_step_s

    def _main(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                self._turn(commands)
            for command in self._commands:  # no more are taken now
                command()
        except BaseException as error:
            if self._is_stopping:  # a step that `stop` did not wait for has nobody to deliver to
                return
            logger.critical("the step loop failed", exc_info=True)
            self._on_crash(error)

    def _next_commands(self) -> list[Command] | None:
        """Waits until there is something to do; None when the loop is to end.

        Work that could not progress (every block is taken) waits for the next command, which alone can change that.
        """
        with self._condition:
            while not (self._commands or self._is_stopping or self._may_step):
                self._condition.wait()
            if self._is_stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _turn(self, commands: list[Command]) -> None:
        self._busy_since_s = time.monotonic()
        for command in commands:
            command()
        outputs = list(self._before_step())
        if self.core.has_work:

            def tell(early: list[Output]) -> None:
                self._deliver([*outputs, *early])
                outputs.clear()

            stepped = self.core.step(tell)
            outputs += stepped
        self._may_step = self.core.has_work and (bool(outputs) or not self.core.is_blocked)
        self._busy_since_s = None
        if outputs:
            self._deliver(outputs)
