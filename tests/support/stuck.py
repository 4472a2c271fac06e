"""A test that takes longer than its timeout is one failed test, and the run goes on.

pytest-timeout says when; its own two ways to end a test do not do: uvloop swallows what its signal raises, and its
thread ends the whole run without a word on what failed. Here the signal cancels the tasks of the event loop, so that
the test cleans up, and raises where no loop runs. It comes again, and then cancels and raises in turn: a test may block
its loop, and what it waits for at its end may hang, too. Where even that changes nothing the main thread hangs in
foreign code and no Python of it will ever run again: a thread writes pytest's summary and ends the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
from pytest_timeout import Settings, dump_stacks

AGAIN_S = 5.0
"""From signal to signal: what a cancelled test takes to clean up."""
NUM_RINGS = 8
"""Then the run ends."""


class Alarm:
    """The timeout of one test."""

    def __init__(self, item: pytest.Item, timeout_s: float, again_s: float) -> None:
        self._item = item
        self._before = signal.signal(signal.SIGALRM, self._ring)
        self._thread = threading.Timer(timeout_s + NUM_RINGS * again_s, self._end_run)
        self._thread.daemon = True
        self.message = f"Timeout (>{timeout_s:g} s)"
        self.num_rings = 0
        signal.setitimer(signal.ITIMER_REAL, timeout_s, again_s)
        self._thread.start()

    def cancel(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        self._thread.cancel()

    def _ring(self, number: int, frame: FrameType | None) -> None:
        self.num_rings += 1
        loop = asyncio._get_running_loop()
        if self.num_rings == 1:
            dump_stacks(self._item.config.get_terminal_writer())
        if loop is None or self.num_rings % 2 == 0:
            pytest.fail(self.message)
        loop.call_soon_threadsafe(_cancel_tasks, loop, self.message)

    def _end_run(self) -> None:
        """In a thread of its own."""
        config, item = self._item.config, self._item
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        reporter = config.pluginmanager.getplugin("terminalreporter")
        dump_stacks(config.get_terminal_writer())
        text = f"{self.message}; it hangs where nothing reaches it"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        reporter.stats.setdefault("failed", []).append(report)
        reporter.summary_failures()
        reporter.short_test_summary()
        reporter.summary_stats()
        sys.stdout.flush()
        os._exit(1)


def _cancel_tasks(loop: asyncio.AbstractEventLoop, message: str) -> None:
    for task in asyncio.all_tasks(loop):
        task.print_stack(limit=4)
        task.cancel(message)


class StuckTests:
    """The plugin; tests/conftest.py registers it."""

    def __init__(self, again_s: float = AGAIN_S) -> None:
        self._again_s = again_s
        self._alarm: Alarm | None = None

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Settings) -> bool | None:
        """In place of pytest-timeout's own."""
        self._alarm = Alarm(item, settings.timeout, self._again_s)
        return True

    def pytest_timeout_cancel_timer(self) -> bool | None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        return (yield from self._phase())

    def _phase(self) -> Iterator[None]:
        """A phase in which the alarm rang has failed, also where the cancelled test took it for an end like others."""
        before = self._alarm.num_rings if self._alarm else 0
        try:
            return (yield)
        finally:
            if self._alarm is not None and self._alarm.num_rings > before:
                pytest.fail(self._alarm.message)
