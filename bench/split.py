"""Split over two workers of one core each, through gRPC, beside the bare engine on one core; and a worker's memory.

    python -m bench split                 # five minutes; --quick: one

Rate: 16 streams; tokens that arrive at the client between the moment when all decode and the first end, a second.
The bare engine (`bench/engine_worker.py`) then decodes 16 sequences at the same contexts. Memory: private bytes of the
decode worker beyond the pool and beyond a process that has imported the same modules, while tokens are made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cpu.cases import HIGHEST_ID, LOWEST_ID, Case
from bench.cpu.child import Child
from bench.cpu.demand import Shape
from bench.cpu.page import below, check_part, write_part
from bench.cpu.proc import private_bytes, thread_times_s
from bench.cpu.systems import Machine, System
from bench.paging.tables import Table
from bench.report import Reporter, Spread, add_json_option, at_least_one, write
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.cluster import LocalCluster
from kvferry.config import Config, child_environment, load_config
from kvferry.model_store import ModelStore

NUM_STREAMS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 128, 128
NUM_BLOCKS = 1_024
PART = "bench split"
MEMORY_STREAMS = 32
NUM_SAMPLES = 5
TIMEOUT_S = 120.0
IMPORTS = "import sys, decode_svc.__main__, engine.model_runner; print(flush=True); sys.stdin.read()"


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which all streams decoded.

    Attributes:
        context: mean tokens of a stream.
        streaming_share: processor time of the decode worker's other threads ÷ of its engine's, over the round.
    """

    tokens_per_s: float
    num_steps: int
    context: float
    streaming_share: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; `beyond` of the decode worker beyond pool and imports, by tokens made."""

    pool: int
    imports: int
    beyond: list[tuple[int, int]]


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench split", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--tokens", type=at_least_one, default=100_000, help="made while memory is watched")
    parser.add_argument("--quick", action="store_true", help="two rounds, 4,000 tokens")
    parser.add_argument("--page", type=Path, metavar="FILE", help="Markdown whose part about it is written anew")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    rounds, num_tokens = (2, 4_000) if options.quick else (options.rounds, options.tokens)
    if options.page:
        check_part(options.page, PART)
    report = Reporter()
    report(f"about {20 + 20 * rounds + num_tokens / 400:.0f} s")
    windows, bare, memory = asyncio.run(_run(_config(report), rounds, num_tokens, report))
    figures = {"split": [asdict(one) for one in windows], "bare": bare, "memory": asdict(memory)}
    made = _tables(windows, bare, memory)
    write(options.json, "split", () if options.page else made, figures)
    if options.page:
        write_part(options.page, PART, below(made))
    return 0


def _config(report: Reporter) -> Config:
    config = load_config()
    folder = ModelStore(config.model.cache_path).prepare(config.model.name, report)
    config = config.replace("model", path=str(folder), dtype="bfloat16")
    config = config.replace("router", grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    return config.replace("engine", num_threads=1, num_blocks=NUM_BLOCKS, speculation="none")


async def _run(
    config: Config, rounds: int, num_tokens: int, report: Reporter
) -> tuple[list[Window], list[float], Memory]:
    assert config.model.path is not None
    bare = System("bare", "ours", "bf16").open(Machine(Path(config.model.path), None, threads=1))
    try:
        await asyncio.to_thread(bare.wait_ready)
        async with LocalCluster(config) as cluster, AsyncClient(cluster.endpoints.grpc) as client:
            pid = next(worker.pid for worker in cluster.endpoints.workers if worker.role == "decode")
            windows, rates = [], []
            for number in range(rounds + 1):  # the first warms up
                window = await _streams(client, pid, number)
                rate = await asyncio.to_thread(_bare, bare, number, window)
                report(f"split {window.tokens_per_s:.1f}, bare {rate:.1f} tokens/s")
                if number:
                    windows.append(window)
                    rates.append(rate)
            memory = await _memory(client, pid, config, num_tokens, report)
        return windows, rates, memory
    finally:
        bare.close()


async def _streams(client: AsyncClient, pid: int, number: int) -> Window:
    before = thread_times_s(pid)
    arrivals = await asyncio.gather(
        *(_stream(client, _prompt(f"{number}/{place}"), NUM_OUTPUT_TOKENS) for place in range(NUM_STREAMS))
    )
    after = thread_times_s(pid)
    spent_s = sorted(after[task] - before.get(task, 0.0) for task in after)
    begin_s = max(times[1] for times in arrivals)  # the first token is prefill's
    end_s = min(times[-1] for times in arrivals)
    counts = [sum(begin_s < at_s <= end_s for at_s in times) for times in arrivals]
    before_it = [sum(at_s <= begin_s for at_s in times) for times in arrivals]
    num_steps = round(statistics.mean(counts))
    return Window(
        tokens_per_s=sum(counts) / (end_s - begin_s),
        num_steps=num_steps,
        context=NUM_PROMPT_TOKENS + statistics.mean(before_it) + num_steps / 2,
        streaming_share=sum(spent_s[:-1]) / spent_s[-1],
    )


async def _stream(client: AsyncClient, prompt: list[int], num_tokens: int) -> list[float]:
    """When each token arrived."""
    options = GenerateOptions(prompt=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    arrivals: list[float] = []
    async with client.generate(options) as events:
        async for event in events:
            if event.WhichOneof("event") == "delta":
                arrivals += [time.perf_counter()] * len(event.delta.token_ids)
    assert len(arrivals) == num_tokens
    return arrivals


def _prompt(seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(NUM_PROMPT_TOKENS)]


def _bare(child: Child, number: int, window: Window) -> float:
    """Tokens a second about the same contexts."""
    first = max(1, round(window.context - NUM_PROMPT_TOKENS - window.num_steps / 2))
    case = Case(NUM_STREAMS, NUM_PROMPT_TOKENS, True, window.num_steps, round(window.context))
    child.start(case.prompts(number), first + window.num_steps + NUM_STREAMS, TIMEOUT_S)
    child.decode(first, TIMEOUT_S)
    rate = child.decode(window.num_steps, TIMEOUT_S)
    child.end_batch(TIMEOUT_S)
    return rate


async def _memory(client: AsyncClient, pid: int, config: Config, num_tokens: int, report: Reporter) -> Memory:
    imports = await asyncio.to_thread(_imports_bytes)
    assert config.model.path is not None
    shape = Shape.of(json.loads((Path(config.model.path) / "config.json").read_text()))
    pool = shape.kv_bytes(1, NUM_BLOCKS * config.engine.block_size)
    beyond = [(0, private_bytes(pid) - pool - imports)]
    made = 0
    while made < num_tokens:
        until = len(beyond) * num_tokens / NUM_SAMPLES
        while made < until:
            prompts = [_prompt(f"memory/{made}/{place}") for place in range(MEMORY_STREAMS)]
            await asyncio.gather(*(_stream(client, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts))
            made += MEMORY_STREAMS * NUM_OUTPUT_TOKENS
        beyond.append((made, private_bytes(pid) - pool - imports))
        report(f"{made} tokens: {beyond[-1][1] / 1e6:.0f} MB beyond pool and imports")
    return Memory(pool, imports, beyond)


def _imports_bytes() -> int:
    """Private memory of a process that has imported what a decode worker imports."""
    command = [sys.executable, "-c", IMPORTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(1)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = private_bytes(process.pid)
        process.kill()
    return found


def _tables(windows: Sequence[Window], bare: Sequence[float], memory: Memory) -> list[Table]:
    ratios = [window.tokens_per_s / rate for window, rate in zip(windows, bare, strict=True)]
    rates: tuple[tuple[str, str], ...] = (
        ("split, through gRPC, tokens/s", Spread.of([window.tokens_per_s for window in windows]).text(1)),
        ("bare engine, tokens/s", Spread.of(bare).text(1)),
        ("ratio by round", Spread.of(ratios).text(3)),
        ("context, mean", f"{statistics.mean(window.context for window in windows):.0f}"),
        ("streaming, share of the engine's time", Spread.of([window.streaming_share for window in windows]).text(3)),
    )
    of_rates = Table(
        "split",
        "Split, through gRPC, beside the bare engine",
        "16 streams in bfloat16, prefill and decode worker with one thread each, router and client on the same "
        "machine. Tokens that arrive between the moment when all decode and the first end, a second; the bare engine: "
        "one thread, the same contexts. Streaming: processor time of the decode worker's other threads ÷ of its engine "
        "thread.",
        ("figure", "median (quartiles)"),
        rates,
    )
    lines = tuple((made, round(extra / 1e6)) for made, extra in memory.beyond)
    of_memory = Table(
        "memory",
        "A decode worker's private memory",
        f"MB beyond the pool ({memory.pool / 1e6:.0f} MB) and beyond a process with the same imports "
        f"({memory.imports / 1e6:.0f} MB).",
        ("tokens made", "beyond, MB"),
        lines,
    )
    return [of_rates, of_memory]
