"""Child processes of `kvferry up`: started, waited for, restarted, ended with their parent.

    async with Supervisor(...) as supervisor:
        child = await supervisor.start(ChildSpec("decode-0", "decode_svc", [...], num_threads=1))
        …                                   # a child that dies or is stuck is started again, after a growing pause
                                            # leaving the block drains all of them: SIGTERM, grace, SIGKILL by pid
                                            # (`hurry` puts a second SIGTERM in place of the rest of the grace)

A child says that it serves by one JSON line on standard output, `{"ready": true, "address": "host:port", …}`. Its
standard input is a pipe that only this process holds, so it notices our death however that comes.

A child that serves gRPC health is asked again and again whether it makes progress. One that says no, or nothing for
long, writes its stacks if it can, and is killed. Whatever ended a child but its own wish is reported as one event, with
what it wrote last and its last steps (`kvferry/step_log.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from kvferry.config import SupervisorConfig, child_environment
from kvferry.errors import FailedPrecondition, Unavailable
from kvferry.process import STACKS_SIGNAL
from kvferry.rpc import Liveness, RpcChannel, ask_liveness
from kvferry.step_log import read_steps
from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

WORKER_NICENESS = 10
"""Workers yield to the router, whose lateness every client sees."""
MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STEADY_AFTER_S = 30.0
"""A child that lived this long is restarted without delay again."""
NUM_HELD_LINES = 20
"""Plain lines of a child that starts, kept for its error should it fail; nobody reads more of them there."""
HURRY_GRACE_S = 3.0
"""After its second SIGTERM a child ends its calls with a status at once; this is for writing them out."""
SIGNALS_APART_S = 0.1
"""Two equal signals that are pending at the same time count as one."""
SHOW_WAITING_AFTER_S = 1.0
"""A drain that takes longer than this says what it waits for."""
MAX_LINE_BYTES = 1 << 20
NUM_LAST_LINES = 60
MAX_LAST_LINE_CHARS = 300
"""Of a child's standard error, for a crash report: room for the stacks of a worker's threads, and still one event."""
STACKS_WAIT_S = 1.0
"""How long a stuck child has to write its stacks; that takes milliseconds unless it is stopped."""
LAST_WORDS_TIMEOUT_S = 1.0
"""A pipe ends with its last writer; what a dead child started may keep it open."""
DEFAULT_PROBES = SupervisorConfig()


class Report(Protocol):
    """Takes what a supervisor does: one sentence for people, or the same as an event."""

    def __call__(self, text: str, event: str, **fields: object) -> None: ...


def report_event(text: str, event: str, **fields: object) -> None:
    """A `Report` that writes events."""
    log_event(logger, event, level=logging.INFO, **fields)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child: `python -m module arguments… --listen listen`.

    Attributes:
        is_probed: it serves gRPC health and is started again when stuck.
        steps_file: where it leaves its last steps, if it has any.
    """

    name: str
    module: str
    arguments: Sequence[str] = ()
    listen: str = "127.0.0.1:0"
    num_threads: int = 1
    niceness: int = 0
    is_probed: bool = False
    steps_file: Path | None = None

    def command(self, listen: str) -> list[str]:
        launcher = [sys.executable, "-m", "kvferry.process", "--child", "--nice", str(self.niceness), self.module]
        return [*launcher, *self.arguments, "--listen", listen]


@dataclass(slots=True)
class Child:
    """One supervised child over all its lives. `ready` is its latest ready line.

    While it starts, the plain lines of its standard error are held: they become part of the error if it fails, and are
    passed on if not, so that they are shown once. `last_lines` are the last of all that it wrote there, cut short.
    """

    spec: ChildSpec
    process: asyncio.subprocess.Process
    ready: Mapping[str, Any] = field(default_factory=dict)
    is_starting: bool = True
    held_lines: deque[str] = field(default_factory=deque)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    errors: asyncio.Task[None] | None = None  # reads its standard error
    num_restarts: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    async def last_words(self) -> list[str]:
        """The last lines of a child that has ended."""
        if self.errors is not None:
            await asyncio.wait([self.errors], timeout=LAST_WORDS_TIMEOUT_S)
        return list(self.last_lines)


class Supervisor:
    """Owns the children. `relay` gets every line they write to standard error (or to standard output after the ready
    line) once, `report` what happens to them."""

    def __init__(
        self,
        *,
        ready_timeout_s: float = 300.0,
        grace_s: float = 30.0,
        relay: Callable[[str], None] = lambda line: None,
        report: Report = report_event,
        min_backoff_s: float = MIN_BACKOFF_S,
        probes: SupervisorConfig = DEFAULT_PROBES,
    ) -> None:
        self._ready_timeout_s = ready_timeout_s
        self._grace_s = grace_s
        self._relay = relay
        self._report = report
        self._min_backoff_s = min_backoff_s
        self._probe_period_s = probes.probe_period_s
        self._max_silent_probes = math.ceil(probes.probe_timeout_s / probes.probe_period_s)
        self._children: list[Child] = []
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def children(self) -> Sequence[Child]:
        return tuple(self._children)

    async def start(self, spec: ChildSpec) -> Child:
        """Starts a child and waits until it is ready; from then on it is restarted whenever it ends.

        Raises FailedPrecondition with its last lines when it ends first, Unavailable when it takes too long.
        """
        self._report(f"starting {spec.name}", "child_starting", child=spec.name)
        child = Child(spec, await _spawn(spec, spec.listen))
        self._children.append(child)
        await self._wait_ready(child)
        self._watchers[spec.name] = asyncio.create_task(self._keep_alive(child), name=f"watch-{spec.name}")
        return child

    def hurry(self) -> None:
        """Cuts the grace of a running or coming `stop` short: a second SIGTERM, then SIGKILL to those that stay."""
        self._hurry.set()

    async def stop_child(self, child: Child) -> None:
        """SIGTERM to one child, the grace period, then SIGKILL; it is not restarted."""
        await self._end([child])

    async def stop(self) -> None:
        """The same for all that still run, at once."""
        await self._end(self._children)
        for task in list(self._readers):
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _end(self, children: Sequence[Child]) -> None:
        watchers = [self._watchers.pop(child.spec.name) for child in children if child.spec.name in self._watchers]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        running = _still_running(children)
        for child in running:
            _signal(child, signal.SIGTERM)
        if running:
            await self._wait_ended(running)

    async def _wait_ended(self, running: Sequence[Child]) -> None:
        ended = asyncio.gather(*(child.process.wait() for child in running))
        hurry = asyncio.ensure_future(self._hurry.wait())
        telling = asyncio.ensure_future(self._tell_waiting(running))
        await asyncio.wait([ended], timeout=SIGNALS_APART_S)
        either: list[asyncio.Future[Any]] = [ended, hurry]
        await asyncio.wait(either, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done() and not ended.done():
            for child in _still_running(running):
                _signal(child, signal.SIGTERM)
            await asyncio.wait([ended], timeout=HURRY_GRACE_S)
        hurry.cancel()
        telling.cancel()
        for child in _still_running(running):
            log_event(logger, "child_killed", level=logging.WARNING, child=child.spec.name, pid=child.pid)
            _signal(child, signal.SIGKILL)
        await ended

    async def _tell_waiting(self, children: Sequence[Child]) -> None:
        await asyncio.sleep(SHOW_WAITING_AFTER_S)
        names = [child.spec.name for child in _still_running(children)]
        self._report(f"waiting for {', '.join(names)} to end", "children_draining", children=names)

    async def _keep_alive(self, child: Child) -> None:
        """Restarts `child` for ever, on the address it had, so that its router finds it again."""
        backoff_s = self._min_backoff_s
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            stuck = await self._until_ended(child)
            lived_s = loop.time() - started_s
            backoff_s = self._min_backoff_s if lived_s > STEADY_AFTER_S else backoff_s
            if child.process.returncode == 0 and not stuck:
                self._report_end(child, backoff_s)
            else:
                await self._report_crash(child, stuck, lived_s, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            child.process = await _spawn(child.spec, child.address)
            child.num_restarts += 1
            try:
                await self._wait_ready(child)
            except (FailedPrecondition, Unavailable) as error:
                log_event(logger, "child_failed", level=logging.ERROR, child=child.spec.name, error=error.message)
                _signal(child, signal.SIGKILL)

    async def _until_ended(self, child: Child) -> str:
        """Waits for the end of a child that serves, or brings it about; why, or nothing where it ended by itself."""
        if not child.spec.is_probed:
            await child.process.wait()
            return ""
        ended = asyncio.ensure_future(child.process.wait())
        probing = asyncio.ensure_future(self._until_stuck(child.address))
        try:
            await asyncio.wait([ended, probing], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ""
            _signal(child, STACKS_SIGNAL)
            await asyncio.wait([ended], timeout=STACKS_WAIT_S)
            _signal(child, signal.SIGKILL)
            await ended
            return probing.result()
        finally:
            ended.cancel()
            probing.cancel()

    async def _until_stuck(self, address: str) -> str:
        """Asks a child whether it makes progress until it does not; in words.

        Silence is counted in probes, not by the clock: when this very process was stopped, its children are not to pay.
        """
        num_silent = 0
        async with RpcChannel(address) as channel:
            while num_silent < self._max_silent_probes:
                pause = asyncio.ensure_future(asyncio.sleep(self._probe_period_s))
                answer = await ask_liveness(channel, self._probe_period_s)
                if answer is Liveness.STUCK:
                    pause.cancel()
                    return "it says that it makes no progress"
                num_silent = num_silent + 1 if answer is Liveness.SILENT else 0
                await pause
        return f"it answered nothing for {num_silent * self._probe_period_s:g} s"

    def _report_end(self, child: Child, backoff_s: float) -> None:
        """A child ended of its own accord, as after a SIGTERM from elsewhere."""
        log_event(
            logger,
            "child_ended",
            level=logging.WARNING,
            child=child.spec.name,
            pid=child.pid,
            exit_code=child.process.returncode,
            restart_in_s=backoff_s,
        )

    async def _report_crash(self, child: Child, stuck: str, lived_s: float, backoff_s: float) -> None:
        """All that is known of a child that crashed, or was killed because it was stuck."""
        lines = await child.last_words()
        steps_file = _kept(child.spec.steps_file)
        log_event(
            logger,
            "worker_crashed",
            level=logging.ERROR,
            child=child.spec.name,
            pid=child.pid,
            exit=_exit_of(child.process.returncode),
            stuck=stuck,
            uptime_s=round(lived_s, 3),
            stderr=lines,
            last_steps=[asdict(step) for step in read_steps(steps_file)] if steps_file else [],
            steps_file=str(steps_file or ""),
            restart_in_s=backoff_s,
        )

    async def _wait_ready(self, child: Child) -> None:
        child.is_starting = True
        child.held_lines.clear()
        child.last_lines.clear()
        started_s = asyncio.get_running_loop().time()
        errors = child.errors = self._read_on(_relay_lines(child.process.stderr, child, self._relay, child.last_lines))
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                ready = await _read_ready_line(child, self._relay)
        except TimeoutError:
            _signal(child, signal.SIGKILL)
            await child.process.wait()
            await asyncio.wait([errors])
            raise Unavailable(
                f"{child.spec.name} was not ready after {self._ready_timeout_s:g} s{_tail(child)}"
            ) from None
        if ready is None:
            code = await child.process.wait()
            await asyncio.wait([errors])
            raise FailedPrecondition(f"{child.spec.name} ended with exit code {code} before it was ready{_tail(child)}")
        child.ready = ready
        child.is_starting = False
        while child.held_lines:
            self._relay(child.held_lines.popleft())
        after_s = asyncio.get_running_loop().time() - started_s
        self._report(
            f"{child.spec.name} ready ({after_s:.0f} s)",
            "child_ready",
            child=child.spec.name,
            pid=child.pid,
            address=child.address,
            after_s=round(after_s, 3),
        )
        self._read_on(_relay_lines(child.process.stdout, child, self._relay))

    def _read_on(self, reading: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(reading)
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return task


async def _spawn(spec: ChildSpec, listen: str) -> asyncio.subprocess.Process:
    """On asyncio's own loop, as `kvferry up` has it: children of uvloop run gRPC's fork handlers, and die of them."""
    return await asyncio.create_subprocess_exec(
        *spec.command(listen),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(spec.num_threads),
        limit=MAX_LINE_BYTES,
    )


async def _read_ready_line(child: Child, relay: Callable[[str], None]) -> Mapping[str, Any] | None:
    """The ready line; None when standard output ends without one. Other lines are relayed."""
    assert child.process.stdout is not None
    while line := await child.process.stdout.readline():
        text = line.decode(errors="replace").rstrip()
        with suppress(ValueError):
            message = json.loads(text)
            if isinstance(message, dict) and message.get("ready") is True and "address" in message:
                return message
        relay(text)
    return None


async def _relay_lines(
    stream: asyncio.StreamReader | None, child: Child, relay: Callable[[str], None], kept: deque[str] | None = None
) -> None:
    assert stream is not None
    while line := await stream.readline():
        text = line.decode(errors="replace").rstrip()
        if kept is not None and text:
            kept.append(text[:MAX_LAST_LINE_CHARS])
        if child.is_starting and not text.startswith(("{", "time=")):  # an event is never part of an error
            child.held_lines.append(text)
            text = child.held_lines.popleft() if len(child.held_lines) > NUM_HELD_LINES else ""
        if text:
            relay(text)


def _tail(child: Child) -> str:
    """What the child said last, other than events; its own one-line error where it gave one."""
    lines = list(child.held_lines)
    plain = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if plain:
        return f": {plain[-1]}"
    return "".join(f"\n  {line}" for line in lines)


def _kept(steps_file: Path | None) -> Path | None:
    """The file of a child's last steps under a name that its next life leaves alone; one a child is kept."""
    if steps_file is None or not steps_file.exists():
        return None
    return steps_file.replace(steps_file.with_suffix(".crashed"))


def _exit_of(returncode: int | None) -> str:
    """How a child ended: the name of the signal, or the exit code."""
    if returncode is not None and returncode < 0:
        with suppress(ValueError):
            return signal.Signals(-returncode).name
    return f"exit code {returncode}"


def _still_running(children: Sequence[Child]) -> list[Child]:
    return [child for child in children if child.process.returncode is None]


def _signal(child: Child, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        child.process.send_signal(number)
