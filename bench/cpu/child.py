"""One engine in a process of its own, asked a question at a time; see `bench/peers/answering.py` for the questions."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

READY_TIMEOUT_S = 600.0
"""A peer's first start compiles."""
MOST_LOG_CHARS = 600


class ChildFailed(RuntimeError):
    """An engine ended, or did not answer in time; the text has the end of its log."""


class Child:
    """A started engine."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
        )

    def wait_ready(self) -> None:
        """Raises ChildFailed, as all methods."""
        self._answer(READY_TIMEOUT_S)

    def start(self, prompts: Sequence[Sequence[int]], room: int, timeout_s: float) -> float:
        """Seconds until each has its first token."""
        return float(self._ask({"op": "start", "prompts": prompts, "room": room}, timeout_s)["seconds"])

    def decode(self, num_steps: int, timeout_s: float) -> float:
        """Tokens a second of all sequences together."""
        answer = self._ask({"op": "decode", "steps": num_steps}, timeout_s)
        return float(answer["tokens"] / answer["seconds"])

    def end_batch(self, timeout_s: float) -> None:
        self._ask({"op": "end"}, timeout_s)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with suppress(OSError):  # what it has not read is lost with it
                pipe.close()

    def _ask(self, question: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildFailed(f"{self.name} has ended: {self._last_words()}") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            raise ChildFailed(f"{self.name} has not answered within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{self.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-MOST_LOG_CHARS:]
