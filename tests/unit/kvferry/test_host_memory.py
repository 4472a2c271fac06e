"""Asking for pages changes no contents and does bring them in."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from kvferry.host_memory import PAGE_BYTES, populate

NUM_BYTES = 24 << 20


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_come_and_contents_stay() -> None:
    memory = np.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=np.uint8)  # never used before, as a pool's is
    memory[5 * PAGE_BYTES] = 7
    before = resident_bytes()
    assert populate(memory.ctypes.data, NUM_BYTES)
    assert resident_bytes() - before > NUM_BYTES // 2
    assert memory[5 * PAGE_BYTES] == 7 and int(memory.sum()) == 7


def test_what_is_written_meanwhile_stays() -> None:
    memory = np.zeros(NUM_BYTES, dtype=np.uint8)
    thread = threading.Thread(target=populate, args=(memory.ctypes.data, NUM_BYTES))
    thread.start()
    memory[::PAGE_BYTES] = 1
    thread.join()
    assert int(memory.sum()) == NUM_BYTES // PAGE_BYTES


def test_less_than_a_page_and_odd_addresses() -> None:
    memory = np.ones(3 * PAGE_BYTES, dtype=np.uint8)
    for offset, num_bytes in ((0, 1), (1, PAGE_BYTES), (17, 2 * PAGE_BYTES + 5), (0, 0)):
        assert populate(memory.ctypes.data + offset, num_bytes)
    assert int(memory.sum()) == 3 * PAGE_BYTES


def test_the_allocator_takes_the_settings() -> None:
    """In a process of its own: they are for good."""
    source = "from kvferry.host_memory import keep_message_buffers; print(keep_message_buffers())"
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n"
