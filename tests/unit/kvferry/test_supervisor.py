"""Real child processes: ready lines, failures, restarts, draining, orphans."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import SupervisorConfig
from kvferry.errors import FailedPrecondition, Unavailable
from kvferry.rpc import Liveness, RpcChannel, ask_liveness
from kvferry.step_log import MappedStepLog
from kvferry.supervisor import MAX_LAST_LINE_CHARS, Child, ChildSpec, Supervisor

pytestmark = pytest.mark.processes

CHILD = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1]); mode = sys.argv[2]; listen = sys.argv[4]
lives = folder / "lives"
life = int(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text(str(life))
sys.stderr.write("one line of log\\n")
if mode == "fails":
    sys.stderr.write("error: tensor x is missing\\n"); sys.exit(3)
if mode == "events":
    sys.stderr.write('{"event": "loading"}\\nTraceback\\nValueError: x\\n'); sys.exit(3)
if mode == "hangs":
    time.sleep(600)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif mode == "crashes":
    signal.signal(signal.SIGTERM, lambda *_: (sys.stderr.write("bad things\\n" + "x" * 5000 + "\\n"), os._exit(3)))
elif mode == "drains":
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)))
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("some library printed this", flush=True)
address = listen.replace(":0", ":4242") if listen.endswith(":0") else listen
threads, nice, group = os.environ["OMP_NUM_THREADS"], os.nice(0), os.getpgid(0)
ready = {"ready": True, "address": address, "life": life, "threads": threads, "nice": nice, "group": group}
print(json.dumps(ready), flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ChildSpec]:
    (tmp_path / "fake_service.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    return lambda mode: ChildSpec("decode-0", "fake_service", [str(tmp_path), mode], num_threads=3, niceness=5)


async def test_ready_child_has_its_environment(spec: Callable[[str], ChildSpec]) -> None:
    lines: list[str] = []
    async with Supervisor(relay=lines.append) as supervisor:
        child = await supervisor.start(spec("serves"))
        assert (child.address, child.ready["threads"]) == ("127.0.0.1:4242", "3")
        assert child.ready["nice"] == os.nice(0) + 5
        assert child.ready["group"] == child.pid != os.getpgid(0)
    assert child.process.returncode == 0
    assert {"one line of log", "some library printed this"} <= set(lines)


async def test_child_that_fails_is_reported_with_its_own_words(spec: Callable[[str], ChildSpec]) -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(FailedPrecondition, match=r"decode-0 ended with exit code 3.*: tensor x is missing"):
            await supervisor.start(spec("fails"))


@pytest.mark.parametrize("mode", ["fails", "events"])
async def test_what_a_failing_child_says_is_shown_once(spec: Callable[[str], ChildSpec], mode: str) -> None:
    lines: list[str] = []
    async with Supervisor(relay=lines.append) as supervisor:
        with pytest.raises(FailedPrecondition) as caught:
            await supervisor.start(spec(mode))
    assert lines == ([] if mode == "fails" else ['{"event": "loading"}'])
    if mode == "events":
        assert caught.value.message.endswith("\n  one line of log\n  Traceback\n  ValueError: x")


async def test_start_and_drain_are_reported(spec: Callable[[str], ChildSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.supervisor.SHOW_WAITING_AFTER_S", 0.0)
    monkeypatch.setattr("kvferry.supervisor.HURRY_GRACE_S", 0.1)
    texts: list[str] = []
    waits = asyncio.Event()

    def report(text: str, event: str, **fields: object) -> None:
        texts.append(text)
        if event == "children_draining":
            waits.set()

    supervisor = Supervisor(grace_s=600, report=report)
    await supervisor.start(spec("stubborn"))
    stopping = asyncio.create_task(supervisor.stop())
    async with asyncio.timeout(30):
        await waits.wait()
        supervisor.hurry()
        await stopping
    assert texts[0] == "starting decode-0"
    assert re.fullmatch(r"decode-0 ready \(\d+ s\)", texts[1])
    assert texts[2:] == ["waiting for decode-0 to end"]


async def test_child_that_never_gets_ready_is_killed_and_reported(spec: Callable[[str], ChildSpec]) -> None:
    async with Supervisor(ready_timeout_s=1.0) as supervisor:
        with pytest.raises(Unavailable, match=r"decode-0 was not ready after 1 s\n  one line of log"):
            await supervisor.start(spec("hangs"))
        assert supervisor.children[0].process.returncode == -signal.SIGKILL


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.01)


async def test_child_that_dies_is_started_again_on_its_address(spec: Callable[[str], ChildSpec]) -> None:
    async with Supervisor(min_backoff_s=0.01) as supervisor:
        child: Child = await supervisor.start(spec("serves"))
        first_pid = child.pid
        os.kill(first_pid, signal.SIGKILL)
        await _until(lambda: child.ready["life"] == 2)
        assert child.pid != first_pid
        assert (child.address, child.num_restarts) == ("127.0.0.1:4242", 1)


def _events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [getattr(record, "fields", {}) for record in caplog.records if record.getMessage() == name]


async def test_what_is_known_of_a_crash_is_one_event(
    spec: Callable[[str], ChildSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps_file = tmp_path / "decode-0.steps"
    log = MappedStepLog(steps_file)
    log.begin(1, 10**9, 3, 4)
    async with Supervisor(min_backoff_s=0.01) as supervisor:
        child = await supervisor.start(dataclasses.replace(spec("crashes"), steps_file=steps_file))
        pid = child.pid
        os.kill(pid, signal.SIGTERM)
        await _until(lambda: child.ready["life"] == 2)
        (crash,) = _events(caplog, "worker_crashed")
        assert (crash["child"], crash["pid"], crash["exit"], crash["stuck"]) == ("decode-0", pid, "exit code 3", "")
        assert crash["stderr"] == ["one line of log", "bad things", "x" * MAX_LAST_LINE_CHARS]
        assert crash["uptime_s"] > 0 and crash["restart_in_s"] == 0.01
        step = {"number": 1, "began_at_unix_s": 1.0, "duration_s": None, "num_sequences": 3, "num_tokens": 4}
        assert crash["last_steps"] == [step]
        assert crash["steps_file"] == str(tmp_path / "decode-0.crashed") and Path(crash["steps_file"]).exists()
        os.kill(child.pid, signal.SIGKILL)
        await _until(lambda: child.ready["life"] == 3)
        last = _events(caplog, "worker_crashed")[-1]
        assert (last["exit"], last["last_steps"], last["steps_file"]) == ("SIGKILL", [], "")


async def test_a_child_that_ends_as_it_was_asked_to_has_not_crashed(
    spec: Callable[[str], ChildSpec], caplog: pytest.LogCaptureFixture
) -> None:
    """As in a rolling restart: SIGTERM from elsewhere, exit code 0, and another life."""
    async with Supervisor(min_backoff_s=0.01) as supervisor:
        child = await supervisor.start(spec("serves"))
        os.kill(child.pid, signal.SIGTERM)
        await _until(lambda: child.ready["life"] == 2)
    assert [event["exit_code"] for event in _events(caplog, "child_ended")] == [0]
    assert not _events(caplog, "worker_crashed")


PROBED = """
import asyncio, sys
from kvferry.process import StopSignals, print_ready
from kvferry.rpc import RpcServer
async def main():
    stop = StopSignals().install()
    server = RpcServer()
    address = await server.start(sys.argv[3], [], serving=False)
    print_ready(address=address)
    if sys.argv[1] == "stuck":
        await server.set_alive(False)
    await stop.requested.wait()
    await server.drain(0)
asyncio.run(main())
"""
PROBES = SupervisorConfig(probe_period_s=0.1, probe_timeout_s=3.0)


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ChildSpec]:
    (tmp_path / "probed_service.py").write_text(PROBED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    return lambda mode: ChildSpec("decode-0", "probed_service", [mode], is_probed=True)


async def test_a_child_that_makes_no_progress_writes_its_stacks_and_is_started_again(
    probed: Callable[[str], ChildSpec], caplog: pytest.LogCaptureFixture
) -> None:
    async with Supervisor(min_backoff_s=0.01, probes=PROBES) as supervisor:
        child = await supervisor.start(probed("stuck"))
        pid = child.pid
        await _until(lambda: child.num_restarts > 0 and child.pid != pid)
        crash = _events(caplog, "worker_crashed")[0]
    assert (crash["pid"], crash["exit"], crash["stuck"]) == (pid, "SIGKILL", "it says that it makes no progress")
    assert any("probed_service.py" in line for line in crash["stderr"]), "its stacks are missing"


async def test_a_child_that_answers_nothing_is_started_again(
    probed: Callable[[str], ChildSpec], caplog: pytest.LogCaptureFixture
) -> None:
    """SIGSTOP: connections are taken, by the kernel, and nothing comes."""
    async with Supervisor(min_backoff_s=0.01, probes=PROBES) as supervisor:
        child = await supervisor.start(probed("serves"))
        pid = child.pid
        os.kill(pid, signal.SIGSTOP)
        await _until(lambda: child.num_restarts == 1 and not child.is_starting)
        (crash,) = _events(caplog, "worker_crashed")
        assert (crash["pid"], crash["exit"], crash["stuck"]) == (pid, "SIGKILL", "it answered nothing for 3 s")
        assert _is_running(child.pid)


async def test_a_child_that_takes_no_requests_is_left_alone(
    probed: Callable[[str], ChildSpec], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains, or waits for its peers: not ready, and not stuck. Probed many times over."""
    num_probes = 0

    async def counted(channel: RpcChannel, timeout_s: float) -> Liveness:
        nonlocal num_probes
        num_probes += 1
        return await ask_liveness(channel, timeout_s)

    monkeypatch.setattr("kvferry.supervisor.ask_liveness", counted)
    async with Supervisor(probes=SupervisorConfig(probe_period_s=0.05, probe_timeout_s=3.0)) as supervisor:
        child = await supervisor.start(probed("serves"))
        await _until(lambda: num_probes > 20)
        assert child.num_restarts == 0
    assert child.process.returncode == 0
    assert not _events(caplog, "worker_crashed")


@pytest.mark.parametrize("how", ["grace", "hurry"])
async def test_child_that_ignores_sigterm_is_killed(
    spec: Callable[[str], ChildSpec], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.supervisor.HURRY_GRACE_S", 0.1)
    supervisor = Supervisor(grace_s=0.1 if how == "grace" else 600)
    child = await supervisor.start(spec("stubborn"))
    if how == "hurry":
        supervisor.hurry()
    async with asyncio.timeout(30):
        await supervisor.stop()
    assert child.process.returncode == -signal.SIGKILL


async def test_hurried_child_ends_by_a_second_sigterm(spec: Callable[[str], ChildSpec]) -> None:
    supervisor = Supervisor(grace_s=600)
    child = await supervisor.start(spec("drains"))
    supervisor.hurry()
    async with asyncio.timeout(30):
        await supervisor.stop()
    assert child.process.returncode == 7


PARENT = """
import asyncio, json, sys
from kvferry.supervisor import ChildSpec, Supervisor
async def main():
    supervisor = Supervisor()
    child = await supervisor.start(ChildSpec("d", "fake_service", [sys.argv[1], "serves"]))
    print(child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
async def test_children_end_when_their_parent_is_killed(spec: Callable[[str], ChildSpec], tmp_path: Path) -> None:
    spec("serves")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child_pid = json.loads(await parent.stdout.readline())
    assert _is_running(child_pid)
    parent.kill()
    await parent.wait()
    await _until(lambda: not _is_running(child_pid))
