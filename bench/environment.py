"""What a figure depends on: date, versions, cores."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("grpcio", "torch", "transformers", "uvloop", "xxhash")


def describe() -> dict[str, object]:
    """Date, cores, processor and package versions."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "processor": processor(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def processor() -> str:
    """Its name and which of the instructions that count here it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    told = {key.strip(): value.strip() for key, value in told.items()}
    flags = told.get("flags", "").split()
    return " ".join([told.get("model name", platform.machine()), *(name for name in INSTRUCTIONS if name in flags)])
