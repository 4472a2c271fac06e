"""What every test gets: the event loop the product runs on, the default model, and commands that start quickly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

from kvferry.config import load_config
from kvferry.model_store import ModelStore
from tests.support.commands import CommandServer
from tests.support.forks import fork_server
from tests.support.stuck import StuckTests

settings.register_profile("suite", derandomize=True, deadline=None)
"""The suite looks at the same examples every time: what a new one finds is for whoever runs the sweep, not for CI."""
settings.register_profile("sweep", print_blob=True, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Properties see new examples with every sweep; a stuck test fails alone."""
    config.pluginmanager.register(StuckTests())
    settings.load_profile("sweep" if config.getoption("markexpr") == "sweep" else "suite")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop, as in `kvferry.rpc.run`; asyncio's own for what supervises, as in `kvferry up`: gRPC bears no forks."""
    if item.path.stem in ("test_supervisor", "test_rehearsal"):
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model as `make test` has prepared it; prepared now where it was not."""
    config = load_config()
    return ModelStore(config.model.cache_path).prepare("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandServer]:
    """Runs `kvferry` commands."""
    with CommandServer() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The server that forks workers and routers starts before the first test: one that waited for it would hold up the
    workers in its own event loop."""
    if any(item.get_closest_marker("processes") for item in request.session.items):
        fork_server()
    yield
    if fork_server.cache_info().currsize:
        fork_server().close()
