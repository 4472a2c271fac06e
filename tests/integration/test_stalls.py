"""Workers that stop, die or are asked to go, as real processes: the other side frees what it held, in bounded time."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.scripted import ScriptConfig
from kvferry.config import Config
from kvferry.errors import Unavailable
from kvferry.rpc import RpcChannel
from kvferry.wire import spec_to_pb
from kvferry.worker_process import RunningWorker
from kvtransfer.faults import Fault, FaultKind, Faults
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.conftest import ONCE
from tests.support.pair import FULL_BLOCKS, OUTPUT_TOKENS, Prompts
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.tokenizers import byte_level_tokenizer, write_model_folder
from tests.support.worker_processes import Watch, WorkerProcess, exit_code, started, watching, worker_process
from tests.support.workers import (
    assert_idle,
    make_spec,
    running_worker,
    scripted_config,
    scripted_folder,
    set_faults,
    until,
)

pytestmark = pytest.mark.processes

DEADLINE_S = 1.0
"""Progress timeout of the requests here."""
SLACK_S = 1.0
"""For what follows the deadline: a turn of the event loops, a step, and a machine that others use too."""
SHORT_DELAY_S = 0.4
"""A block leaves this late: long enough to stop a process before, and it leaves when the process goes on."""
FOR_EVER_S = 60.0


class Model:
    """A scripted model, prompts for it and configurations of workers over it."""

    def __init__(self, folder: Path, **script: object) -> None:
        self.folder = folder
        self.prompts = Prompts(ScriptConfig.model_validate(script))
        self._model = scripted_folder(folder / "model", **script)

    def config(self, **engine: int) -> Config:
        return scripted_config(self._model, **{"max_chunk_tokens": 4, **engine})

    def begin(
        self,
        prefill: RunningWorker | WorkerProcess,
        decode: RunningWorker | WorkerProcess,
        *,
        num_prompt_tokens: int = 22,
        max_tokens: int = OUTPUT_TOKENS,
        timeout_s: float = DEADLINE_S,
        local_prefill: bool = False,
    ) -> PairRequest:
        """A request under way between two workers, wherever they run."""
        spec = make_spec(self.prompts.next_id(), self.prompts.draw(num_prompt_tokens), max_tokens)
        return PairRequest(prefill.address, decode.address, spec, timeout_s=timeout_s, local_prefill=local_prefill)

    async def check_serves(
        self, prefill: RunningWorker | WorkerProcess, decode: RunningWorker | WorkerProcess, num_requests: int = 1
    ) -> None:
        """LIVE and EQ: as many whole requests at once get the right tokens."""
        requests = [self.begin(prefill, decode, timeout_s=5.0) for _ in range(num_requests)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(self.prompts.is_right(request) for request in requests)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def late(block_index: int, delay_s: float) -> Faults:
    return Faults((Fault(FaultKind.DELAY, block_index, delay_s=delay_s),))


def late_prefill(
    model: Model, block_index: int, delay_s: float, **engine: int
) -> AbstractAsyncContextManager[WorkerProcess]:
    """A prefill process whose shipments send one block late."""
    faults = {"allow_faults": True, "shipping": [{"kind": "delay", "block_index": block_index, "delay_s": delay_s}]}
    return worker_process(model.folder, model.config(**engine).replace("faults", **faults), "prefill_svc")


# -- stopped ----------------------------------------------------------------------------------------------------------


async def test_decode_frees_what_a_stopped_prefill_was_shipping_and_serves_others(model: Model) -> None:
    async with (
        late_prefill(model, 3, SHORT_DELAY_S) as stopped,
        running_worker("prefill", model.config()) as other,
        running_worker("decode", model.config(num_blocks=14)) as decode,
        watching(decode.address) as figures,
        watching(stopped.address) as figures_of_stopped,
    ):
        request = model.begin(stopped, decode)
        await until(lambda: decode.role.load().num_blocks_shipped == 3)
        stopped.send(signal.SIGSTOP)
        await assert_freed_in_time(figures)
        assert not request.decode.done()  # the router is there: its call is not ended for prefill's sake
        await model.check_serves(other, decode, 3)
        # The late sender goes on with its next block, while those it would write belong to others.
        others = [asyncio.ensure_future(model.check_serves(other, decode, 3)) for _ in range(3)]
        stopped.send(signal.SIGCONT)
        assert isinstance(await failure_of(request.prefill), Unavailable)
        await asyncio.gather(*others)
        await until(lambda: figures_of_stopped.is_idle)
        await request.end(Ending.CHANNELS)
        await model.check_serves(stopped, decode)
        await assert_idle(other, decode)


async def assert_freed_in_time(figures: Watch) -> None:
    """No block is held by the progress deadline."""
    before_s = time.monotonic()
    num_before = figures.num_statuses
    await until(lambda: figures.load.num_used_blocks > 0)
    await until(lambda: figures.num_statuses > num_before and figures.load.num_used_blocks == 0)
    assert time.monotonic() - before_s < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("delay_s", [SHORT_DELAY_S, FOR_EVER_S])
async def test_prefill_frees_what_it_was_shipping_to_a_stopped_decode_and_serves_others(
    model: Model, delay_s: float
) -> None:
    """With the short delay all frames and the Commit wait in the stopped process's buffers, and it reads them later."""
    async with (
        running_worker("prefill", model.config(), faults=late(3, delay_s)) as prefill,
        worker_process(model.folder, model.config(num_blocks=14), "decode_svc") as stopped,
        running_worker("decode", model.config()) as other,
        watching(prefill.address) as figures,
        watching(stopped.address) as figures_of_stopped,
    ):
        request = model.begin(prefill, stopped)
        await until(lambda: figures_of_stopped.load.num_blocks_shipped == 3)
        stopped.send(signal.SIGSTOP)
        await assert_freed_in_time(figures)
        assert isinstance(await failure_of(request.prefill), Unavailable)
        set_faults(prefill)
        await model.check_serves(prefill, other, 3)
        await request.end(Ending.CHANNELS)
        stopped.send(signal.SIGCONT)
        await until(lambda: figures_of_stopped.is_idle)
        await model.check_serves(prefill, stopped, 3)
        await assert_idle(prefill, other)


@ONCE
async def test_a_router_that_falls_silent_loses_its_call(tmp_path: Path) -> None:
    """Its keepalive is answered by a thread of its own; only heartbeats tell that it still thinks."""
    model = Model(tmp_path, step_delay_s=0.01)
    async with running_worker("decode", model.config()) as decode, RpcChannel(decode.address) as channel:
        spec = make_spec("silent", model.prompts.draw(), 200)
        start = worker_pb2.DecodeStart(sequence=spec_to_pb(spec), local_prefill=True, progress_timeout_s=0.3)
        with pytest.raises(Unavailable, match="the router made no progress"):
            async with channel.duplex(worker_pb2_grpc.DecodeServiceStub(channel.grpc).Decode) as call:
                await call.write(worker_pb2.DecodeRequest(start=start))
                while await call.read() is not grpc.aio.EOF:
                    pass
        await assert_idle(decode)


@ONCE
async def test_a_decode_process_stopped_while_it_decodes_goes_on_where_it_was(tmp_path: Path) -> None:
    """A pause shorter than the deadline costs nothing but time."""
    model = Model(tmp_path, step_delay_s=0.005)
    async with (
        running_worker("prefill", model.config()) as prefill,
        worker_process(model.folder, model.config(), "decode_svc") as stopped,
    ):
        request = model.begin(prefill, stopped, max_tokens=40)
        await request.has_tokens(3)
        stopped.send(signal.SIGSTOP)
        num_tokens = len(request.result.token_ids)
        await asyncio.wait([request.decode], timeout=DEADLINE_S / 2)
        assert len(request.result.token_ids) < num_tokens + 20
        stopped.send(signal.SIGCONT)
        await request.finished()
        assert model.prompts.is_right(request)


# -- killed -----------------------------------------------------------------------------------------------------------


async def kill_and_check(process: WorkerProcess, survivor: RunningWorker, *requests: PairRequest) -> None:
    """The survivor frees at once, because a connection that breaks needs no deadline, and while its own call lives."""
    process.send(signal.SIGKILL)
    assert await process.exit_code() == -signal.SIGKILL
    before_s = time.monotonic()
    await until(lambda: survivor.role.load().num_used_blocks == 0)
    assert time.monotonic() - before_s < DEADLINE_S
    for request in requests:
        assert isinstance(await failure_of(request.prefill), Unavailable)
    await asyncio.gather(*(request.end(Ending.CHANNELS) for request in requests))
    await assert_idle(survivor)


@ONCE
async def test_prefill_killed_while_the_request_is_in_its_queue(tmp_path: Path) -> None:
    model = Model(tmp_path, step_delay_s=0.02)
    async with (
        running_worker("decode", model.config(num_blocks=512)) as decode,
        worker_process(tmp_path, model.config(max_running=1, num_blocks=512), "prefill_svc") as prefill,
        watching(prefill.address) as figures,
    ):
        first = model.begin(prefill, decode, num_prompt_tokens=1500)
        await until(lambda: figures.load.num_running == 1)
        queued = model.begin(prefill, decode)
        await until(lambda: figures.load.num_waiting == 1)
        await kill_and_check(prefill, decode, first, queued)


async def test_prefill_killed_between_two_chunks(tmp_path: Path) -> None:
    model = Model(tmp_path, step_delay_s=0.02)
    async with (
        running_worker("decode", model.config(num_blocks=512)) as decode,
        worker_process(tmp_path, model.config(num_blocks=512), "prefill_svc") as prefill,
    ):
        request = model.begin(prefill, decode, num_prompt_tokens=1500)
        await until(lambda: decode.role.load().num_blocks_shipped >= 3)
        await kill_and_check(prefill, decode, request)


async def test_prefill_killed_while_its_grant_waits(model: Model) -> None:
    async with (
        running_worker("decode", model.config(num_blocks=16)) as decode,
        worker_process(model.folder, model.config(), "prefill_svc") as prefill,
    ):
        engine = decode.role.engine  # type: ignore[attr-defined]
        taken = await engine.run(lambda core: core.pool.allocate(12))
        request = model.begin(prefill, decode)
        await until(lambda: decode.role.load().num_waiting == 1)
        prefill.send(signal.SIGKILL)
        await until(lambda: decode.role.load().num_waiting == 0)
        assert decode.role.load().num_used_blocks == 12 and not request.decode.done()
        await engine.run(lambda core: core.pool.free(taken))
        await request.end(Ending.CHANNELS)
        await assert_idle(decode)


@pytest.mark.parametrize("block_index", [3, FULL_BLOCKS], ids=["in mid-shipment", "between first token and Committed"])
async def test_prefill_killed(model: Model, block_index: int) -> None:
    async with (
        running_worker("decode", model.config()) as decode,
        late_prefill(model, block_index, FOR_EVER_S) as prefill,
    ):
        request = model.begin(prefill, decode)
        await until(lambda: decode.role.load().num_blocks_shipped == block_index)
        await until(lambda: block_index < FULL_BLOCKS or request.result.first_token is not None)
        await kill_and_check(prefill, decode, request)


@ONCE
async def test_prefill_killed_while_decode_runs_costs_nothing(tmp_path: Path) -> None:
    model = Model(tmp_path, step_delay_s=0.005)
    async with (
        running_worker("decode", model.config()) as decode,
        worker_process(tmp_path, model.config(), "prefill_svc") as prefill,
    ):
        request = model.begin(prefill, decode)
        await request.has_tokens(3)
        prefill.send(signal.SIGKILL)
        await request.finished()
        assert model.prompts.is_right(request)
        await assert_idle(decode)


async def test_decode_killed_while_a_grant_waits(model: Model) -> None:
    async with (
        running_worker("prefill", model.config(), faults=late(3, FOR_EVER_S)) as prefill,
        worker_process(model.folder, model.config(num_blocks=10), "decode_svc") as decode,
        watching(decode.address) as figures,
    ):
        granted = model.begin(prefill, decode)
        await until(lambda: figures.load.num_used_blocks > 0)
        waiting = model.begin(prefill, decode)
        await until(lambda: figures.load.num_waiting == 1)
        await kill_and_check(decode, prefill, granted, waiting)


@pytest.mark.parametrize("block_index", [3, FULL_BLOCKS], ids=["in mid-shipment", "between first token and Committed"])
async def test_decode_killed_and_started_anew_at_its_address(model: Model, block_index: int) -> None:
    """R011, R100: the peer is another one, and the first shipment to it works."""
    async with running_worker("prefill", model.config(), faults=late(block_index, FOR_EVER_S)) as prefill:
        async with (
            worker_process(model.folder, model.config(), "decode_svc") as decode,
            watching(decode.address) as figures,
        ):
            request = model.begin(prefill, decode)
            await until(lambda: figures.load.num_blocks_shipped == block_index)
            await until(lambda: block_index < FULL_BLOCKS or request.result.first_token is not None)
            await kill_and_check(decode, prefill, request)
        set_faults(prefill)
        async with worker_process(model.folder, model.config(), "decode_svc", listen=decode.address) as anew:
            assert anew.address == decode.address
            await model.check_serves(prefill, anew)
        await assert_idle(prefill)


@ONCE
async def test_decode_killed_while_it_decodes(tmp_path: Path) -> None:
    model = Model(tmp_path, step_delay_s=0.01)
    async with (
        running_worker("prefill", model.config()) as prefill,
        worker_process(tmp_path, model.config(), "decode_svc") as decode,
    ):
        request = model.begin(prefill, decode, max_tokens=200)
        await request.has_tokens(3)
        decode.send(signal.SIGKILL)
        assert isinstance(await failure_of(request.decode), Unavailable)
        await request.end(Ending.CHANNELS)
        await assert_idle(prefill)


async def test_decode_is_serving_while_a_prefill_worker_dies_on_it(model: Model) -> None:
    """R010: asked all the time, from the middle of a shipment until others were served."""
    answers: set[int] = set()
    async with (
        late_prefill(model, FULL_BLOCKS - 1, FOR_EVER_S) as prefill,
        running_worker("prefill", model.config()) as other,
        running_worker("decode", model.config()) as decode,
        RpcChannel(decode.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel.grpc)

        async def ask_until_done(call: asyncio.Future[None]) -> None:
            while not call.done():
                answers.add((await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)).status)

        request = model.begin(prefill, decode)
        await until(lambda: decode.role.load().num_blocks_shipped >= 2)
        prefill.send(signal.SIGKILL)
        await ask_until_done(request.prefill)
        assert isinstance(await failure_of(request.prefill), Unavailable)
        await request.end(Ending.CHANNELS)
        served = asyncio.ensure_future(model.check_serves(other, decode, 4))
        await ask_until_done(served)
        await served
        await assert_idle(decode)
    assert answers == {health_pb2.HealthCheckResponse.SERVING}


# -- asked to go ------------------------------------------------------------------------------------------------------


async def test_sigterm_lets_a_running_decode_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    """R151; also a shipment that begins only now still arrives, because its decode was running."""
    model = Model(tmp_path, step_delay_s=0.01)
    async with (
        running_worker("prefill", model.config(), faults=late(FULL_BLOCKS, SHORT_DELAY_S)) as prefill,
        worker_process(tmp_path, model.config(), "decode_svc") as decode,
        watching(decode.address) as figures,
        RpcChannel(decode.address) as channel,
    ):
        shipping = model.begin(prefill, decode)
        decoding = model.begin(prefill, decode, local_prefill=True, max_tokens=60)
        await until(lambda: len(decoding.result.token_ids) >= 3 and figures.load.num_blocks_shipped == FULL_BLOCKS)
        decode.send(signal.SIGTERM)
        await until(lambda: figures.status.draining)
        health = await health_pb2_grpc.HealthStub(channel.grpc).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = model.begin(prefill, decode)
        failure = await failure_of(refused.decode)
        assert isinstance(failure, Unavailable) and "draining" in failure.message
        for request in (shipping, decoding):
            await request.finished()
            assert model.prompts.is_right(request)
        assert await decode.exit_code() == 0
        await refused.end(Ending.CHANNELS)
        assert "Traceback" not in decode.log.read_text()


async def test_sigterm_lets_a_running_prefill_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    model = Model(tmp_path, step_delay_s=0.01)
    async with (
        running_worker("decode", model.config()) as decode,
        worker_process(tmp_path, model.config(), "prefill_svc") as prefill,
        watching(prefill.address) as figures,
    ):
        running = model.begin(prefill, decode, num_prompt_tokens=120)
        await until(lambda: decode.role.load().num_blocks_shipped >= 2)
        prefill.send(signal.SIGTERM)
        await until(lambda: figures.status.draining)
        refused = model.begin(prefill, decode)
        failure = await failure_of(refused.prefill)
        assert isinstance(failure, Unavailable) and "draining" in failure.message
        await running.finished()
        assert model.prompts.is_right(running)
        assert await prefill.exit_code() == 0
        await refused.end(Ending.CHANNELS)
        await assert_idle(decode)


@ONCE
@pytest.mark.parametrize("step_delay_s", [0.02, 0.5], ids=["short steps", "long steps"])
async def test_sigterm_twice_ends_at_once_with_a_status(tmp_path: Path, step_delay_s: float) -> None:
    model = Model(tmp_path, step_delay_s=step_delay_s)
    async with (
        worker_process(tmp_path, model.config(num_blocks=512), "decode_svc") as decode,
        watching(decode.address) as figures,
    ):
        request = model.begin(decode, decode, local_prefill=True, max_tokens=1000, timeout_s=5.0)
        await until(lambda: figures.load.num_running == 1)
        decode.send(signal.SIGTERM)
        await until(lambda: figures.status.draining)
        decode.send(signal.SIGTERM)
        before_s = time.monotonic()
        failure = await failure_of(request.decode)
        assert isinstance(failure, Unavailable) and "shutting down" in failure.message
        assert await decode.exit_code() == 0
        assert time.monotonic() - before_s < step_delay_s + 2.0
        await request.end(Ending.CHANNELS)
        assert "Traceback" not in decode.log.read_text()


# -- that cannot start ------------------------------------------------------------------------------------------------


@ONCE
async def test_what_keeps_a_worker_from_starting_is_one_line_and_a_failure(tmp_path: Path) -> None:
    good, bad = scripted_folder(tmp_path / "good"), scripted_folder(tmp_path / "bad", colour=1)
    no_weights = write_model_folder(tmp_path / "empty", byte_level_tokenizer(), config={"model_type": "llama"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = await asyncio.gather(
            what_it_says(tmp_path, scripted_config(good), "decode_svc", "--listen", f"127.0.0.1:{port}"),
            what_it_says(tmp_path, scripted_config(good), "prefill_svc", "--listen", "nonsense"),
            what_it_says(tmp_path, scripted_config(bad), "prefill_svc"),
            what_it_says(tmp_path, scripted_config(no_weights), "decode_svc"),
        )
    for line, word in zip(said, (f"127.0.0.1:{port}", "'nonsense'", "colour", "model.safetensors"), strict=True):
        assert word in line


async def what_it_says(folder: Path, config: Config, *arguments: str) -> str:
    """Starts a worker that must fail; its one line."""
    with started(folder, config, *arguments) as (process, log):
        assert await exit_code(process, timeout_s=30.0) == 1
    lines = [line for line in log.read_text().splitlines() if not line.startswith("{")]  # those are events
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]
