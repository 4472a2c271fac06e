"""The synchronous client against routers with fixed answers, and in programs of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry.client import AsyncClient, ChatMessage, GenerateOptions
from kvferry.errors import Cancelled, DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from kvferry.sync_client import Client
from proto.kvferry.v1 import inference_pb2 as pb
from tests.support.commands import plain_environment
from tests.support.fake_router import TEXT, FakeRouter, events, start_fake_router
from tests.support.forks import ROOT
from tests.support.workers import until

OPTIONS = GenerateOptions(prompt="x", max_tokens=5)


class Endless(FakeRouter):
    """Streams for as long as somebody listens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.num_open += 1
        try:
            started, delta, *_ = events(request)
            await context.write(started)
            for place in range(1_000_000):
                delta.delta.token_index = place
                await context.write(delta)
                await asyncio.sleep(0.01)
        finally:
            self.num_open -= 1


@asynccontextmanager
async def serving(fake: FakeRouter) -> AsyncIterator[str]:
    server, address = await start_fake_router(fake)
    yield address
    await server.drain(0)


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvferry-client"]


async def test_calls_return_when_they_are_done() -> None:
    fake = FakeRouter()

    def program(address: str) -> None:
        with Client(address) as client:
            assert client.complete(OPTIONS).text == TEXT
            assert client.chat("Hi", session_id="s", temperature=0.0).text == TEXT
            assert client.chat([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")]).is_complete
            with client.generate(OPTIONS) as received:
                assert [event.WhichOneof("event") for event in received][:2] == ["started", "delta"]
            with client.stream(OPTIONS) as pieces:
                assert list(pieces) == [TEXT[:5], TEXT[5:]]
                assert list(pieces) == []
            assert client.capabilities().model == "fake" and client.workers() == () and client.models() == ()
            assert client.abort("a", "b") == ("a",)
            assert client.tokenize("AB") == (65, 66) and client.detokenize([65, 66]) == "AB"

    async with serving(fake) as address:
        await asyncio.to_thread(program, address)
    assert [len(request.chat.messages) for request in fake.requests] == [0, 1, 2, 0, 0]
    assert (fake.requests[1].session_id, fake.requests[1].sampling.temperature) == ("s", 0.0)
    assert not client_threads()


async def test_errors_are_ours_and_named_before_anything_is_sent() -> None:
    async with serving(FakeRouter()) as address:
        with Client(address) as client:  # on the loop's own thread: nothing below needs the loop
            for wrong in (GenerateOptions(prompt="x", max_tokens=-1), GenerateOptions(prompt="\ud800")):
                with pytest.raises(InvalidArgument):
                    client.complete(wrong)
            with (
                pytest.raises(InvalidArgument, match="choices come side by side"),
                client.stream(GenerateOptions(prompt="x", n=2)),
            ):
                pass
            with pytest.raises(InvalidArgument, match="prompt: must be text"):
                client.tokenize([])
        with pytest.raises(FailedPrecondition, match="the client is closed"):
            client.capabilities()
        client.close()
    with pytest.raises(InvalidArgument, match="at least one"):
        Client([])
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.complete(OPTIONS)
    assert not client_threads()


@pytest.mark.parametrize(
    "target",
    [
        "localhost",
        "http://127.0.0.1:50051",
        "127.0.0.1:",
        ":50051",
        "127.0.0.1:99999",
        "a b:1",
        "",
        b"a:1",
        5,
        {"a:1": 2},
    ],
)
def test_an_address_that_is_none_is_told_at_once(target: Any) -> None:
    for targets in (target, ["127.0.0.1:1", target]):
        with pytest.raises(InvalidArgument, match=r"target: must be HOST:PORT"):
            Client(targets)
    assert not client_threads()


async def test_a_stream_without_its_block_is_told() -> None:
    async with serving(FakeRouter()) as address, AsyncClient(address) as ours:
        with Client(address) as client:
            wrong: Any
            for wrong in (client.stream(OPTIONS), client.generate(OPTIONS), client.drain_worker("x")):
                with pytest.raises(TypeError, match=r"with client\.stream\(…\) as pieces"):
                    list(wrong)
        for wrong in (ours.stream(OPTIONS), ours.generate(OPTIONS)):
            with pytest.raises(TypeError, match=r"async with client\.stream\(…\) as pieces"):
                aiter(wrong)


async def test_an_error_of_a_stream_is_raised_inside_its_block() -> None:
    def program(address: str) -> None:
        with Client(address) as client:
            with (
                pytest.raises(InvalidArgument, match="no tier 'gold'"),
                client.stream(GenerateOptions(prompt="x", tier="gold")) as pieces,
            ):
                next(pieces)
            with pytest.raises(ZeroDivisionError), client.stream(OPTIONS) as pieces:
                next(pieces)
                raise ZeroDivisionError
            assert client.complete(OPTIONS).is_complete

    async with serving(FakeRouter()) as address:
        await asyncio.to_thread(program, address)


async def test_leaving_a_stream_cancels_it_and_a_deadline_ends_it() -> None:
    fake = Endless()

    def read(client: Client) -> int:
        with client.stream(OPTIONS) as pieces:
            assert next(pieces) == TEXT[:5]
            return fake.num_open

    def read_to_the_end(client: Client) -> None:
        words = r"^the deadline of 0\.3 s passed after [1-9]\d* tokens?$"
        with pytest.raises(DeadlineExceeded, match=words), client.stream(OPTIONS, timeout_s=0.3) as pieces:
            for _ in pieces:
                pass
        with pytest.raises(DeadlineExceeded, match=words):
            client.complete(OPTIONS, timeout_s=0.3)

    async with serving(fake) as address:
        with Client(address) as client:
            assert await asyncio.to_thread(read, client) == 1
            await until(lambda: fake.num_open == 0)
            await asyncio.to_thread(read_to_the_end, client)
            await until(lambda: fake.num_open == 0)


async def test_clients_share_a_thread_that_ends_with_the_last_and_closing_ends_calls_of_others() -> None:
    fake = Endless()
    async with serving(fake) as address:
        one, other = Client(address), Client(address)
        assert len(client_threads()) == 1
        other.close()
        assert len(client_threads()) == 1
        reading = asyncio.create_task(asyncio.to_thread(one.complete, OPTIONS))
        await until(lambda: fake.num_open == 1)
        await asyncio.to_thread(one.close)
        with pytest.raises(Cancelled):
            await reading
        await until(lambda: fake.num_open == 0)
        assert not client_threads()
        with Client(address) as again:
            assert (await asyncio.to_thread(again.capabilities)).model == "fake"


async def test_both_clients_work_side_by_side() -> None:
    async with serving(FakeRouter()) as address, AsyncClient(address) as client:
        with Client(address) as plain:
            for _ in range(20):
                answers = await asyncio.gather(
                    asyncio.to_thread(plain.complete, OPTIONS), *(client.complete(OPTIONS) for _ in range(4))
                )
                assert {answer.text for answer in answers} == {TEXT}


def test_names_are_loaded_when_they_are_used() -> None:
    """`import kvferry` is light, though the client is there."""
    program = (
        "import sys, kvferry; assert not {'grpc', 'asyncio', 'google.protobuf'} & set(sys.modules); "
        "kvferry.Client, kvferry.AsyncClient; assert 'grpc' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=plain_environment(), timeout=60)
    assert all(getattr(kvferry, name) is not None for name in kvferry.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Cilent'"):
        kvferry.Cilent  # noqa: B018


PROGRAM = """
import sys
from kvferry import Client, GenerateOptions
client = Client(sys.argv[1])
with client.stream(GenerateOptions(prompt="x")) as pieces:
    for piece in pieces:
        print(piece, flush=True)
"""


async def test_ctrl_c_ends_a_stream_and_the_program_though_it_never_closed_its_client(tmp_path: Path) -> None:
    fake, program = Endless(), tmp_path / "program.py"
    program.write_text(PROGRAM)
    async with serving(fake) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(program, address),
            env={**plain_environment(), "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        _, stderr = await process.communicate()
        assert process.returncode == -signal.SIGINT and stderr.decode().splitlines()[-1] == "KeyboardInterrupt"
        await until(lambda: fake.num_open == 0)
