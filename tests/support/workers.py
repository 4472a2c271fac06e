"""Real workers in the test's own event loop, on port 0, and a caller that plays the router."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from opentelemetry.sdk.trace.export import SpanExporter

from decode_svc.role import DecodeRole
from engine.core import EngineCore
from engine.scripted import SCRIPT_FILE
from kvferry.config import Config, EngineConfig, ModelConfig, TransferConfig
from kvferry.rpc import RpcChannel
from kvferry.sampling import SamplingParams
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.telemetry import start_telemetry
from kvferry.wire import spec_to_pb
from kvferry.worker_process import OpenRole, RunningWorker, start_worker
from kvtransfer.faults import NO_FAULTS, Fault, Faults
from prefill_svc.role import PrefillRole
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc


@dataclass(slots=True)
class Defaults:
    """What configurations made here have where a test says nothing; see tests/integration/conftest.py."""

    transport: Literal["auto", "shm", "grpc"] = "auto"


DEFAULTS = Defaults()


def open_role(role: str, faults: Faults = NO_FAULTS) -> OpenRole:
    """How a role is opened; `faults` are those a prefill worker commits in every shipment."""
    return partial(PrefillRole, faults=faults) if role == "prefill" else DecodeRole


def scripted_folder(folder: Path, **script: object) -> Path:
    """A model folder for the scripted runner (`engine/scripted.py`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT_FILE).write_text(json.dumps(script))
    return folder


def scripted_config(folder: Path, **engine: Any) -> Config:
    """Configuration of workers over a scripted folder; small blocks and a small pool unless `engine` says otherwise."""
    values = {"block_size": 4, "num_blocks": 64, **engine}
    return Config(
        model=ModelConfig(name="scripted", path=str(folder), dtype="float32"),
        engine=EngineConfig(**values),
        transfer=TransferConfig(transport=DEFAULTS.transport),
    )


@asynccontextmanager
async def running_worker(
    role: str,
    config: Config,
    *,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    worker_id: str = "",
    exporter: SpanExporter | None = None,
    faults: Faults = NO_FAULTS,
) -> AsyncIterator[RunningWorker]:
    """One worker for the length of the block.

    Where everything runs over shared memory prefill insists on it: then tests may also call decode without a link.
    """
    if role == "decode" and DEFAULTS.transport == config.transfer.transport == "shm":
        config = config.replace("transfer", transport="auto")
    worker_id = worker_id or f"{role}-0"
    telemetry = start_telemetry(config.telemetry, role, worker_id, exporter=exporter)
    worker = await start_worker(
        role,
        open_role(role, faults),
        config,
        listen,
        advertise=advertise,
        worker_id=worker_id,
        telemetry=telemetry,
    )
    try:
        yield worker
    finally:
        await worker.stop()
        await telemetry.shutdown()


def free_address() -> str:
    """For a server that others are told of before it starts, or that has the same address in all its lives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def core_of(worker: RunningWorker) -> EngineCore:
    """The worker's engine."""
    core = worker.role.core  # type: ignore[attr-defined]
    assert isinstance(core, EngineCore)
    return core


def set_faults(worker: RunningWorker, *faults: Fault) -> None:
    """What goes wrong in every shipment of a worker from the next one on; nothing where none is given."""
    servicer = getattr(worker.role, "move_servicer", None) or worker.role.servicer  # type: ignore[attr-defined]
    servicer.options = dataclasses.replace(servicer.options, faults=Faults(faults))


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns when `condition` holds, which the test expects soon; fails after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        await asyncio.sleep(0.002)


async def until_equal(value: Callable[[], object], expected: object, timeout_s: float = 10.0) -> None:
    """Returns when `value` is the expected one; shows the last one where that takes too long."""
    with suppress(AssertionError):
        await until(lambda: value() == expected, timeout_s)
    found = value()
    assert found == expected, f"{found} is not {expected}"


async def assert_idle(*workers: RunningWorker, timeout_s: float = 10.0) -> None:
    """LEAK: every block is free or cached, no sequence, no attempt, no waiting grant is left."""
    for worker in workers:
        core = core_of(worker)
        await until(lambda core=core: not core.sequences and core.pool.counts.used == 0, timeout_s)  # type: ignore[misc]
        await worker.role.engine.run(lambda core: core.check_integrity())  # type: ignore[attr-defined]
        servicer = worker.role.servicer  # type: ignore[attr-defined]
        await until(lambda servicer=servicer: not getattr(servicer, "_attempts", None), timeout_s)  # type: ignore[misc]
        await until(lambda servicer=servicer: not getattr(servicer, "_running", None), timeout_s)  # type: ignore[misc]
        mover = getattr(worker.role, "move_servicer", None)
        await until(lambda mover=mover: not getattr(mover, "_running", None), timeout_s)  # type: ignore[misc]
        admission = getattr(worker.role, "admission", None)
        assert admission is None or admission.num_waiting == 0


@dataclass(slots=True)
class PairResult:
    """What one request brought, as the router would see it; tokens and finishes by choice."""

    choices: tuple[int, ...] = (0,)
    first_token: worker_pb2.FirstToken | None = None
    done: worker_pb2.PrefillDone | None = None
    committed: worker_pb2.Committed | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Any] = field(default_factory=dict)
    beams: list[worker_pb2.Beam] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Those of the (first) choice."""
        return self.tokens.get(self.choices[0], [])

    @property
    def finish(self) -> Any:
        """That of the (first) choice."""
        return self.finishes.get(self.choices[0])

    def is_finished(self) -> bool:
        """Whether the last tokens came; they may be prefill's or decode's to bring."""
        return bool(self.beams) or all(choice in self.finishes for choice in self.choices)

    def take_first(self, first: worker_pb2.FirstToken) -> None:
        """A token that prefill sampled; decode's may be here before it."""
        self.first_token = first
        self.tokens.setdefault(first.choice, []).insert(0, first.token_id)
        if first.HasField("finish"):
            self.finishes[first.choice] = first.finish

    def take_tokens(self, message: worker_pb2.DecodeTokens) -> None:
        """Tokens that decode sampled."""
        self.tokens.setdefault(message.choice, []).extend(message.token_ids)
        if message.HasField("finish"):
            self.finishes[message.choice] = message.finish


def make_spec(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    *,
    attempt: int = 1,
    num_prompt_tokens: int = 0,
    **sampling: Any,
) -> SequenceSpec:
    """A greedy sequence unless `sampling` says otherwise."""
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
    return SequenceSpec(AttemptId(request_id, attempt), tuple(prompt), num_prompt_tokens or len(prompt), params)


class PairCaller:
    """Plays the router for one pair of workers."""

    def __init__(self, prefill: RpcChannel, decode: RpcChannel, *, timeout_s: float = 5.0) -> None:
        self._prefill_channel, self._decode_channel = prefill, decode
        self._prefill = worker_pb2_grpc.PrefillServiceStub(prefill.grpc)
        self._decode = worker_pb2_grpc.DecodeServiceStub(decode.grpc)
        self._timeout_s = timeout_s

    async def generate(self, spec: SequenceSpec) -> PairResult:
        """Runs one request through both workers."""
        result = PairResult(tuple(range(spec.choice, spec.choice + spec.num_choices)))
        async with self._decode_channel.duplex(self._decode.Decode) as decode:
            registered = await self.register(decode, spec)
            prefill = asyncio.ensure_future(self.prefill(spec, registered, result))
            try:
                await self._read_tokens(decode, prefill, result)
                await prefill
            finally:
                prefill.cancel()
        return result

    def open_decode(self) -> Any:
        """A Decode call, to be written to and read from by hand; use as a context manager."""
        return self._decode_channel.duplex(self._decode.Decode)

    async def register(self, decode: Any, spec: SequenceSpec, *, local_prefill: bool = False) -> worker_pb2.Registered:
        """Sends Start and awaits Registered."""
        start = worker_pb2.DecodeStart(
            sequence=spec_to_pb(spec), local_prefill=local_prefill, progress_timeout_s=self._timeout_s
        )
        await decode.write(worker_pb2.DecodeRequest(start=start))
        while not (response := await decode.read()).HasField("registered"):
            assert response.HasField("heartbeat"), response  # a worker in a long step may beat before it answers
        registered: worker_pb2.Registered = response.registered
        return registered

    async def prefill(self, spec: SequenceSpec, registered: worker_pb2.Registered | None, result: PairResult) -> None:
        """The Prefill call from begin to end."""
        target = None
        if registered is not None:
            target = worker_pb2.ShipTarget(address=registered.ship_address, epoch=registered.epoch)
        request = worker_pb2.PrefillRequest(
            sequence=spec_to_pb(spec), target=target, progress_timeout_s=self._timeout_s
        )
        async with self._prefill_channel.stream(self._prefill.Prefill, request) as call:
            async for response in call:
                match response.WhichOneof("event"):
                    case "first_token":
                        result.take_first(response.first_token)
                    case "done":
                        result.done = response.done

    async def _read_tokens(self, decode: Any, prefill: asyncio.Future[None], result: PairResult) -> None:
        while not result.is_finished():
            reading = asyncio.ensure_future(decode.read())
            await asyncio.wait([reading, prefill], return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and (result.is_finished() or prefill.exception()):
                reading.cancel()
                return
            response = await reading
            assert hasattr(response, "WhichOneof"), "decode ended the stream before its finish"
            match response.WhichOneof("event"):
                case "committed":
                    result.committed = response.committed
                case "tokens":
                    result.take_tokens(response.tokens)
                case "beams":
                    result.beams = list(response.beams.beams)


@asynccontextmanager
async def running_pair(
    prefill_config: Config, decode_config: Config | None = None, *, timeout_s: float = 5.0, faults: Faults = NO_FAULTS
) -> AsyncIterator[tuple[RunningWorker, RunningWorker, PairCaller]]:
    """A prefill and a decode worker, and a caller for them."""
    async with (
        running_worker("prefill", prefill_config, faults=faults) as prefill,
        running_worker("decode", decode_config or prefill_config) as decode,
        RpcChannel(prefill.address) as prefill_channel,
        RpcChannel(decode.address) as decode_channel,
    ):
        yield prefill, decode, PairCaller(prefill_channel, decode_channel, timeout_s=timeout_s)
