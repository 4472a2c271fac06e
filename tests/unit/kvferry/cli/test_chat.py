"""`kvferry chat`, as a process, against routers with fixed answers."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.errors import ContextExceeded
from proto.kvferry.v1 import inference_pb2
from tests.support.commands import Outcome
from tests.support.fake_router import TEXT, FakeRouter, events, start_fake_router
from tests.support.workers import until
from tests.unit.kvferry.conftest import Kvferry, Running, started_anew

pytestmark = pytest.mark.processes

ANSWER = f"{TEXT}\n"


async def test_chat_keeps_the_conversation(kvferry: Kvferry, environment: dict[str, str], router: Running) -> None:
    arguments = ["chat", "--target", router.address, "--system", "Be brief."]
    outcome = await kvferry(environment, *arguments, stdin="one\ntwo\n")
    assert outcome == Outcome(0, f"{TEXT}\n{TEXT}\n", "")
    second = router.fake.requests[1]
    assert [message.role for message in second.chat.messages] == ["system", "user", "assistant", "user"]
    assert second.sampling == inference_pb2.SamplingOptions(temperature=0.2, top_p=0.9)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
async def test_failed_turn_is_told_and_dropped(environment: dict[str, str], router: Running, locale: str) -> None:
    arguments = ["chat", "--target", router.address]
    outcome = await started_anew({**environment, "LC_ALL": locale}, *arguments, stdin=b"ab\xff\xfe\ntwo\n")
    assert (outcome.code, outcome.stdout) == (0, TEXT + "\n")
    assert outcome.stderr.startswith("error: prompt.chat.messages[0].content: ")
    assert len(outcome.stderr.splitlines()) == 1
    (request,) = router.fake.requests
    assert [message.content for message in request.chat.messages] == ["two"]


def contents(request: inference_pb2.GenerateRequest) -> list[str]:
    return [message.content for message in request.chat.messages]


async def test_commands_change_the_conversation(kvferry: Kvferry, environment: dict[str, str], router: Running) -> None:
    lines = [
        "one",
        "/system Be brief.",
        "/tier batch",
        "two",
        "",
        "/clear",
        "//three",
        "/reset",
        "four",
        "/quit",
        "five",
    ]
    outcome = await kvferry(environment, "chat", "--target", router.address, stdin="\n".join(lines))
    next_turn, gone = "from the next turn on\n", "forgotten\n"
    assert outcome == Outcome(0, ANSWER * 4, next_turn * 2 + gone * 2)
    assert [contents(request) for request in router.fake.requests] == [
        ["one"],
        ["Be brief.", "one", TEXT, "two"],
        ["Be brief.", "/three"],
        ["Be brief.", "four"],
    ]
    assert [request.tier for request in router.fake.requests] == ["", "batch", "batch", "batch"]
    first, second, third, fourth = (request.session_id for request in router.fake.requests)
    assert first == second and len({first, third, fourth}) == 3 and all((first, third, fourth))


async def test_commands_show_what_there_is_and_unknown_ones_are_told(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    lines = [
        "/system Be brief.",
        "one",
        "/history",
        "/system",
        "/tier",
        "/foo bar",
        "/retry",
        "/drop x",
        "/drop 0",
        "/",
    ]
    arguments = ["chat", "--target", router.address, "--tier", "batch"]
    outcome = await kvferry(environment, *arguments, stdin="\n".join(lines))
    assert outcome.stdout == f"{ANSWER}system: Be brief.\nuser: one\nassistant: {TEXT}\n"
    set_system, system, tier, unknown, retry, drop, none, slash = outcome.stderr.splitlines()
    assert set_system == "from the next turn on"
    assert (system, tier) == ("Be brief.", "batch")
    assert unknown.startswith("error: there is no /foo; /help shows") and slash.startswith("error: there is no /;")
    assert retry == "error: there is nothing to ask again"
    assert drop.endswith("at least 1, got 'x'") and none.endswith("at least 1, got '0'")
    helped = await kvferry(environment, "chat", "--target", router.address, stdin="/help")
    shown = [line[:18].split() for line in helped.stdout.splitlines()]
    assert shown == [
        *(["/help"], ["/history"], ["/clear,", "/reset"], ["/drop", "[NUMBER]"], ["/retry"]),
        *(["/system", "[TEXT|-]"], ["/tier", "[NAME]"], ["/quit"]),
    ]
    assert all(len(line[18:].split()) > 1 for line in helped.stdout.splitlines())


async def test_a_tier_that_is_none_is_told_at_once_and_the_system_prompt_can_be_removed(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    lines = ["/tier gold", "/tier", "/system -", "one", "/system", "/tier batch", "two"]
    arguments = ["chat", "--target", router.address, "--system", "Be brief.", "--model", "m"]
    outcome = await kvferry(environment, *arguments, stdin="\n".join(lines))
    assert outcome.stdout == ANSWER * 2
    assert outcome.stderr.splitlines() == [
        "error: there is no tier 'gold'; known tiers: standard, batch",
        "the server's default tier",
        "from the next turn on",
        "the assistant is told nothing first",
        "from the next turn on",
    ]
    assert [(request.model, request.tier) for request in router.fake.requests] == [("m", ""), ("m", "batch")]
    assert contents(router.fake.requests[1]) == ["one", TEXT, "two"]


async def test_timings_are_shown_where_they_are_asked_for(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    outcome = await kvferry(environment, "chat", "--target", router.address, "--timing", stdin="one")
    line = "3 tokens, first after 0.000 s, 4.0 tokens/s, 1 of 4 prompt tokens cached\n"
    assert outcome == Outcome(0, ANSWER, line)


class SmallContext(FakeRouter):
    """Has room for so many messages."""

    def __init__(self, max_messages: int) -> None:
        super().__init__()
        self._max_messages = max_messages

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        if len(request.chat.messages) > self._max_messages:
            raise ContextExceeded("prompt", "has 99 tokens; at most 9 fit")
        await super().Generate(request, context)


@asynccontextmanager
async def serving(fake: FakeRouter) -> AsyncIterator[str]:
    server, address = await start_fake_router(fake)
    yield address
    await server.drain(0)


async def test_a_conversation_too_long_is_told_and_nothing_forgotten_unasked(
    kvferry: Kvferry, environment: dict[str, str]
) -> None:
    fake = SmallContext(max_messages=2)
    lines = ["one", "two", "/history", "/drop 7", "/retry"]
    async with serving(fake) as address:
        outcome = await kvferry(environment, "chat", "--target", address, stdin="\n".join(lines))
    assert outcome.stdout == f"{ANSWER}user: one\nassistant: {TEXT}\n{ANSWER}"
    error, hint, forgotten = outcome.stderr.splitlines()
    assert error == "error: prompt: has 99 tokens; at most 9 fit"
    assert hint == "/drop forgets the oldest turn, /clear all of them; then /retry asks again"
    assert forgotten == "1 turn forgotten, 0 kept"
    assert [contents(request) for request in fake.requests] == [["one"], ["two"]]


async def test_the_oldest_turns_are_forgotten_where_the_user_says_so_beforehand(
    kvferry: Kvferry, environment: dict[str, str]
) -> None:
    fake = SmallContext(max_messages=3)
    async with serving(fake) as address:
        arguments = ["chat", "--target", address, "--drop-oldest"]
        outcome = await kvferry(environment, *arguments, stdin="one\ntwo\nthree\n")
        assert outcome == Outcome(0, ANSWER * 3, "1 turn forgotten, 1 kept\n")
        assert contents(fake.requests[-1]) == ["two", TEXT, "three"]
    async with serving(SmallContext(max_messages=0)) as address:
        outcome = await kvferry(environment, "chat", "--target", address, "--drop-oldest", stdin="one\n")
        assert outcome == Outcome(0, "", "error: prompt: has 99 tokens; at most 9 fit\n")


class SlowRouter(FakeRouter):
    """Its first answer never ends."""

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        if self.requests:
            return await super().Generate(request, context)
        self.requests.append(request)
        for event in events(request)[:2]:
            await context.write(event)
        await asyncio.Event().wait()


async def test_on_a_terminal_ctrl_c_ends_an_answer_and_figures_are_shown(environment: dict[str, str]) -> None:
    fake = SlowRouter()
    ours, theirs = pty.openpty()
    shown = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: shown.extend(os.read(ours, 4096)))
    async with serving(fake) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvferry.cli.app", "chat", "--target", address),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
        )
        try:
            await until(lambda: b"> " in shown, timeout_s=60.0)
            os.write(ours, b"one\n")
            await until(lambda: TEXT[:5].encode() in shown)
            process.send_signal(signal.SIGINT)
            await until(lambda: shown.count(b"> ") == 2)
            assert b"interrupted; this turn is left out, /retry asks again" in shown
            os.write(ours, b"two\n")
            await until(lambda: b"1 of 4 prompt tokens cached" in shown)
            os.write(ours, b"\x04")
            assert await process.wait() == 0
        finally:
            loop.remove_reader(ours)
            os.close(theirs)
            os.close(ours)
    assert contents(fake.requests[1]) == ["two"]
