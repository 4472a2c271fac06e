"""Tests that never end are failures like others; the run ends with pytest's line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.commands import plain_environment
from tests.support.forks import ROOT

CONFTEST = """
import uvloop
from tests.support.stuck import StuckTests

def pytest_configure(config):
    config.pluginmanager.register(StuckTests(again_s=0.2))

def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
"""

STUCK = """
import asyncio, contextlib, threading, time
import pytest

def test_sleeps():
    time.sleep(60)

def test_waits_for_a_lock():
    threading.Lock().acquire() and threading.Event().wait()

async def test_awaits():
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("cleaned up")

async def test_awaits_another_task():
    await asyncio.create_task(asyncio.Event().wait())

async def test_takes_a_cancellation_for_an_end():
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()

async def test_awaits_again():
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

async def test_blocks_its_loop():
    time.sleep(60)

async def test_blocks_its_loop_in_a_callback():
    asyncio.get_running_loop().call_soon(time.sleep, 60)
    await asyncio.sleep(60)

@pytest.fixture
async def stuck():
    await asyncio.Event().wait()

@pytest.fixture
async def stuck_at_its_end():
    yield
    await asyncio.Event().wait()

async def test_awaits_its_fixture(stuck): ...

async def test_awaits_the_end_of_its_fixture(stuck_at_its_end): ...

async def test_is_quick(): ...
"""

FOREIGN = """
import ctypes

def test_is_quick(): ...

def test_hangs_in_foreign_code():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)

def test_is_never_reached(): ...
"""


def lines_of(folder: Path, source: str) -> list[str]:
    """What pytest writes about it."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\ntimeout = 0.3\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**plain_environment(), "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_each_stuck_test_is_one_failure(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, STUCK)
    told = [line for line in lines if line.startswith(("FAILED ", "ERROR test_it"))]
    assert len(told) == 10 and all("Timeout (>0.3 s)" in line for line in told), told
    assert "cleaned up" in lines
    assert lines[-1].startswith("8 failed, 2 passed, 2 errors in "), lines[-1]


def test_what_hangs_in_foreign_code_ends_the_run_with_its_summary(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, FOREIGN)
    assert any("lock(mutex)" in line for line in lines), "where it hangs is missing"
    assert [line for line in lines if line.startswith("FAILED ")] == [
        "FAILED test_it.py::test_hangs_in_foreign_code - Timeout (>0.3 s); it hangs where nothing reaches it"
    ]
    assert lines[-1].startswith("1 failed, 1 passed in "), lines[-1]
