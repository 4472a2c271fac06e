"""Turns constraints into grammars that are known to compile, in a process of its own (`grammar_child.py`).

    checked(constraint) ─► kept answer, or a job of the one thread that talks to the child ─► grammar, or refused

The child begins with the first constraint and is replaced when it was lost; the constraint is tried once more then,
unless it took too long. Answers are kept, refusals too, so what ends children does so twice at most.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.errors import InvalidArgument
from kvferry.grammar import MAX_COMPILED, GrammarThread
from kvferry.telemetry import log_event
from router.constraint import OutputConstraint

logger = logging.getLogger(__name__)

CPU_S = 10
"""Of computing for one constraint; the worst that is of use takes 2 s."""
WALL_S = 60.0
"""For a child that does not compute at all; what it computes is bounded by itself."""


class GrammarChecker:
    """Of one model. Its methods belong to one event loop."""

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        vocab_size: int,
        *,
        eos_token_ids: tuple[int, ...],
        named_ids: Mapping[str, int],
        cpu_s: int = CPU_S,
    ) -> None:
        """`read_tokenizer` gives tokenizer.json's text; `named_ids` as in `constraint.py`."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._named_ids = named_ids
        self._cpu_s = cpu_s
        self._answers: OrderedDict[OutputConstraint, dict[str, str]] = OrderedDict()
        self._child: subprocess.Popen[str] | None = None  # of the thread alone
        self._is_slow = False  # whether the last one that was lost was so for its work
        self._thread = GrammarThread(lambda: ThreadPoolExecutor(1, thread_name_prefix="grammar"))

    async def checked(self, constraint: OutputConstraint | None) -> str:
        """The grammar for the workers; empty for no constraint.

        Raises:
            InvalidArgument: the constraint is malformed, too complex, or matches nothing; with the reason.
            ResourceExhausted: too many are being compiled.
        """
        if constraint is None:
            return ""
        if not self._eos_token_ids:
            raise InvalidArgument(
                constraint.field, "cannot be kept: the model has no end-of-sequence id to end it with"
            )
        if constraint not in self._answers:
            self._answers[constraint] = await self._thread.run(lambda: self._ask(constraint))
            if len(self._answers) > MAX_COMPILED:
                self._answers.popitem(last=False)
        self._answers.move_to_end(constraint)
        answer = self._answers[constraint]
        if "refused" in answer:
            raise InvalidArgument(constraint.field, answer["refused"].removeprefix(f"{constraint.field}: "))
        return answer["grammar"]

    def close(self) -> None:
        """Drops waiting jobs and ends the child."""
        self._thread.close()
        if self._child is not None:
            self._child.kill()
            self._child.communicate()

    def _ask(self, constraint: OutputConstraint) -> dict[str, str]:
        """Of the thread: one exchange with the child, or two, since it may be lost for another's fault."""
        answer = self._exchange(constraint)
        if answer is None and not self._is_slow:
            answer = self._exchange(constraint)
        if answer is None:
            reason = "takes too much work to compile" if self._is_slow else "the library that compiles it fails"
            answer = {"refused": f"cannot be kept: {reason}"}
        return answer

    def _exchange(self, constraint: OutputConstraint) -> dict[str, str] | None:
        """None where the child was lost; it is started where there is none."""
        job = {
            "field": constraint.field,
            "text": constraint.text,
            "is_compact": constraint.is_compact,
            "eos_token_ids": self._eos_token_ids,
            "named_ids": dict(self._named_ids),
        }
        is_there = True
        try:
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            assert self._child.stdout is not None
            _write(self._child, job)
            is_there = bool(select.select([self._child.stdout], [], [], WALL_S)[0])
            line = self._child.stdout.readline() if is_there else ""
        except OSError:  # it ended before it had read
            line = ""
        if not line:
            self._lose(constraint, is_late=not is_there)
            return None
        answer: dict[str, str] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "router.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is the router's to see
        )
        first = {"tokenizer": self._read_tokenizer(), "vocab_size": self._vocab_size, "cpu_s": self._cpu_s}
        _write(child, first)
        return child

    def _lose(self, constraint: OutputConstraint, *, is_late: bool) -> None:
        """Buries the child, and keeps whether it ended for its work."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.communicate()
        self._is_slow = is_late or child.returncode == -signal.SIGXCPU
        log_event(logger, "grammar_child_lost", level=logging.WARNING, field=constraint.field, exit=child.returncode)


def _write(child: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(message) + "\n")
    child.stdin.flush()
