"""What staging memory a process holds, as the kernel sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NAME = "memfd:kvferry-staging"


@dataclass(frozen=True, slots=True)
class StagingTraces:
    """Open files and mappings of staging segments."""

    num_files: int = 0
    num_mappings: int = 0


def staging_traces(pid: int | None = None) -> StagingTraces:
    """Those of a process, this one where none is named."""
    process = Path("/proc") / ("self" if pid is None else str(pid))
    return StagingTraces(
        num_files=sum(NAME in target for target in _open_files(process)),
        num_mappings=sum(NAME in line for line in (process / "maps").read_text().splitlines()),
    )


def num_open_files(pid: int | None = None) -> int:
    """All open files of a process, this one where none is named."""
    return len(_open_files(Path("/proc") / ("self" if pid is None else str(pid))))


def _open_files(process: Path) -> list[str]:
    targets = []
    for file in (process / "fd").iterdir():
        try:
            targets.append(os.readlink(file))
        except FileNotFoundError:  # the one that lists the folder
            continue
    return targets
