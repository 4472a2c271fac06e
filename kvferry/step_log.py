"""The last steps of an engine in a small mapped file, which survives the process however it ends.

A step costs two writes of a few bytes into memory; the kernel keeps them for whoever reads the file afterwards:
`kvferry up`, when a worker crashed or was stuck. A step that has no end is the one in which that happened.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry.errors import FailedPrecondition

NUM_STEPS = 32
"""Enough to see whether steps grew slower or larger; a report with all of them is still readable."""

_RECORD = struct.Struct("<QQQII")
"""Step number, begin and end in Unix nanoseconds (end 0 while it runs), sequences, tokens."""
_END = struct.Struct("<Q")
_END_OFFSET = 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine; `duration_s` is None where it never ended."""

    number: int
    began_at_unix_s: float
    duration_s: float | None
    num_sequences: int
    num_tokens: int


class StepLog(Protocol):
    """Told of every step by the engine's own thread."""

    def begin(self, number: int, at_ns: int, num_sequences: int, num_tokens: int) -> None:
        """A step begins."""

    def end(self, number: int, at_ns: int) -> None:
        """It has ended."""


class NoStepLog:
    """Keeps nothing."""

    def begin(self, number: int, at_ns: int, num_sequences: int, num_tokens: int) -> None:
        pass

    def end(self, number: int, at_ns: int) -> None:
        pass


class MappedStepLog:
    """The last `NUM_STEPS` steps in `file`, which is made anew; raises FailedPrecondition when it cannot be."""

    def __init__(self, file: Path) -> None:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise FailedPrecondition(f"cannot write {file}: {error.strerror}") from error
        try:
            os.ftruncate(descriptor, NUM_STEPS * _RECORD.size)
            self._map = mmap.mmap(descriptor, NUM_STEPS * _RECORD.size)
        finally:
            os.close(descriptor)

    def begin(self, number: int, at_ns: int, num_sequences: int, num_tokens: int) -> None:
        _RECORD.pack_into(self._map, number % NUM_STEPS * _RECORD.size, number, at_ns, 0, num_sequences, num_tokens)

    def end(self, number: int, at_ns: int) -> None:
        _END.pack_into(self._map, number % NUM_STEPS * _RECORD.size + _END_OFFSET, at_ns)


def read_steps(file: Path) -> list[StepRecord]:
    """The steps in `file`, oldest first; none where there is no such file, or no whole one."""
    try:
        data = file.read_bytes()
    except OSError:
        return []
    whole = len(data) // _RECORD.size * _RECORD.size
    records = [_record(*values) for values in _RECORD.iter_unpack(data[:whole]) if values[0]]
    return sorted(records, key=lambda record: record.number)


def _record(number: int, begin_ns: int, end_ns: int, num_sequences: int, num_tokens: int) -> StepRecord:
    duration_s = (end_ns - begin_ns) / 1e9 if end_ns else None
    return StepRecord(number, begin_ns / 1e9, duration_s, num_sequences, num_tokens)
