"""A decode worker that notes the duration of its steps: `python -m decode_svc` with a clock around the engine's step.

python -m bench.receive_worker STEPS_FILE --config FILE …    # the rest goes to the worker

STEPS_FILE gets one line a step: its begin and its end in seconds of the monotonic clock, which all processes share, and
the sequences it ran.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from decode_svc.role import DecodeRole
from engine.outputs import Output
from kvferry.worker_process import WorkerContext, main


class _TimedRole(DecodeRole):
    """The decode role; `steps` takes the lines."""

    def __init__(self, context: WorkerContext, steps: TextIO) -> None:
        super().__init__(context)
        step = self.core.step

        def timed_step(tell: Callable[[list[Output]], None] | None = None) -> list[Output]:
            begin_s, num_running = time.monotonic(), len(self.core.scheduler.running)
            outputs = step(tell)
            steps.write(f"{begin_s:.6f} {time.monotonic():.6f} {num_running}\n")
            return outputs

        self.core.step = timed_step  # type: ignore[method-assign]


if __name__ == "__main__":
    with Path(sys.argv.pop(1)).open("w", encoding="utf-8") as file:
        main("decode", lambda context: _TimedRole(context, file))
