"""The rows of the hand-off run over every transport between real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.workers import DEFAULTS

OVER_ALL_TRANSPORTS = (
    "test_cancel",
    "test_choices",
    "test_faults",
    "test_hand_off",
    "test_parking",
    "test_prefix_sharing",
    "test_stalls",
    "test_worker_pair",
)


ONCE = pytest.mark.parametrize("transport", ["auto"], indirect=True)
"""For tests in which nothing is shipped."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of these modules once a transport, unless it chooses for itself."""
    has_chosen = any(mark.args[0] == "transport" for mark in metafunc.definition.iter_markers("parametrize"))
    if metafunc.module.__name__.rpartition(".")[2] in OVER_ALL_TRANSPORTS and not has_chosen:
        metafunc.parametrize("transport", ["shm", "grpc"], indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """The transport of every configuration that says nothing of it."""
    DEFAULTS.transport = getattr(request, "param", "auto")
    yield DEFAULTS.transport
    DEFAULTS.transport = "auto"
