"""The OpenAI package, unmodified, against a real router in front of scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest
from openai import AsyncOpenAI

from tests.support.fake_workers import FakeNetwork
from tests.unit.router.conftest import Router, StartRouter

OUTPUT = [ord(letter) - ord("A") + 35 for letter in "HELLOWORLDAGAIN"]  # byte-level ids of these letters
EOS = 2


class Gateway:
    """A router, its workers, and clients of it."""

    def __init__(self, router: Router, network: FakeNetwork) -> None:
        self.router, self.network = router, network
        self.url = router.app.http_url
        self.openai = self.client()

    def client(self, api_key: str = "none", max_retries: int = 0) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=max_retries, timeout=20.0)

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


class StartGateway(Protocol):
    """`async with start_gateway() as gateway`."""

    def __call__(
        self, network: FakeNetwork | None = None, **router: object
    ) -> AbstractAsyncContextManager[Gateway]: ...


@pytest.fixture
def start_gateway(start_router: StartRouter) -> StartGateway:
    @asynccontextmanager
    async def start(network: FakeNetwork | None = None, **router: object) -> AsyncIterator[Gateway]:
        network = network or FakeNetwork(OUTPUT * 10)
        async with network, start_router(network, **router) as running:
            gateway = Gateway(running, network)
            async with gateway.openai:
                yield gateway

    return start
