"""`kvferry` commands as processes of their own, forked from one that has loaded the command line: quick to start.

    with CommandServer() as server:
        outcome = await server.run("workers", "--json", environment=…)

Everything else is as with `python -m kvferry.cli.app`, but for what the interpreter reads of the environment at its
start (the locale).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from tests.support.forks import ROOT, exit_code_of

STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended, and what it wrote."""

    code: int | None
    stdout: str
    stderr: str


def plain_environment() -> dict[str, str]:
    """No configuration but the defaults, whatever the surroundings configure, and text of a fixed width."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return {**kept, "COLUMNS": "100", "NO_COLOR": "1"}


class CommandServer:
    """Runs one command after the other; use it as a context manager."""

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.commands", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=plain_environment(),
            )
        self._lines = ours.makefile("rw")
        ours.close()  # once the file is
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._process.wait()

    async def run(
        self, *arguments: str, environment: Mapping[str, str], stdin: bytes = b"", cwd: Path = ROOT
    ) -> Outcome:
        """Runs `kvferry ARGUMENTS` to its end."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "stdin").write_bytes(stdin)
            request = {
                "arguments": arguments,
                "environment": dict(environment),
                "cwd": str(cwd),
                "files": [str(folder / stream) for stream in STREAMS],
            }
            code = await asyncio.to_thread(self._ask, json.dumps(request))
            return Outcome(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())

    def _ask(self, request: str) -> int:
        self._lines.write(request + "\n")
        self._lines.flush()
        return int(self._lines.readline())


# -- in the process that forks ----------------------------------------------------------------------------------------


def _next_command(lines: IO[str]) -> dict[str, Any] | None:
    """In each child what it is to run; None in the server itself, at the end."""
    while line := lines.readline():
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        _, status = os.waitpid(pid, 0)
        lines.write(f"{os.waitstatus_to_exitcode(status)}\n")
        lines.flush()
    return None


def _become(request: dict[str, Any]) -> None:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, (file, flags) in enumerate(
        zip(request["files"], (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2), strict=True)
    ):
        os.dup2(os.open(file, flags, 0o600), number)
    sys.argv[:] = ["kvferry", *request["arguments"]]


def _serve(descriptor: int) -> None:
    import typer.rich_utils  # noqa: F401 - what the children need not load

    from kvferry.cli.app import main

    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rw") as lines:
        request = _next_command(lines)
    if request is not None:
        _become(request)
        os._exit(exit_code_of(main))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
