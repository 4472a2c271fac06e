"""What the hand-off costs a request: router, prefill and decode as three processes, unloaded, one request at a time.

SmolLM2-135M in bfloat16, prompts of 1,500 random tokens, none ever repeated. Requests that ship (24 tokens) and such
that do not (1 token, which prefill samples) in turn, all with tracing on. Definitions, each a median over requests:

    ttft ms       request sent → first token received, of requests that ship and of those that do not
    ttft ratio    the one median ÷ the other
    second ms     (second token − first token) − median of the later gaps between tokens, at the client
    tail ms       end of the last prefill chunk → commit acknowledged, from the spans of the prefill worker
    ship ms       first block frame → commit acknowledged; it overlaps prefill

python -m bench handoff --transports shm --json handoff.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.paging.tables import Table
from bench.report import Reporter, Spread, add_json_option, at_least_one, write
from bench.spans import RecordedSpan, SpanCollector, collecting_spans
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.cluster import LocalCluster
from kvferry.config import Config, load_config
from kvferry.errors import KvferryError
from kvferry.model_store import ModelStore
from kvferry.telemetry import SpanNames

DTYPE = "bfloat16"
NUM_PROMPT_TOKENS = 1_500
NUM_OUTPUT_TOKENS = 24
NUM_PAIRS = 20
REQUEST_TIMEOUT_S = 120.0
TRANSPORTS = ("grpc", "shm")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; times of arrival count from its sending."""

    arrivals_s: tuple[float, ...]
    ship_s: float
    num_blocks_shipped: int

    @property
    def second_gap_excess_s(self) -> float:
        """How much later the second token came than a later one does."""
        first, *later = [end - begin for begin, end in pairwise(self.arrivals_s)]
        return first - statistics.median(later)


@dataclass(frozen=True, slots=True)
class Figures:
    """One transport."""

    transport: str
    num_requests: int
    ttft_shipping_s: Spread
    ttft_alone_s: Spread
    ttft_ratio: float
    second_gap_excess_s: Spread
    later_gap_s: Spread
    tail_s: Spread
    ship_s: Spread
    num_blocks_shipped: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench handoff",
        description="Measure what shipping adds to first and second token; five minutes a transport, on an idle host.",
        epilog="example: python -m bench handoff --transports shm --requests 20 --json handoff.json",
    )
    known = ", ".join(TRANSPORTS)
    parser.add_argument("--transports", type=_names, default=TRANSPORTS, metavar="A,B", help=f"default {known}")
    parser.add_argument("--requests", type=at_least_one, default=NUM_PAIRS, help=f"of each kind; default {NUM_PAIRS}")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    try:
        lines = measure(options.transports, options.requests, Reporter())
    except KvferryError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    write(options.json, "handoff", [table(lines)], _figures(lines))
    return 0


def run_handoff() -> dict[str, object]:
    """As `python -m bench` does."""
    return _figures(measure(TRANSPORTS, NUM_PAIRS, Reporter()))


def _figures(lines: Sequence[Figures]) -> dict[str, object]:
    return {"lines": [dataclasses.asdict(line) for line in lines]}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def measure(transports: Sequence[str], num_pairs: int, report: Reporter) -> list[Figures]:
    """One deployment a transport."""
    config = load_config()
    folder = ModelStore(config.model.cache_path).prepare(config.model.name)
    config = config.replace("model", path=str(folder), dtype=DTYPE)
    config = config.replace("router", grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    lines = []
    for transport in transports:
        chosen = config.replace("transfer", transport=transport)
        lines.append(asyncio.run(_measure_one(chosen, transport, num_pairs, report)))
    return lines


async def _measure_one(config: Config, transport: str, num_pairs: int, report: Reporter) -> Figures:
    prompts = _Prompts()
    shipping: list[Sample] = []
    alone: list[Sample] = []
    async with collecting_spans() as collector:
        traced = config.replace("telemetry", otlp_endpoint=collector.address)
        async with LocalCluster(traced) as cluster, AsyncClient(cluster.endpoints.grpc) as client:
            report(f"{transport}: serving")
            for max_tokens in (NUM_OUTPUT_TOKENS, 1):
                await _request(client, prompts.next(), max_tokens)  # first use of everything
            begin_ns = time.time_ns()
            for number in range(num_pairs):
                kinds = [(NUM_OUTPUT_TOKENS, shipping), (1, alone)]
                for max_tokens, samples in kinds if number % 2 == 0 else reversed(kinds):  # drift hits both alike
                    samples.append(await _request(client, prompts.next(), max_tokens))
                ttft_s, alone_s = shipping[-1].arrivals_s[0], alone[-1].arrivals_s[0]
                excess_ms = 1e3 * shipping[-1].second_gap_excess_s
                report(f"{transport} {number + 1}: {ttft_s:.3f} s, alone {alone_s:.3f} s, second + {excess_ms:.1f} ms")
        tails_s = _tails_s(collector, begin_ns)  # the processes have ended: every span is here
    return _evaluate(transport, shipping, alone, tails_s)


class _Prompts:
    """Random prompts, each its own."""

    def __init__(self) -> None:
        self._generator = random.Random(0)

    def next(self) -> list[int]:
        return [self._generator.randrange(1_000, 40_000) for _ in range(NUM_PROMPT_TOKENS)]


async def _request(client: AsyncClient, prompt: list[int], max_tokens: int) -> Sample:
    options = GenerateOptions(prompt=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    arrivals_s: list[float] = []
    begin_s = time.perf_counter()
    async with client.generate(options, timeout_s=REQUEST_TIMEOUT_S) as events:
        async for event in events:
            if event.WhichOneof("event") == "delta":
                arrivals_s += [time.perf_counter() - begin_s] * len(event.delta.token_ids)
            if event.WhichOneof("event") == "completed":
                completed = event.completed
    assert len(arrivals_s) == max_tokens
    assert completed.usage.cached_tokens == 0, "prompts must not repeat"
    timings = completed.timings
    assert (timings.num_blocks_shipped > 0) == (max_tokens > 1)
    return Sample(tuple(arrivals_s), timings.ship_s, timings.num_blocks_shipped)


def _tails_s(collector: SpanCollector, begin_ns: int) -> list[float]:
    """End of the last prefill chunk to the end of the shipment, of every request since `begin_ns` that shipped."""
    tails_s = []
    for spans in collector.by_trace().values():
        ships = [span for span in spans if span.name == SpanNames.SHIP]
        if ships and min(span.start_ns for span in spans) >= begin_ns:
            tails_s.append((ships[-1].end_ns - _last_chunk(spans).end_ns) / 1e9)
    return tails_s


def _last_chunk(spans: Sequence[RecordedSpan]) -> RecordedSpan:
    return max((span for span in spans if span.name == SpanNames.PREFILL_CHUNK), key=lambda span: span.end_ns)


def _evaluate(transport: str, shipping: Sequence[Sample], alone: Sequence[Sample], tails_s: Sequence[float]) -> Figures:
    assert len(tails_s) == len(shipping), f"{len(tails_s)} shipments traced, {len(shipping)} made"
    ttft_s = Spread.of([sample.arrivals_s[0] for sample in shipping])
    ttft_alone_s = Spread.of([sample.arrivals_s[0] for sample in alone])
    gaps_s = [end - begin for sample in shipping for begin, end in pairwise(sample.arrivals_s[1:])]
    return Figures(
        transport,
        num_requests=len(shipping),
        ttft_shipping_s=ttft_s,
        ttft_alone_s=ttft_alone_s,
        ttft_ratio=ttft_s.median / ttft_alone_s.median,
        second_gap_excess_s=Spread.of([sample.second_gap_excess_s for sample in shipping]),
        later_gap_s=Spread.of(gaps_s),
        tail_s=Spread.of(tails_s),
        ship_s=Spread.of([sample.ship_s for sample in shipping]),
        num_blocks_shipped=shipping[0].num_blocks_shipped,
    )


def table(lines: Sequence[Figures]) -> Table:
    """The lines as Markdown."""
    return Table(
        "handoff",
        "The hand-off",
        f"Medians, quartiles in brackets; prompts of {NUM_PROMPT_TOKENS} random tokens, {NUM_OUTPUT_TOKENS} output "
        "tokens; alone: 1 output token, nothing is shipped. Second: by how much the second token comes later than the "
        "median of the later gaps. Tail: end of the last prefill chunk to the acknowledged commit.",
        (
            "transport",
            "requests",
            "ttft ms",
            "ttft ms, alone",
            "ratio",
            "second ms",
            "later gap ms",
            "tail ms",
            "ship ms",
            "blocks",
        ),
        tuple(
            (
                line.transport,
                line.num_requests,
                _ms(line.ttft_shipping_s),
                _ms(line.ttft_alone_s),
                line.ttft_ratio,
                _ms(line.second_gap_excess_s),
                _ms(line.later_gap_s),
                _ms(line.tail_s),
                _ms(line.ship_s),
                line.num_blocks_shipped,
            )
            for line in lines
        ),
    )


def _ms(spread: Spread) -> str:
    return Spread(1e3 * spread.median, 1e3 * spread.low, 1e3 * spread.high).text(1)
