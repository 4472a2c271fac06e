"""The event loop of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs `main` on uvloop where it is installed; the one event loop of the process."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
