"""Lines that chaos tests report beside their verdict: pauses and counts, shown after the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

REPORT = pytest.StashKey[list[str]]()


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes a line for the end of the run."""
    return pytestconfig.stash.setdefault(REPORT, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows the lines of this run."""
    lines = config.stash.get(REPORT, [])
    if lines:
        terminalreporter.section("chaos")
        for line in lines:
            terminalreporter.write_line(line)
