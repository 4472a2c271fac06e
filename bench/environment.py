"""What a figure depends on: date, versions, cores."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version

PACKAGES = ("grpcio", "torch", "transformers", "uvloop", "xxhash")


def describe() -> dict[str, object]:
    """Date, cores, processor architecture and package versions."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }
