"""What this machine, or the container we are in, has: cores and memory.

Read from the kernel's files, so that defaults (pool size, threads) fit a container's limits and not its host's.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
FALLBACK_MEMORY_BYTES = 4 << 30
"""Assumed where the system does not say (macOS without the files below)."""


def num_cores(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores this process may use: affinity, cut down to the cgroup's quota; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cores(cgroup_root)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def memory_limit_bytes(cgroup_root: Path = CGROUP_ROOT, meminfo: Path = MEMINFO) -> int:
    """Memory of the machine, cut down to the cgroup's limit (version 2 or 1)."""
    limits = [
        _first_number(cgroup_root / "memory.max"),
        _first_number(cgroup_root / "memory" / "memory.limit_in_bytes"),
        _total_memory_bytes(meminfo),
    ]
    return min((limit for limit in limits if limit is not None), default=FALLBACK_MEMORY_BYTES)


def _cgroup_cores(cgroup_root: Path) -> float | None:
    words = _words(cgroup_root / "cpu.max")  # "max 100000" or "150000 100000"
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = (_first_number(cgroup_root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota / period if quota and period else None


def _total_memory_bytes(meminfo: Path) -> int | None:
    words = _words(meminfo)  # "MemTotal:", "24576000", "kB", …
    return int(words[1]) * 1024 if len(words) > 1 and words[0] == "MemTotal:" else None


def _first_number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
