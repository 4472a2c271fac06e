"""The command line as processes, and a router with fixed answers for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import pytest_asyncio

from proto.kvferry.v1 import inference_pb2
from tests.support.commands import CommandServer, Outcome, plain_environment
from tests.support.fake_router import FakeRouter, start_fake_router

WORKER = inference_pb2.WorkerInfo(
    id="decode-0", role="decode", pid=9, address="127.0.0.1:5", state="ready", num_blocks=3
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No configuration but the defaults; the cache is empty."""
    return {**plain_environment(), "KVFERRY_MODEL__CACHE_DIR": str(tmp_path / "cache")}


class Kvferry(Protocol):
    """Runs `kvferry ARGUMENTS` to its end."""

    async def __call__(self, environment: dict[str, str], *arguments: str, stdin: str | bytes = "") -> Outcome: ...


@pytest.fixture
def kvferry(commands: CommandServer) -> Kvferry:
    async def run(environment: dict[str, str], *arguments: str, stdin: str | bytes = "") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return await commands.run(*arguments, environment=environment, stdin=data)

    return run


@dataclass(frozen=True, slots=True)
class Running:
    fake: FakeRouter
    address: str


@pytest_asyncio.fixture
async def router() -> AsyncIterator[Running]:
    fake = FakeRouter([WORKER])
    server, address = await start_fake_router(fake)
    yield Running(fake, address)
    await server.drain(0)


async def started_anew(environment: dict[str, str], *arguments: str, stdin: bytes) -> Outcome:
    """By an interpreter that finds this environment at its start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvferry.cli.app", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    stdout, stderr = await process.communicate(stdin)
    return Outcome(process.returncode, stdout.decode(), stderr.decode())
