"""What the kernel says of a process: private memory, and processor time by thread."""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE = ("Private_Clean:", "Private_Dirty:")


def private_bytes(pid: int) -> int:
    """Memory that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(PRIVATE))


def thread_times_s(pid: int) -> dict[int, float]:
    """Processor time by thread id, user's and system's."""
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        times[int(task.name)] = tick_s * (int(fields[11]) + int(fields[12]))
    return times
