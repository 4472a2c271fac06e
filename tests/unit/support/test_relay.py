"""The relay that tests put into a hop does what it is told, at once and in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tests.support.relay import Direction, Relay
from tests.support.workers import until

LONG_S = 60.0
"""A delay that no test waits for."""


class Echo:
    """A server that sends back what it gets; `num_ended` counts its connections that were closed or reset."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_ended = 0
        self.received = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.received += data
                writer.write(data)
                await writer.drain()
        self.num_ended += 1
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


class Caller:
    """One connection to the relay."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, relay: Relay) -> Caller:
        host, _, port = relay.address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self) -> None:
        self._writer.write_eof()

    async def hear(self, num_bytes: int) -> bytes:
        async with asyncio.timeout(5.0):
            return await self._reader.readexactly(num_bytes)

    async def hear_end(self) -> bytes:
        async with asyncio.timeout(5.0):
            return await self._reader.read()

    async def echoed(self, data: bytes) -> bytes:
        self.say(data)
        return await self.hear(len(data))

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def relay(echo: Echo) -> AsyncIterator[Relay]:
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, Relay() as relay:
        relay.forward_to(f"{host}:{port}")
        yield relay
    await until(lambda: echo.num_ended == echo.num_open)


@pytest.fixture
async def caller(relay: Relay) -> AsyncIterator[Caller]:
    caller = await Caller.connect(relay)
    yield caller
    await caller.close()


async def test_bytes_pass_in_order_and_are_counted(relay: Relay, caller: Caller) -> None:
    data = bytes(range(256)) * 4096
    assert await caller.echoed(data) == data
    assert [relay.num_passed_bytes(direction) for direction in Direction] == [len(data), len(data)]


async def test_an_end_passes_and_the_other_direction_goes_on(relay: Relay, echo: Echo, caller: Caller) -> None:
    caller.say(b"last words")
    caller.end()
    assert await caller.hear_end() == b"last words"
    await until(lambda: relay.num_connections == 0 and echo.num_ended == 1)


async def test_a_delay_makes_bytes_late_and_its_end_lets_them_through(relay: Relay, echo: Echo, caller: Caller) -> None:
    loop = asyncio.get_running_loop()
    relay.delay(0.1)
    begin_s = loop.time()
    assert await caller.echoed(b"a") == b"a"
    assert loop.time() - begin_s > 0.15
    relay.delay(LONG_S, Direction.FROM_TARGET)
    caller.say(b"b")
    await until(lambda: echo.received == b"ab")
    relay.pass_on()
    assert await caller.hear(1) == b"b"


async def test_a_throttled_direction_is_as_slow_as_it_is_told(relay: Relay, caller: Caller) -> None:
    loop = asyncio.get_running_loop()
    relay.throttle(10_000, Direction.TO_TARGET)
    begin_s = loop.time()
    assert await caller.echoed(b"x" * 3_000) == b"x" * 3_000
    assert loop.time() - begin_s > 0.2
    relay.throttle(1)
    caller.say(b"y" * 100_000)
    relay.pass_on()
    assert await caller.hear(100_000) == b"y" * 100_000


async def test_what_is_held_comes_later(relay: Relay, echo: Echo, caller: Caller) -> None:
    assert await caller.echoed(b"a") == b"a"
    relay.hold(Direction.TO_TARGET)
    caller.say(b"b")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(caller.hear(1), 0.1)
    assert echo.received == b"a"
    relay.pass_on()
    assert await caller.hear(1) == b"b"


async def test_a_half_open_connection_stays_silent_and_later_ones_pass(
    relay: Relay, echo: Echo, caller: Caller
) -> None:
    assert await caller.echoed(b"a") == b"a"
    relay.drop()
    caller.say(b"lost")
    caller.end()
    late = await Caller.connect(relay)
    late.say(b"lost too")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(caller.hear(1), 0.1)
    assert echo.received == b"a" and echo.num_ended == 0
    relay.pass_on()
    late.say(b"of no use")
    anew = await Caller.connect(relay)
    assert await anew.echoed(b"b") == b"b"
    assert echo.received == b"ab" and echo.num_ended == 0
    await relay.cut()
    await until(lambda: echo.num_ended == echo.num_open)
    for one in (late, anew):
        with pytest.raises(ConnectionResetError):
            await one.hear(1)
        await one.close()


async def test_a_cut_resets_both_ends_and_takes_new_connections(relay: Relay, echo: Echo, caller: Caller) -> None:
    assert await caller.echoed(b"a") == b"a"
    await relay.cut()
    with pytest.raises(ConnectionResetError):
        await caller.hear(1)
    await until(lambda: echo.num_ended == 1)
    anew = await Caller.connect(relay)
    assert await anew.echoed(b"b") == b"b"
    await anew.close()


async def test_refusing_leaves_open_connections_alone(relay: Relay, caller: Caller) -> None:
    assert await caller.echoed(b"a") == b"a"
    for _ in range(2):
        await relay.refuse()
        with pytest.raises(ConnectionRefusedError):
            await Caller.connect(relay)
        assert await caller.echoed(b"b") == b"b"
        relay.pass_on()
        anew = await Caller.connect(relay)
        assert await anew.echoed(b"c") == b"c"
        await anew.close()


async def test_a_target_that_is_not_there_resets_the_caller(relay: Relay) -> None:
    async with Relay() as nobody:
        address = nobody.address
    relay.forward_to(address)
    caller = await Caller.connect(relay)
    with pytest.raises(ConnectionResetError):
        await caller.hear(1)
    await caller.close()
