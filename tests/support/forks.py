"""Workers and routers forked from a process that has loaded what they load: a tenth of a second instead of one or two.

    process = fork_server().start(["decode_svc", "--config", …], environment, stderr)

Each is what `python -m MODULE ARGUMENTS` would be, but for what the interpreter and OpenMP read of the environment when
they are loaded; tests of the start itself use that. Its parent is a keeper, which waits for it alone:

    pytest ─► server ─► keeper ─► process          pid and exit code come back through a pipe
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvferry.config import child_environment

ROOT = Path(__file__).parents[2]
MAX_REQUEST_BYTES = 1 << 20
PRELOADED = (
    "decode_svc.role",
    "engine.model_runner",
    "engine.scripted",
    "kvferry.cli.app",
    "prefill_svc.role",
    "router.app",
    "uvloop",
)
READY = b"ready"
NUM_FILES = 3
"""Standard output, standard error and the pipe of the keeper."""


class ForkedProcess:
    """A process, as `subprocess.Popen` shows one.

    Attributes:
        stdout: what it writes.
        returncode: negative for a signal; None while it runs.
    """

    def __init__(self, stdout: IO[bytes], keeper: IO[bytes]) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._keeper = keeper
        self.pid = int(keeper.readline())
        os.set_blocking(keeper.fileno(), False)

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        if self.returncode is None and (line := self._keeper.readline()):
            self.returncode = int(line)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """To this process alone; nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its keeper is about to say so
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it, where it has not ended by itself, and waits."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            os.set_blocking(self._keeper.fileno(), True)
            self.poll()

    def close(self) -> None:
        """Kills it if it still lives; gives its files back."""
        self.kill()
        self.stdout.close()
        self._keeper.close()


class ForkServer:
    """Lives as long as this process; made when it has loaded everything."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=child_environment(1),
            )
        assert self._channel.recv(len(READY)) == READY, "the server that forks did not start"

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]) -> ForkedProcess:
        """`python -m *arguments`; its standard input is empty."""
        stdout_read, stdout_write = os.pipe()
        keeper_read, keeper_write = os.pipe()
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self._channel, [request], [stdout_write, stderr.fileno(), keeper_write])
        finally:
            os.close(stdout_write)
            os.close(keeper_write)
        return ForkedProcess(os.fdopen(stdout_read, "rb"), os.fdopen(keeper_read, "rb"))

    def close(self) -> None:
        """The server ends; what it has started goes on."""
        self._channel.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """The one of this test run; tests/conftest.py closes it."""
    return ForkServer()


# -- in the process that forks ----------------------------------------------------------------------------------------


def _next_process(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In each process what it is to run, and its files; None in the server itself, at the end."""
    while True:
        data, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, NUM_FILES)
        if not data:
            return None
        if os.fork() == 0:
            channel.close()
            if _keep(*files) == 0:
                return json.loads(data), files
            os._exit(0)
        for file in files:
            os.close(file)


def _keep(stdout: int, stderr: int, report: int) -> int:
    """0 in the process; in its keeper its id, once it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(stdout)
        os.close(stderr)
        os.write(report, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return pid


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files[:2])):
        os.dup2(file, number)
        os.close(file)
    os.close(files[-1])
    module, *arguments = request["arguments"]
    sys.argv[:] = [module, *arguments]
    sys.modules.pop(module, None)  # a module that is run must not be imported
    os._exit(exit_code_of(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)))


def exit_code_of(program: Callable[[], object]) -> int:
    """Runs a program in a process that was forked; what it registered for its end is done.

    What its parent has loaded is not taken down: that takes longer than most programs do.
    """
    code: object = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def _serve(descriptor: int) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those that were forked
    with socket.socket(fileno=descriptor) as channel:
        channel.send(READY)
        process = _next_process(channel)
    if process is not None:
        _become(*process)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
