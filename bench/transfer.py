"""How fast KV blocks travel between two processes by each transport, digests made and compared, and what bounds them.

    source pool ─► sender ── transport ──► receiver ─► destination pool, each block compared with its digest there

Everything walks pools of 512 MiB, larger than the caches, so that ratios are fair. Of one line of the table, all
systems run in turn, round after round; ratios are of neighbours in a round. GB are 10^9 bytes of block contents.

    copy         memcpy of blocks from pool to pool, one process: the bound of one copy
    digest       xxh3-128 of blocks, one process
    bare         a grpc.aio byte stream, messages as large as the product's, made beforehand, dropped on arrival
    bare, pools  the same, each message cut from the source pool and copied into the receiver's
    grpc, shm    the product: whole shipments from Offer to CommitAck, several blocks each

CPU seconds are user and system time of all threads of both processes.

python -m bench transfer --rounds 3 --json transfer.json --out plots
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from bench.paging.tables import Table
from bench.report import Reporter, Spread, add_json_option, at_least_one, write
from bench.transfer_receiver import BARE_SERVICE, DROP, EPOCH, LAYOUTS, POOL, BlockPool
from kvferry.block_digest import block_digest
from kvferry.config import TransferConfig
from kvferry.errors import InvalidArgument, KvferryError
from kvferry.host_memory import keep_message_buffers
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel, run
from kvferry.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, channel_options
from kvferry.spec import AttemptId
from kvtransfer.budget import ByteBudget
from kvtransfer.grpc_transport import GrpcShipment
from kvtransfer.handshake import terms_of
from kvtransfer.messages import Offer
from kvtransfer.sender import ShipSender
from kvtransfer.sender_link import SenderLink
from kvtransfer.transport import FirstToken, ShipEvent, ShipTransport, TokensComputed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRANSPORTS = ("grpc", "shm")
STREAMS = (1, 4, 16)
NUM_ROUNDS = 7
SHIPMENT_BYTES = 32 << 20
"""Of one shipment, about: 1,450 tokens of SmolLM2-135M in bfloat16."""
MAX_SHIPMENT_MIB = 512
"""The pools'."""
NUM_SHIPMENTS = 16
"""Of one measurement: once around the pool."""
COPY, DIGEST, BARE, BARE_POOLS = "copy", "digest", "bare", "bare, pools"
PROGRESS_TIMEOUT_S = 60.0
RECEIVER_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one system."""

    gb_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a system at one block size and number of streams.

    Attributes:
        of_copy, of_bare, of_bare_pools: rate ÷ that of the same round's copy or bare stream.
        cpu_of_bare, cpu_of_bare_pools: CPU seconds per GB ÷ the bare stream's.
    """

    block_bytes: int
    num_streams: int
    system: str
    gb_per_s: Spread
    cpu_s_per_gb: Spread
    of_copy: Spread
    of_bare: Spread
    of_bare_pools: Spread
    cpu_of_bare: Spread
    cpu_of_bare_pools: Spread
    best_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; `has_digests`: they are at hand, as of blocks that filled earlier, and not made when sent."""

    block_sizes: Sequence[int] = tuple(LAYOUTS)
    streams: Sequence[int] = STREAMS
    transports: Sequence[str] = TRANSPORTS
    num_rounds: int = NUM_ROUNDS
    has_digests: bool = False
    shipment_bytes: int = SHIPMENT_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    keep_message_buffers()  # for bare streams too, in both processes
    plan = Plan(
        options.blocks,
        options.streams,
        options.transports,
        options.rounds,
        options.stored_digests,
        options.shipment_mib << 20,
    )
    try:
        lines = measure(plan, Reporter())
        write(options.json, "transfer", [table(lines)], _figures(plan, lines))
        if options.out is not None:
            _plot(options.out, lines)
    except KvferryError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


def run_transfer() -> dict[str, object]:
    """All of it, as `python -m bench` does."""
    plan = Plan()
    return _figures(plan, measure(plan, Reporter()))


def _figures(plan: Plan, lines: Sequence[Line]) -> dict[str, object]:
    return {"plan": dataclasses.asdict(plan), "lines": [dataclasses.asdict(line) for line in lines]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench transfer",
        description="Ship blocks between two processes, beside memcpy and bare gRPC streams; several minutes.",
        epilog="example: python -m bench transfer --blocks 368640 --streams 1 --rounds 3 --json transfer.json",
    )
    parser.add_argument(
        "--blocks",
        type=_numbers,
        default=tuple(LAYOUTS),
        metavar="A,B",
        help=f"bytes, of {', '.join(map(str, LAYOUTS))}",
    )
    parser.add_argument(
        "--streams", type=_numbers, default=STREAMS, metavar="A,B", help=f"at the same time; at most {NUM_SHIPMENTS}"
    )
    parser.add_argument("--transports", type=_transports, default=TRANSPORTS, metavar="A,B", help=", ".join(TRANSPORTS))
    parser.add_argument("--rounds", type=at_least_one, default=NUM_ROUNDS, help=f"default {NUM_ROUNDS}")
    parser.add_argument("--stored-digests", action="store_true", help="made before, as of blocks that filled earlier")
    parser.add_argument(
        "--shipment-mib",
        type=_shipment_mib,
        default=SHIPMENT_BYTES >> 20,
        help=f"of one shipment, at most {MAX_SHIPMENT_MIB}, default {SHIPMENT_BYTES >> 20}",
    )
    add_json_option(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plots there, as PNG")
    return parser


def _shipment_mib(text: str) -> int:
    number = at_least_one(text)
    if number > MAX_SHIPMENT_MIB:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_SHIPMENT_MIB}, got {number}")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no transport {unknown[0]!r}; known: {', '.join(TRANSPORTS)}")
    return names


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(plan: Plan, report: Reporter) -> list[Line]:
    """One receiver process a block size."""
    for block_bytes in plan.block_sizes:
        if block_bytes not in LAYOUTS:
            raise InvalidArgument("--blocks", f"{block_bytes} is none of {', '.join(map(str, LAYOUTS))}")
    if not all(0 < number <= NUM_SHIPMENTS and NUM_SHIPMENTS % number == 0 for number in plan.streams):
        raise InvalidArgument("--streams", f"numbers that divide {NUM_SHIPMENTS} are allowed")
    lines = []
    for block_bytes in plan.block_sizes:
        with _Receiver(block_bytes) as receiver:
            lines += run(_measure_size(plan, receiver, block_bytes, report))
    return lines


class _Receiver:
    """The other process."""

    def __init__(self, block_bytes: int) -> None:
        command = [sys.executable, "-m", "bench.transfer_receiver", str(block_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.bare_address = ""

    def __enter__(self) -> _Receiver:
        assert self._process.stdout is not None
        self.address, self.bare_address = self._process.stdout.readline().split()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=RECEIVER_START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @property
    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        return time.clock_gettime(~self._process.pid << 3 | 2)  # the clock id that clock_getcpuclockid(3) makes


async def _measure_size(plan: Plan, receiver: _Receiver, block_bytes: int, report: Reporter) -> list[Line]:
    async with _opened_systems(plan, receiver, block_bytes) as systems:
        lines: list[Line] = []
        for num_streams in plan.streams:
            samples: dict[str, list[Sample]] = {name: [] for name in systems}
            for number in range(plan.num_rounds + 1):  # the first round warms up
                for name, transfer in systems.items():
                    sample = await _sample(transfer, num_streams, receiver)
                    if number:
                        samples[name].append(sample)
            lines += _lines(block_bytes, num_streams, samples)
            shown = ", ".join(f"{line.system} {line.gb_per_s.median:.2f}" for line in lines[-len(systems) :])
            report(f"{block_bytes} bytes, {num_streams} streams, GB/s: {shown}")
        return lines


Transfer = Callable[[int], Awaitable[int]]
"""Moves blocks in so many streams; returns the bytes moved."""


async def _sample(transfer: Transfer, num_streams: int, receiver: _Receiver) -> Sample:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time() + receiver.cpu_s
    num_bytes = await transfer(num_streams)
    spent_s, spent_cpu_s = time.perf_counter() - begin_s, time.process_time() + receiver.cpu_s - begin_cpu_s
    return Sample(num_bytes / spent_s / 1e9, spent_cpu_s / (num_bytes / 1e9))


def _lines(block_bytes: int, num_streams: int, samples: Mapping[str, Sequence[Sample]]) -> list[Line]:
    def ratio(name: str, other: str, attribute: str) -> Spread:
        pairs = zip(samples[name], samples[other], strict=True)
        return Spread.of([getattr(one, attribute) / getattr(two, attribute) for one, two in pairs])

    return [
        Line(
            block_bytes,
            num_streams,
            name,
            gb_per_s=Spread.of([sample.gb_per_s for sample in own]),
            cpu_s_per_gb=Spread.of([sample.cpu_s_per_gb for sample in own]),
            of_copy=ratio(name, COPY, "gb_per_s"),
            of_bare=ratio(name, BARE, "gb_per_s"),
            of_bare_pools=ratio(name, BARE_POOLS, "gb_per_s"),
            cpu_of_bare=ratio(name, BARE, "cpu_s_per_gb"),
            cpu_of_bare_pools=ratio(name, BARE_POOLS, "cpu_s_per_gb"),
            best_gb_per_s=max(sample.gb_per_s for sample in own),
        )
        for name, own in samples.items()
    ]


@asynccontextmanager
async def _opened_systems(plan: Plan, receiver: _Receiver, block_bytes: int) -> AsyncIterator[dict[str, Transfer]]:
    """All systems with their connections; in each round they run in this order."""
    source = BlockPool(block_bytes)
    digests = source.digests() if plan.has_digests else None
    options = channel_options(DEFAULT_MAX_MESSAGE_BYTES)
    async with grpc.aio.insecure_channel(receiver.bare_address, options=options) as bare:
        systems: dict[str, Transfer] = {
            COPY: _copying(source),
            DIGEST: _digesting(source),
            BARE: _streaming(bare, DROP, [bytes(message) for message in source.messages()]),
            BARE_POOLS: _streaming(bare, POOL, _Cut(source.messages())),
        }
        async with opened_transports(plan.transports, receiver.address, LAYOUTS[block_bytes]) as transports:
            for name, transport in transports.items():
                systems[name] = _shipping(transport, source, digests, plan.shipment_bytes)
            yield systems


@asynccontextmanager
async def opened_transports(
    names: Sequence[str], address: str, layout: KvLayout
) -> AsyncIterator[dict[str, ShipTransport]]:
    """Ways to ship to `address`, by the values of `transfer.transport`, each with a connection of its own."""
    async with AsyncExitStack() as stack:
        transports: dict[str, ShipTransport] = {}
        for name in names:
            config = TransferConfig.model_validate({"transport": name})
            hello = terms_of(config, layout).hello("bench", EPOCH, PROGRESS_TIMEOUT_S)
            channel = await stack.enter_async_context(RpcChannel(address))
            total = ByteBudget(config.max_inflight_bytes)
            link = SenderLink(channel, hello, total, config.max_inflight_bytes_per_peer)
            stack.push_async_callback(link.close)
            transports[name] = GrpcShipment(channel, link)
        yield transports


def _copying(source: BlockPool) -> Transfer:
    destination = BlockPool(source.block_bytes)

    async def copy(num_streams: int) -> int:
        for index in range(source.num_blocks):
            destination.block(index)[:] = source.block(index)
        return source.num_blocks * source.block_bytes

    return copy


def _digesting(source: BlockPool) -> Transfer:
    async def digest(num_streams: int) -> int:
        for index in range(source.num_blocks):
            block_digest(source.block(index))
        return source.num_blocks * source.block_bytes

    return digest


# -- bare streams -----------------------------------------------------------------------------------------------------


class _Cut(Sequence[bytes]):
    """Messages copied out of the pool when they are sent."""

    def __init__(self, frames: list[memoryview]) -> None:
        self._frames = frames

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._frames[index])


def _streaming(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes]) -> Transfer:
    stream: Any = channel.stream_stream(f"/{BARE_SERVICE}/{method}")

    async def send(numbers: range) -> int:
        call = stream()
        num_bytes = 0
        for number in numbers:
            message = messages[number]
            num_bytes += len(message)
            await call.write(message)
        await call.done_writing()
        await call.read()
        return num_bytes

    async def transfer(num_streams: int) -> int:
        parts = [range(begin, len(messages), num_streams) for begin in range(num_streams)]
        return sum(await asyncio.gather(*(send(part) for part in parts)))

    return transfer


# -- shipments --------------------------------------------------------------------------------------------------------


class _Source:
    """The blocks of one prompt in the source pool (`kvtransfer.transport.BlockSource`)."""

    def __init__(self, pool: BlockPool, first: int, digests: Sequence[bytes] | None) -> None:
        self._pool = pool
        self._first = first
        self._digests = digests

    async def secure(self) -> None:
        """The blocks stay."""

    def read(self, block_index: int, num_tokens: int) -> memoryview:
        return self._pool.block(self._first + block_index)

    def digest(self, block_index: int) -> bytes | None:
        return self._digests[(self._first + block_index) % self._pool.num_blocks] if self._digests else None


def _shipping(
    transport: ShipTransport, pool: BlockPool, digests: Sequence[bytes] | None, shipment_bytes: int
) -> Transfer:
    layout = LAYOUTS[pool.block_bytes]
    num_blocks = max(1, shipment_bytes // layout.block_bytes)
    num_tokens = num_blocks * layout.block_size
    hashes = tuple(index.to_bytes(32, "little") for index in range(num_blocks))
    num_made = 0

    async def ship(number: int) -> None:
        nonlocal num_made
        num_made += 1
        id = AttemptId(f"bench{num_made}", 1)
        offer = Offer(id, EPOCH, layout, hashes, num_tokens, progress_timeout_s=PROGRESS_TIMEOUT_S)
        events: asyncio.Queue[ShipEvent] = asyncio.Queue()
        events.put_nowait(TokensComputed(num_tokens))
        events.put_nowait(FirstToken((1,)))
        source = _Source(pool, number * num_blocks, digests)
        summary = await transport.ship(ShipSender(offer), source, events)
        assert (summary.num_blocks_shipped, summary.num_nacks) == (num_blocks, 0)

    async def ship_one_by_one(numbers: range) -> None:
        for number in numbers:
            await ship(number)

    async def transfer(num_streams: int) -> int:
        parts = [range(begin, NUM_SHIPMENTS, num_streams) for begin in range(num_streams)]
        await asyncio.gather(*(ship_one_by_one(part) for part in parts))
        return NUM_SHIPMENTS * num_blocks * layout.block_bytes

    return transfer


# -- reporting --------------------------------------------------------------------------------------------------------


def table(lines: Sequence[Line]) -> Table:
    """The lines as Markdown; ratios are medians."""
    return Table(
        "transfer",
        "Shipping blocks between two processes",
        "Median of the rounds, quartiles in brackets. ÷ copy, ÷ bare: rate over that of the same round's memcpy or "
        "bare gRPC stream. CPU: seconds of both processes. Pools: the bare stream that cuts messages from a pool and "
        "copies them into one.",
        (
            "block KiB",
            "streams",
            "system",
            "GB/s",
            "best",
            "CPU s/GB",
            "÷ copy",
            "÷ bare",
            "÷ bare, pools",
            "CPU ÷ bare",
            "CPU ÷ bare, pools",
        ),
        tuple(_row(line) for line in lines),
    )


def _row(line: Line) -> tuple[str | int | float | None, ...]:
    is_stream = line.system not in (COPY, DIGEST)
    ratios = (line.of_bare, line.of_bare_pools, line.cpu_of_bare, line.cpu_of_bare_pools)
    return (
        line.block_bytes >> 10,
        line.num_streams if is_stream else None,
        line.system,
        line.gb_per_s.text(),
        line.best_gb_per_s,
        line.cpu_s_per_gb.text(),
        line.of_copy.median,
        *(ratio.median if is_stream else None for ratio in ratios),
    )


def _plot(folder: Path, lines: Sequence[Line]) -> None:
    """Rate and CPU time by block size, one curve a system and number of streams."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("--out", "plots need matplotlib; install kvferry[bench]") from None
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, attribute, unit in ((left, "gb_per_s", "GB/s"), (right, "cpu_s_per_gb", "CPU s/GB")):
        _draw(axes, attribute, lines)
        axes.set_yscale("log")
        axes.set_xlabel("block, KiB")
        axes.set_ylabel(unit)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(folder / "transfer.png", dpi=120)


def _draw(axes: Axes, attribute: str, lines: Sequence[Line]) -> None:
    """A colour a system, a dash pattern a number of streams."""
    systems = list(dict.fromkeys(line.system for line in lines))
    counts = list(dict.fromkeys(line.num_streams for line in lines))
    for system, num_streams in dict.fromkeys((line.system, line.num_streams) for line in lines):
        is_stream = system not in (COPY, DIGEST)
        if not is_stream and num_streams != counts[0]:
            continue  # the same thing again
        own = [line for line in lines if (line.system, line.num_streams) == (system, num_streams)]
        spreads: list[Spread] = [getattr(line, attribute) for line in own]
        axes.errorbar(
            [f"{line.block_bytes >> 10}" for line in own],
            [one.median for one in spreads],
            [[one.median - one.low for one in spreads], [one.high - one.median for one in spreads]],
            color=f"C{systems.index(system)}",
            linestyle=("-", "--", ":")[counts.index(num_streams) % 3],
            marker="o",
            markersize=3,
            capsize=2,
            label=f"{system}, {num_streams}" if is_stream else system,
        )
