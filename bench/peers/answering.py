"""The loop of a child of `bench/engine.py`, ours or a peer's: one question a line, one answer a line.

    {"op": "start", "prompts": [[5, …], …], "room": 40}  ─►  {"seconds": 0.9}    until each has its first token
    {"op": "decode", "steps": 25}                        ─►  {"seconds": 1.1, "tokens": 200}    of all together
    {"op": "end"}                                        ─►  {}    whatever still runs is given up

`room`: most output tokens of a sequence. Between two questions nothing runs. Peers have environments of their own, so
this imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO


class Batch(Protocol):
    """The sequences of one start."""

    def prefill(self) -> None:
        """Steps until all have their first token."""

    def decode(self, steps: int) -> int:
        """Steps, and how many tokens came."""

    def end(self) -> None:
        """Gives up whatever still runs."""


def answer_questions(make_batch: Callable[[list[list[int]], int, int], Batch], answers: TextIO) -> None:
    """Until standard input ends. `make_batch`: prompts, room and the number of the question → a new batch."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    batch: Batch | None = None
    for number, line in enumerate(sys.stdin):
        asked, answer = json.loads(line), {}
        begin_s = time.perf_counter()
        if asked["op"] == "start":
            batch = make_batch(asked["prompts"], asked["room"], number)
            batch.prefill()
        elif asked["op"] == "decode":
            assert batch is not None
            answer["tokens"] = batch.decode(asked["steps"])
        else:
            assert batch is not None
            batch.end()
        print(json.dumps({"seconds": time.perf_counter() - begin_s, **answer}), file=answers, flush=True)
