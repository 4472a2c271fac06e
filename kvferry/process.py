"""How a process of kvferry starts and ends.

`StopSignals` turns SIGTERM and Ctrl-C into events. As a program (`python -m kvferry.process … MODULE ARGS`) this is the
start of every child of `kvferry up`: it lowers the priority, watches the pipe to the parent, has `STACKS_SIGNAL` write
all stacks to standard error, and then runs MODULE as `python -m MODULE ARGS` would. Done here and not in a hook after
fork, which may deadlock in a process with threads.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time

ORPHAN_GRACE_S = 5.0
"""How long a worker whose parent died may take to end; there is nobody left to drain for."""

STACKS_SIGNAL = signal.SIGUSR2
"""A child answers with the stacks of all its threads, also where no Python code of it runs any more."""


class StopSignals:
    """SIGTERM or SIGINT sets `requested`; a second one sets `hurried`, which cuts the grace period short."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()

    def install(self) -> StopSignals:
        """Registers with the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)
        return self

    def _received(self) -> None:
        (self.hurried if self.requested.is_set() else self.requested).set()


def print_ready(**fields: object) -> None:
    """The one line on standard output that tells a supervisor this process serves."""
    _spare_garbage_collector()
    sys.stdout.write(json.dumps({"ready": True, "pid": os.getpid(), **fields}) + "\n")
    sys.stdout.flush()


def _spare_garbage_collector() -> None:
    """What was loaded until now stays for good: walking through it again would hold up a step for a tenth of a second.

    At the end it is given back, for extension modules that report what was never freed.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def _end_with_parent() -> None:
    """A thread ends this process when the pipe on standard input closes, as it does when the parent dies."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Entry point of a child process."""
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.process", epilog="example: python -m kvferry.process --nice 10 decode_svc --help"
    )
    parser.add_argument("--nice", type=int, default=0, help="added to the process's niceness")
    parser.add_argument("--child", action="store_true", help="own process group; end when standard input is closed")
    parser.add_argument("module", help="module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    if options.nice:
        os.nice(options.nice)
    if options.child:
        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the parent alone, which ends its children in order
        _end_with_parent()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    sys.argv[1:] = options.arguments
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
