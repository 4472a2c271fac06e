"""Workers that come and go while the router runs, and several models behind it: real workers, real router."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import AsyncClient, GenerateOptions, PinOptions
from kvferry.config import Config, ModelConfig, to_toml
from kvferry.errors import (
    InvalidArgument,
    KvferryError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvferry.rpc import RpcChannel, names
from kvferry.telemetry import start_telemetry
from kvferry.worker_process import RunningWorker
from proto.kvferry.v1 import inference_pb2, membership_pb2, membership_pb2_grpc
from router.app import RouterApp
from router.worker import MemberState, Role
from tests.support.deployment import chat_folder, deployment_config
from tests.support.forks import ROOT
from tests.support.workers import assert_idle, running_worker, until

KEY = "a-key-to-join-with"
OPTIONS = GenerateOptions(prompt=list(range(40, 62)), max_tokens=12, temperature=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return chat_folder(tmp_path / "scripted")


@dataclass(frozen=True, slots=True)
class Running:
    """A router and a client of it."""

    app: RouterApp
    client: AsyncClient

    @property
    def states(self) -> dict[str, str]:
        """By the workers' names."""
        return {worker.name: worker.state.value for worker in self.app.membership.workers}

    async def are(self, **states: str) -> None:
        """Returns once these workers, and no others, are in these states; underscores stand for dashes."""
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        try:
            await until(lambda: self.states == wanted)
        except AssertionError:
            assert self.states == wanted

    async def answer(self, options: GenerateOptions = OPTIONS) -> list[int]:
        return (await self.client.complete(options, timeout_s=20.0)).choices[0].token_ids


@asynccontextmanager
async def running_router(config: Config, **router: object) -> AsyncIterator[Running]:
    config = config.replace("router", **router)
    telemetry = start_telemetry(config.telemetry, "router", "router")
    async with RouterApp(config, telemetry) as app, AsyncClient(app.address) as client:
        yield Running(app, client)
    await telemetry.shutdown()


def joining(config: Config, *routers: Running, key: str | None = None) -> Config:
    """Configuration of workers that join these routers."""
    return config.replace("join", routers=[router.app.address for router in routers], key=key)


# -- joining -----------------------------------------------------------------------------------------------------------


async def test_workers_join_every_router_serve_and_leave(folder: Path) -> None:
    config = deployment_config(folder)
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(running_router(config, accept_joins=True)) for _ in range(2)]
        with pytest.raises(Unavailable, match=r"no prefill worker is ready \(none is known\); no decode worker"):
            await routers[0].answer()
        own = joining(config, *routers)
        prefill = await stack.enter_async_context(running_worker("prefill", own))
        async with running_worker("decode", own) as decode:
            for router in routers:
                await router.are(prefill_0="ready", decode_0="ready")
            answers = [await router.answer() for router in routers]
            assert answers[0] == answers[1] and len(answers[0]) == 12
            await assert_idle(prefill, decode)
            async with running_worker("decode", own, worker_id="decode-1"):
                for router in routers:
                    await router.are(prefill_0="ready", decode_0="ready", decode_1="ready")
            for router in routers:
                await router.are(prefill_0="ready", decode_0="ready")
        await routers[1].are(prefill_0="ready")
        with pytest.raises(Unavailable, match=r"no decode worker is ready \(none is known\)"):
            await routers[1].answer()


async def test_a_router_that_restarts_is_joined_again(folder: Path) -> None:
    config = deployment_config(folder)
    async with running_router(config, accept_joins=True) as first:
        address = first.app.address
        async with running_worker("prefill", joining(config, first)), running_worker("decode", joining(config, first)):
            await first.are(prefill_0="ready", decode_0="ready")
            await first.app.drain(0.0)
            await first.app.__aexit__(None, None, None)
            async with running_router(config, accept_joins=True, grpc_listen=address) as second:
                await second.are(prefill_0="ready", decode_0="ready")
                assert len(await second.answer()) == 12


async def test_a_worker_whose_join_fell_silent_stays_while_it_is_watched(folder: Path) -> None:
    """What keeps it listed is its stream, and only that; what keeps it ready is the watch."""
    config = deployment_config(folder)
    async with running_router(config, accept_joins=True) as router, running_worker("decode", config) as decode:
        request = membership_pb2.JoinRequest(
            worker_id="decode-0", role="decode", address=decode.address, progress_timeout_s=0.3
        )
        with pytest.raises(Unavailable, match=r"decode-0 made no progress for 0.3 s"):  # for it says nothing more
            async with RpcChannel(router.app.address) as channel:
                stub = membership_pb2_grpc.MembershipServiceStub(channel.grpc)
                async with channel.duplex(stub.Join) as call:
                    await call.write(request)
                    while True:
                        await call.read()
        assert router.states == {"decode-0": "ready"}, "its watch lives"
        await decode.server.grpc.stop(None)
        await router.are()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"role": "both"}, InvalidArgument, "role: must be one of prefill, decode, got 'both'"),
        ({"address": "nowhere"}, InvalidArgument, "address: must be host:port, got 'nowhere'"),
        ({"address": ""}, InvalidArgument, "address"),
        ({"address": "0.0.0.0:5061"}, InvalidArgument, "address: 0.0.0.0:5061 is no address to connect to"),
        ({"worker_id": "x" * 300}, InvalidArgument, "worker_id: must be at most 256"),
        ({"progress_timeout_s": 0.0}, InvalidArgument, "progress_timeout_s: must be 0.1"),
    ],
)
async def test_what_cannot_join_is_told_why(
    folder: Path, fields: dict[str, object], error: type[KvferryError], message: str
) -> None:
    good: dict[str, object] = {"worker_id": "w", "role": "decode", "address": "127.0.0.1:1", "progress_timeout_s": 5.0}
    async with running_router(deployment_config(folder), accept_joins=True) as router:
        with pytest.raises(error, match=message):
            await join_once(router.app.address, {**good, **fields})
        assert router.states == {}


async def join_once(address: str, fields: dict[str, object], **headers: str) -> membership_pb2.JoinResponse | None:
    """The first answer of a router to one who joins."""
    async with RpcChannel(address, headers=headers) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel.grpc)
        async with channel.duplex(stub.Join) as call:
            await call.write(membership_pb2.JoinRequest(**fields))  # type: ignore[arg-type]
            answer = await call.read()
            assert answer is None or isinstance(answer, membership_pb2.JoinResponse)
            return answer


async def test_only_workers_with_a_key_join(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = deployment_config(folder)
    fields: dict[str, object] = {
        "worker_id": "w",
        "role": "decode",
        "address": "127.0.0.1:1",
        "progress_timeout_s": 5.0,
    }
    async with running_router(config, decode=["127.0.0.1:1"]) as closed:
        with pytest.raises(PermissionDenied, match=r"router\.accept_joins is false"):
            await join_once(closed.app.address, fields)
    async with running_router(config, accept_joins=True, join_keys=[KEY]) as router:
        with pytest.raises(Unauthenticated, match=r"the worker's join.key must be one of the router's"):
            await join_once(router.app.address, fields)
        with pytest.raises(Unauthenticated, match="the join key is not known"):
            await join_once(router.app.address, fields, authorization="Bearer another-key")
        async with running_worker("decode", joining(config, router, key=KEY)):
            await router.are(decode_0="ready")
        async with running_worker("decode", joining(config, router, key="another-key")):
            await until(lambda: "router_not_joined" in caplog.text)
            assert "decode-0" not in router.states
    assert KEY not in caplog.text


async def test_a_worker_learns_that_it_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = deployment_config(folder)
    async with running_router(config, accept_joins=True) as router, running_worker("decode", joining(config, router)):
        await router.are(decode_0="ready")
        other = joining(config.replace("engine", block_size=8), router)
        async with running_worker("decode", other, worker_id="decode-1"):
            await router.are(decode_0="ready", decode_1="refused")
            await until(lambda: told(caplog, "router_says").get("reason", "").startswith("it differs from this"))
            assert "block_size: 4 here, 8 there" in told(caplog, "router_says")["reason"]
        await router.are(decode_0="ready")  # one that was refused is forgotten with its stream


def told(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, str]:
    """Fields of the last such event."""
    records = [record for record in caplog.records if record.getMessage() == event]
    return getattr(records[-1], "fields", {}) if records else {}


async def test_a_worker_that_cannot_be_reached_gets_no_request(folder: Path) -> None:
    config = deployment_config(folder)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        fields: dict[str, object] = {
            "worker_id": "w",
            "role": "decode",
            "address": address,
            "progress_timeout_s": 5.0,
        }
        async with running_router(config, accept_joins=True) as router:
            answer = await join_once(router.app.address, fields)
            assert answer is not None and answer.state == "connecting"
            await until(lambda: not router.app.membership.workers)


async def test_a_request_outlives_the_membership_of_its_worker(folder: Path) -> None:
    """A worker that is listed no more finishes what it runs."""
    config = deployment_config(folder)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(role, config)) for role in ("prefill", "decode")]
        router = await stack.enter_async_context(running_router(config, accept_joins=True))
        membership = router.app.membership
        for role, worker in zip(Role, workers, strict=True):
            membership.list_workers("test", role, frozenset({worker.address}))
        await router.are(prefill_0="ready", decode_0="ready")
        for role in Role:
            membership.list_workers("test", role, frozenset())
        assert router.states == {"prefill-0": "ready", "decode-0": "ready"}, "its stream is its lease"
        assert len(await router.answer()) == 12


# -- names -------------------------------------------------------------------------------------------------------------


async def test_a_name_stands_for_all_its_addresses_and_is_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = deployment_config(folder), set[str]()

    async def resolve(target: str) -> frozenset[str]:
        assert target in ("dns:///decode.example:1", "dns:///prefill.example:1")
        if target.startswith("dns:///prefill") or not found:
            raise OSError("the name server is down")
        return frozenset(found)

    monkeypatch.setattr(names, "resolve", resolve)
    lists = {"decode": ["dns:///decode.example:1"], "prefill": ["dns:///prefill.example:1"], "dns_refresh_s": 0.1}
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(running_worker("decode", config, worker_id=f"decode-{index}"))
            for index in range(3)
        ]
        router = await stack.enter_async_context(running_router(config, **lists))
        await router.are()
        found.update(worker.address for worker in workers[:2])
        await router.are(decode_0="ready", decode_1="ready")
        found.add(workers[2].address)
        await router.are(decode_0="ready", decode_1="ready", decode_2="ready")
        found.remove(workers[0].address)
        await asyncio.sleep(0.3)
        assert router.states["decode-0"] == "ready", "it is there, whatever the name server says"
        await workers[0].server.grpc.stop(None)
        await router.are(decode_1="ready", decode_2="ready")
        found.clear()
        await asyncio.sleep(0.3)
        await router.are(decode_1="ready", decode_2="ready")  # a name server that fails takes nobody away


async def test_localhost_is_resolved() -> None:
    assert "127.0.0.1:5061" in await names.resolve("dns:///localhost:5061")
    with pytest.raises(socket.gaierror):
        await names.resolve("dns:///no-such-host.invalid:5061")


# -- several models ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TwoModels:
    """A router before two models, and the workers of each."""

    router: Running
    large: tuple[RunningWorker, ...]
    small: tuple[RunningWorker, ...]


@pytest.fixture
async def two(folder: Path, tmp_path: Path) -> AsyncIterator[TwoModels]:
    other = chat_folder(tmp_path / "other", lowest_token_id=100)
    small = ModelConfig(name="other", path=str(other), dtype="float32", aliases=("little", "tiny"))
    config = deployment_config(folder)
    config = config.with_models([config.model.model_copy(update={"aliases": ("default",)}), small])
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(config, accept_joins=True))
        workers = {
            model.public_name: tuple(
                [
                    await stack.enter_async_context(
                        running_worker(
                            role, joining(config.of_model(model), router), worker_id=f"{model.public_name}-{role}"
                        )
                    )
                    for role in ("prefill", "decode")
                ]
            )
            for model in config.served_models
        }
        await router.are(scripted_prefill="ready", scripted_decode="ready", other_prefill="ready", other_decode="ready")
        yield TwoModels(router, workers["scripted"], workers["other"])


async def test_each_model_is_served_by_its_own_workers(two: TwoModels) -> None:
    client = two.router.client
    models = await client.models()
    assert [(model.name, tuple(model.aliases), model.is_ready) for model in models] == [
        ("scripted", ("default",), True),
        ("other", ("little", "tiny"), True),
    ]
    answers: dict[str, list[int]] = {}
    for name in ("", "scripted", "default", "other", "little", "tiny"):
        completion = await client.complete(GenerateOptions(OPTIONS.prompt, model=name, max_tokens=12, temperature=0.0))
        assert completion.started.model == ("scripted" if name in ("", "scripted", "default") else "other")
        answers[name] = completion.choices[0].token_ids
    assert answers[""] == answers["scripted"] == answers["default"]
    assert answers["other"] == answers["little"] == answers["tiny"] != answers[""]
    assert (await client.capabilities("little")).model == "other"
    with pytest.raises(NotFound, match="model: there is no model 'gpt-9'; known models: scripted, other"):
        await two.router.answer(GenerateOptions(OPTIONS.prompt, model="gpt-9"))
    with pytest.raises(NotFound, match="gpt-9"):
        await client.capabilities("gpt-9")
    listed = {worker.id: worker.model for worker in await client.workers()}
    assert listed["other-decode"] == "other" and listed["scripted-prefill"] == "scripted"
    await assert_idle(*two.large, *two.small)


async def test_one_model_without_workers_leaves_the_other_alone(two: TwoModels) -> None:
    await two.small[1].stop()
    await two.router.are(scripted_prefill="ready", scripted_decode="ready", other_prefill="ready")
    with pytest.raises(Unavailable, match=r"no decode worker is ready \(none is known\)"):
        await two.router.answer(GenerateOptions(OPTIONS.prompt, model="other"))
    assert len(await two.router.answer()) == 12
    assert two.router.app.why_not_ready() == ()
    assert [model.is_ready for model in await two.router.client.models()] == [True, False]


async def test_a_pin_is_of_one_model(two: TwoModels) -> None:
    await two.router.answer(GenerateOptions(OPTIONS.prompt, model="other", max_tokens=4))
    response = await two.router.client.pin_prefix(PinOptions("p", OPTIONS.prompt, model="little"))
    pinned = {entry.worker: entry.num_blocks for entry in response.workers}
    assert pinned.keys() == {"other-prefill", "other-decode"} and all(pinned.values())


async def test_a_worker_of_a_model_that_is_not_served_is_refused(folder: Path, tmp_path: Path) -> None:
    config = deployment_config(folder)
    stranger = ModelConfig(name="stranger", path=str(chat_folder(tmp_path / "stranger")), dtype="float32")
    async with running_router(config, accept_joins=True) as router:
        async with running_worker("decode", joining(config.of_model(stranger), router)):
            await router.are(decode_0="refused")
            worker = router.app.membership.workers[0]
            assert (worker.state, worker.reason) == (MemberState.REFUSED, "model: scripted here, stranger there")
        info: list[inference_pb2.WorkerInfo] = list(await router.client.workers())
        assert info == []


# -- the commands ------------------------------------------------------------------------------------------------------


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """A `kvferry` command that serves; its ready line. Ended by SIGTERM, with exit code 0."""
    log = folder / f"{arguments[0]}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli.app", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.processes
async def test_the_commands_join_and_serve(folder: Path, tmp_path: Path) -> None:
    config = deployment_config(folder).replace("router", http_listen="127.0.0.1:0")
    file = tmp_path / "kvferry.toml"
    file.write_text(to_toml(config))
    own = ("--config", str(file))
    with ExitStack() as stack:
        worker = ("--listen", "127.0.0.1:0", *own)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            router = f"127.0.0.1:{probe.getsockname()[1]}"
        for role in ("prefill", "decode"):  # before there is a router
            ready = await asyncio.to_thread(
                stack.enter_context, command(tmp_path, role, *worker, "--join", router, "--worker-id", role)
            )
            assert ready["address"].startswith("127.0.0.1:")
        serve = command(tmp_path, "router", "--listen", router, "--accept-joins", *own)
        await asyncio.to_thread(stack.enter_context, serve)
        async with AsyncClient(router) as client:
            async with asyncio.timeout(30.0):
                while [worker.state for worker in await client.workers()] != ["ready", "ready"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # another process's state
            assert len((await client.complete(OPTIONS, timeout_s=20.0)).choices[0].token_ids) == 12


@pytest.mark.processes
async def test_up_serves_several_models(folder: Path, tmp_path: Path) -> None:
    other = ModelConfig(
        name="other", path=str(chat_folder(tmp_path / "other", lowest_token_id=100)), dtype="float32", aliases=("tiny",)
    )
    config = deployment_config(folder)
    file = tmp_path / "kvferry.toml"
    file.write_text(to_toml(config.with_models([config.model, other])))
    with ExitStack() as stack:
        up = command(tmp_path, "up", "--prefill", "0", "--decode", "1", "--ready-json", "--config", str(file))
        ready = await asyncio.to_thread(stack.enter_context, up)
        assert [worker["id"] for worker in ready["workers"]] == ["decode-0", "other-decode-0"]
        async with AsyncClient(ready["grpc"]) as client:
            for name in ("scripted", "other", "tiny"):
                options = GenerateOptions(OPTIONS.prompt, model=name, max_tokens=4, temperature=0.0)
                completion = await client.complete(options, timeout_s=20.0)
                assert completion.started.model == ("other" if name == "tiny" else name)
