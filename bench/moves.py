"""What a draining decode worker costs the streams it lets go of: the pause, with their blocks shipped from there and
with their output computed again by a prefill worker.

One prefill and two decode processes and, in this process, two routers over them, one a way. SmolLM2-135M in bfloat16,
prompts of 256 random tokens, none ever repeated, one request at a time, the two ways in turn. The worker that decodes
is drained without grace when the client has so many output tokens; the pause is the longest gap between tokens from
then on.

    ordinary ms   pause where prefill computes the output again and ships what the other decode worker lacks: all
    moved ms      pause where the draining worker ships it

python -m bench moves --tokens 64,256,512 --json moves.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

from bench.paging.tables import Table
from bench.report import Reporter, Spread, add_json_option, at_least_one, write
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.cluster import LocalCluster
from kvferry.config import Config, load_config
from kvferry.errors import KvferryError
from kvferry.model_store import ModelStore
from kvferry.telemetry import start_telemetry
from router.app import RouterApp

DTYPE = "bfloat16"
NUM_PROMPT_TOKENS = 256
NUM_LATER_TOKENS = 16
NUM_TOKENS = (8, 16, 32, 64, 256, 512)
NUM_PAIRS = 5
READY_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 300.0
ORDINARY, MOVED = "ordinary", "moved"


@dataclass(frozen=True, slots=True)
class Figures:
    """One number of output tokens."""

    num_tokens: int
    num_requests: int
    ordinary_s: Spread
    moved_s: Spread
    ratio: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench moves",
        description="Measure the pause of streams that leave a draining decode worker; a quarter of an hour.",
        epilog="example: python -m bench moves --tokens 64,256 --requests 5 --json moves.json",
    )
    known = ",".join(map(str, NUM_TOKENS))
    parser.add_argument("--tokens", type=_numbers, default=NUM_TOKENS, metavar="A,B", help=f"output; default {known}")
    parser.add_argument("--requests", type=at_least_one, default=NUM_PAIRS, help=f"a way; default {NUM_PAIRS}")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    logging.getLogger("router").setLevel(logging.ERROR)  # each drain ends a call, as it should
    try:
        lines = asyncio.run(measure(options.tokens, options.requests, Reporter()))
    except KvferryError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    write(options.json, "moves", [table(lines)], {"lines": [dataclasses.asdict(line) for line in lines]})
    return 0


def run_moves() -> dict[str, object]:
    """As `python -m bench` does."""
    return {"lines": [dataclasses.asdict(line) for line in asyncio.run(measure(NUM_TOKENS, NUM_PAIRS, Reporter()))]}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least_one(part) for part in text.split(","))


async def measure(numbers: Sequence[int], num_pairs: int, report: Reporter) -> list[Figures]:
    """One deployment for all."""
    config = load_config()
    folder = ModelStore(config.model.cache_path).prepare(config.model.name)
    config = config.replace("model", path=str(folder), dtype=DTYPE)
    config = config.replace("router", grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(config, num_decode=2))
        workers = cluster.endpoints.workers
        addresses = {role: [one.address for one in workers if one.role == role] for role in ("prefill", "decode")}
        clients = {
            way: await _client(stack, config.replace("router", min_moved_tokens=min_moved_tokens, **addresses))
            for way, min_moved_tokens in ((ORDINARY, 0), (MOVED, 1))
        }
        report("serving")
        bench = _Bench(clients)
        for way in clients:
            await bench.pause_s(way, 4)  # first use of everything, the links between decode workers included
            await bench.pause_s(way, 4)
        return [await _measure_one(bench, number, num_pairs, report) for number in numbers]


async def _client(stack: AsyncExitStack, config: Config) -> AsyncClient:
    telemetry = start_telemetry(config.telemetry, "router", "router")
    stack.push_async_callback(telemetry.shutdown)
    router = await stack.enter_async_context(RouterApp(config, telemetry))
    await router.wait_ready(READY_TIMEOUT_S)
    return await stack.enter_async_context(AsyncClient(router.address))


async def _measure_one(bench: _Bench, num_tokens: int, num_pairs: int, report: Reporter) -> Figures:
    pauses_s: dict[str, list[float]] = {ORDINARY: [], MOVED: []}
    for number in range(num_pairs):
        for way in pauses_s if number % 2 == 0 else reversed(pauses_s):  # drift hits both alike
            pauses_s[way].append(await bench.pause_s(way, num_tokens))
        last = " ".join(f"{way} {1e3 * values[-1]:.0f} ms" for way, values in pauses_s.items())
        report(f"{num_tokens} tokens, {number + 1}: {last}")
    ordinary, moved = (Spread.of(pauses_s[way]) for way in (ORDINARY, MOVED))
    return Figures(num_tokens, num_pairs, ordinary, moved, moved.median / ordinary.median)


class _Bench:
    """Requests of either way, each with its own prompt."""

    def __init__(self, clients: dict[str, AsyncClient]) -> None:
        self._clients = clients
        self._generator = random.Random(0)

    async def pause_s(self, way: str, num_tokens: int) -> float:
        """The longest gap between two tokens once the decode worker drains, which begins with `num_tokens` there."""
        client = self._clients[way]
        prompt = [self._generator.randrange(1_000, 40_000) for _ in range(NUM_PROMPT_TOKENS)]
        max_tokens = num_tokens + NUM_LATER_TOKENS
        options = GenerateOptions(prompt=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        arrivals_s: list[float] = []
        drain: asyncio.Task[str] | None = None
        async with client.generate(options, timeout_s=REQUEST_TIMEOUT_S) as events:
            async for event in events:
                if event.WhichOneof("event") == "delta":
                    arrivals_s += [time.perf_counter()] * len(event.delta.token_ids)
                if event.WhichOneof("event") == "completed":
                    num_attempts = event.completed.timings.num_attempts
                if drain is None and len(arrivals_s) >= num_tokens:
                    drain = asyncio.create_task(_drain(client))
        assert drain is not None and num_attempts == 2, f"{num_attempts} attempts; a move is the second"
        await client.undrain_worker(await drain)
        await self._wait_ready()
        return max(end - begin for begin, end in pairwise(arrivals_s[num_tokens - 1 :]))

    async def _wait_ready(self) -> None:
        for client in self._clients.values():
            while any(worker.state != "ready" for worker in await client.workers()):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.05)


async def _drain(client: AsyncClient) -> str:
    """Drains the decode worker that runs something, without grace; its name."""
    busy = next(one for one in await client.workers() if one.role == "decode" and one.num_requests)
    async with client.drain_worker(busy.id, grace_s=0.0) as progress:
        async for _ in progress:
            pass
    return busy.id


def table(lines: Sequence[Figures]) -> Table:
    """The lines as Markdown."""
    return Table(
        "moves",
        "Leaving a draining decode worker",
        f"Medians, quartiles in brackets; prompts of {NUM_PROMPT_TOKENS} random tokens, one request at a time. Pause "
        "of the stream where prefill computes the output again, and where the draining worker ships its blocks.",
        ("output tokens", "requests", "ordinary ms", "moved ms", "ratio"),
        tuple(
            (line.num_tokens, line.num_requests, _ms(line.ordinary_s), _ms(line.moved_s), line.ratio) for line in lines
        ),
    )


def _ms(spread: Spread) -> str:
    return Spread(1e3 * spread.median, 1e3 * spread.low, 1e3 * spread.high).text(1)
