"""What arriving blocks cost the decode step: a decode worker that streams to 16 clients, with and without 100 MB/s.

    16 Decode calls (local prefill) ◄── decode worker ◄── paced shipments, digests compared, none committed

SmolLM2-135M in bfloat16, one thread as on a machine of two cores that also prefills; the worker is a process started as
`kvferry up` does, with a clock around its engine's step. The same 16 prompts begin each period anew, so that all
periods see the same batch at the same lengths; periods with and without arriving blocks take turns. Definitions:

    step ms      duration of a step of the engine with all 16 sequences, inside the worker
    interval ms  begin of such a step to the begin of the next: what lies between two steps is in it
    itl ms       one token message of a stream → the next one, at the clients
    MB/s         contents of blocks received and verified, as the worker counts them, ÷ length of the period

p50 and p99 are over all periods of a kind; ratios are with arriving blocks ÷ without.

python -m bench receive --transport shm --rounds 3 --json receive.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio

from bench.paging.tables import Table
from bench.receive_sender import decoding, heard_from
from bench.report import Reporter, Spread, add_json_option, at_least_one, percentile, write
from kvferry.config import Config, child_environment, load_config, to_toml, write_private
from kvferry.errors import KvferryError
from kvferry.model_store import ModelStore
from kvferry.rpc import RpcChannel, run
from kvferry.sampling import SamplingParams
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.supervisor import WORKER_NICENESS, ChildSpec, Supervisor

DTYPE = "bfloat16"
NUM_CLIENTS = 16
NUM_PROMPT_TOKENS = 128
MAX_TOKENS = 4_000
"""More than a period takes; its streams are cancelled."""
NUM_ROUNDS = 5
PERIOD_S = 25.0
WARM_UP_S = 5.0
SETTLE_S = 2.0
"""Between the first shipment and the first step that counts."""
MB_PER_S = 100.0
CHUNK_BLOCKS = 16
"""Blocks that are there at once: those of one chunk of 256 tokens, the default step of a prefill worker."""
START_TIMEOUT_S = 120.0
KINDS = ("without", "with")


@dataclass(frozen=True, slots=True)
class Arrival:
    """How blocks arrive: `chunk_blocks` at once, as often as `mb_per_s` asks for."""

    mb_per_s: float = MB_PER_S
    chunk_blocks: int = CHUNK_BLOCKS


@dataclass(slots=True)
class Period:
    """One period of a kind, by the monotonic clock."""

    begin_s: float
    end_s: float
    mb_per_s: float
    itls_s: list[float]
    steps_s: list[float] = field(default_factory=list)
    intervals_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds, over all periods of a kind."""

    p50_ms: float
    p99_ms: float
    num_values: int

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Percentiles:
        return cls(1e3 * percentile(values_s, 0.5), 1e3 * percentile(values_s, 0.99), len(values_s))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure with and without arriving blocks; `round_p99_ratio` is of the two periods of each round."""

    measure: str
    without: Percentiles
    arriving: Percentiles
    p50_ratio: float
    p99_ratio: float
    round_p99_ratio: Spread


@dataclass(frozen=True, slots=True)
class Figures:
    """One run."""

    transport: str
    num_clients: int
    period_s: float
    chunk_blocks: int
    mb_per_s: Spread
    comparisons: tuple[Comparison, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench receive",
        description="Compare decode steps with and without arriving blocks; five minutes, on an idle machine.",
        epilog="example: python -m bench receive --transport grpc --rounds 5 --json receive.json",
    )
    parser.add_argument("--transport", default="auto", help="transfer.transport of sender and worker; default auto")
    parser.add_argument("--rounds", type=at_least_one, default=NUM_ROUNDS, help=f"of two periods; default {NUM_ROUNDS}")
    parser.add_argument("--period", type=float, default=PERIOD_S, metavar="S", help=f"default {PERIOD_S:g} s")
    parser.add_argument("--rate", type=float, default=MB_PER_S, metavar="MB/S", help=f"default {MB_PER_S:g}")
    parser.add_argument(
        "--chunk",
        type=at_least_one,
        default=CHUNK_BLOCKS,
        metavar="BLOCKS",
        help=f"that arrive at once; default {CHUNK_BLOCKS}",
    )
    add_json_option(parser)
    options = parser.parse_args(arguments)
    try:
        arrival = Arrival(options.rate, options.chunk)
        figures = measure(options.transport, options.rounds, options.period, arrival, Reporter())
    except KvferryError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    write(options.json, "receive", [table(figures)], dataclasses.asdict(figures))
    return 0


def run_receive() -> dict[str, object]:
    """As `python -m bench` does."""
    return dataclasses.asdict(measure("auto", NUM_ROUNDS, PERIOD_S, Arrival(), Reporter()))


def measure(transport: str, num_rounds: int, period_s: float, arrival: Arrival, report: Reporter) -> Figures:
    """Rounds of one period without and one with arriving blocks, in alternating order."""
    config = load_config()
    folder = ModelStore(config.model.cache_path).prepare(config.model.name)
    config = config.replace("model", path=str(folder), dtype=DTYPE).replace("engine", num_threads=1)
    config = config.replace("transfer", transport=transport)
    periods = run(_measure_periods(config, num_rounds, period_s, arrival, report))
    return _evaluate(transport, period_s, arrival, periods)


async def _measure_periods(
    config: Config, num_rounds: int, period_s: float, arrival: Arrival, report: Reporter
) -> dict[str, list[Period]]:
    periods: dict[str, list[Period]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as name:
        steps = Path(name) / "steps"
        async with (
            _running_worker(config, Path(name), steps) as address,
            _running_sender(address, config.transfer.transport, arrival) as sender,
            RpcChannel(address) as channel,
        ):
            report("serving")
            for number in range(num_rounds + 1):  # the first round warms up
                for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                    length_s = period_s if number else min(period_s, WARM_UP_S)
                    period = await _period(channel, length_s, sender if kind == "with" else None)
                    report(f"round {number}, {kind}: {period.mb_per_s:.1f} MB/s, {_brief(period)}")
                    if number:
                        periods[kind].append(period)
        _add_steps(steps, [period for own in periods.values() for period in own])
    return periods


def _brief(period: Period) -> str:
    figures = Percentiles.of(period.itls_s)
    return f"itl p50 {figures.p50_ms:.1f} ms, p99 {figures.p99_ms:.1f} ms"


@asynccontextmanager
async def _running_worker(config: Config, folder: Path, steps: Path) -> AsyncIterator[str]:
    """A decode worker as `kvferry up` starts it, but for the clock around its step; gives its address."""
    file = folder / "worker.toml"
    write_private(file, to_toml(config))
    arguments = [str(steps), "--config", str(file), "--worker-id", "decode-0"]
    spec = ChildSpec("decode-0", "bench.receive_worker", arguments, num_threads=1, niceness=WORKER_NICENESS)
    async with Supervisor(report=lambda *_, **__: None) as supervisor:
        yield (await supervisor.start(spec)).address


class _SenderProcess:
    """`bench/receive_sender.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def tell(self, line: str) -> None:
        """Sends a command and waits until it is done; "" only waits."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(START_TIMEOUT_S):
            answer = await self._process.stdout.readline()
        assert answer == b"done\n", f"the sender answered {answer!r}"


@asynccontextmanager
async def _running_sender(address: str, transport: str, arrival: Arrival) -> AsyncIterator[_SenderProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.receive_sender", address, transport),
        *(str(arrival.mb_per_s), str(arrival.chunk_blocks)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(1),
    )
    try:
        sender = _SenderProcess(process)
        await sender.tell("")
        yield sender
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()


async def _period(channel: RpcChannel, period_s: float, sender: _SenderProcess | None) -> Period:
    """All clients begin; once each has its first token, `period_s` are measured; then all are cancelled."""
    clients = [_Client(channel, number) for number in range(NUM_CLIENTS)]
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(client.has_token.wait() for client in clients))
        if sender is not None:
            await sender.tell("start")
        await asyncio.sleep(SETTLE_S)
        begin_s, begin_bytes = time.monotonic(), await _arrived_bytes(channel)
        await asyncio.sleep(period_s)
        end_s, end_bytes = time.monotonic(), await _arrived_bytes(channel)
        if sender is not None:
            await sender.tell("stop")
    itls_s = [
        end - begin
        for client in clients
        for begin, end in pairwise(client.arrivals_s)
        if begin_s <= begin and end <= end_s
    ]
    return Period(begin_s, end_s, (end_bytes - begin_bytes) / (end_s - begin_s) / 1e6, itls_s)


async def _arrived_bytes(channel: RpcChannel) -> int:
    return (await heard_from(channel)).load.shipped_bytes


class _Client:
    """One stream; every client has the same prompt in every period."""

    def __init__(self, channel: RpcChannel, number: int) -> None:
        generator = random.Random(number)
        tokens = tuple(generator.randrange(1_000, 40_000) for _ in range(NUM_PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        id = AttemptId(f"client{number}-{time.monotonic_ns()}", 1)
        self._spec = SequenceSpec(id, tokens, len(tokens), sampling)
        self._channel = channel
        self._task: asyncio.Task[None] | None = None
        self.arrivals_s: list[float] = []
        self.has_token = asyncio.Event()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._read())

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _read(self) -> None:
        async with decoding(self._channel, self._spec, local_prefill=True) as call:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.HasField("tokens"):
                    self.arrivals_s.append(time.monotonic())
                    self.has_token.set()
        raise AssertionError("a stream ended by itself")


def _add_steps(file: Path, periods: Sequence[Period]) -> None:
    """Steps of the worker with all sequences, by period."""
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    steps = [(float(begin), float(end)) for begin, end, number in lines if int(number) == NUM_CLIENTS]
    for period in periods:
        own = [step for step in steps if period.begin_s <= step[0] and step[1] <= period.end_s]
        period.steps_s = [end - begin for begin, end in own]
        period.intervals_s = [later[0] - earlier[0] for earlier, later in pairwise(own)]


def _evaluate(transport: str, period_s: float, arrival: Arrival, periods: dict[str, list[Period]]) -> Figures:
    measures = {"step": "steps_s", "interval": "intervals_s", "itl": "itls_s"}
    return Figures(
        transport,
        NUM_CLIENTS,
        period_s,
        arrival.chunk_blocks,
        mb_per_s=Spread.of([period.mb_per_s for period in periods["with"]]),
        comparisons=tuple(_compare(name, attribute, periods) for name, attribute in measures.items()),
    )


def _compare(name: str, attribute: str, periods: dict[str, list[Period]]) -> Comparison:
    values = {kind: [getattr(period, attribute) for period in own] for kind, own in periods.items()}
    pooled = {kind: Percentiles.of([value for part in parts for value in part]) for kind, parts in values.items()}
    rounds = zip(values["with"], values["without"], strict=True)
    return Comparison(
        name,
        pooled["without"],
        pooled["with"],
        p50_ratio=pooled["with"].p50_ms / pooled["without"].p50_ms,
        p99_ratio=pooled["with"].p99_ms / pooled["without"].p99_ms,
        round_p99_ratio=Spread.of([percentile(one, 0.99) / percentile(two, 0.99) for one, two in rounds]),
    )


def table(figures: Figures) -> Table:
    """The run as Markdown."""
    return Table(
        "receive",
        f"Decode steps with blocks arriving over {figures.transport}",
        f"{figures.num_clients} clients; {figures.mb_per_s.text(1)} MB/s arrived in the periods with, "
        f"{figures.chunk_blocks} blocks at once. Step: inside the worker. "
        "Interval: begin of a step to the begin of the next. ITL: between token messages of a stream, at the "
        "clients. Ratio by round: p99 of the two periods of a round, median and quartiles.",
        ("measure", "p50 ms", "p50 ms, with", "ratio", "p99 ms", "p99 ms, with", "ratio p99", "by round", "values"),
        tuple(
            (
                one.measure,
                one.without.p50_ms,
                one.arriving.p50_ms,
                one.p50_ratio,
                one.without.p99_ms,
                one.arriving.p99_ms,
                one.p99_ratio,
                one.round_p99_ratio.text(),
                one.without.num_values + one.arriving.num_values,
            )
            for one in figures.comparisons
        ),
    )
