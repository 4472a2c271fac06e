"""Commands that are quick to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.commands import CommandServer


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandServer]:
    with CommandServer() as server:
        yield server
