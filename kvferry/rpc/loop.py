"""The event loop of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs `main` on uvloop where it is installed; the one event loop of the process."""
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return asyncio.run(main)
    return uvloop.run(main)
