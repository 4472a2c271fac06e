"""What the prefix cache costs where nothing is shared, and what it saves where all is. One run on this machine.

Cost: the engine alone (no services) runs prompts that share nothing, with the cache on and off in turn, over and over:

    throughput_ratio    tokens a second with the cache ÷ without it; the median over pairs of neighbouring rounds
    ratio_quartiles     the middle half of the pairs lies between these
    bookkeeping_share   time in hashing, looking up, announcing and publishing ÷ time of the whole run, from a
                        profile of the functions that only the cache needs; less noisy than the ratio

Saving: a request of 1,000 tokens through router, prefill and decode, then the same one again:

    ttft_ms             request sent → first token received
    computed_tokens     tokens that prefill computed
    shipped_blocks      blocks that crossed from prefill to decode
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.block_manager import BlockManager
from engine.core import EngineCore
from engine.local import generate
from engine.opening import open_core
from engine.sequence import Priority, Sequence
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.cluster import LocalCluster
from kvferry.config import Config, load_config
from kvferry.model_store import ModelStore
from kvferry.sampling import SamplingParams

NUM_ROUNDS = 15
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 192, 16
NUM_BLOCKS = 200
"""So few that the cache has to evict from the second round on, and that no round is the first to touch its memory."""
LONG_PROMPT_TOKENS = 1_000
CACHE_FUNCTIONS = ("match_prefix", "computing_next", "_announce", "_retract", "publish")


@dataclass(frozen=True, slots=True)
class CacheCost:
    """The cache where nothing is shared."""

    throughput_ratio: float
    ratio_quartiles: tuple[float, float]
    bookkeeping_share: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One request of the pair."""

    ttft_ms: float
    computed_tokens: int
    cached_tokens: int
    shipped_blocks: int
    reused_blocks: int


def run_memory() -> dict[str, object]:
    """Both measurements with the default model."""
    config = load_config()
    folder = ModelStore(config.model.cache_path).prepare(config.model.name)
    config = config.replace("model", path=str(folder))
    config = config.replace("router", grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    first, second = asyncio.run(_same_prompt_twice(config))
    return {
        "cache_cost": dataclasses.asdict(measure_cache_cost(config)),
        "first": dataclasses.asdict(first),
        "second": dataclasses.asdict(second),
        "ttft_ratio": round(first.ttft_ms / second.ttft_ms, 1),
    }


def measure_cache_cost(config: Config) -> CacheCost:
    """Rounds with and without the cache in turn, on one core object each, so that both have the same model."""
    core = open_core(config.replace("engine", num_threads=2, preemption="recompute", num_blocks=NUM_BLOCKS))
    rates: dict[bool, list[float]] = {True: [], False: []}
    share = 0.0
    for number in range(NUM_ROUNDS + 1):  # the first pair warms up
        for caching in (number % 2 == 0, number % 2 == 1):
            core.block_manager.prefix_caching = caching
            with _timed(BlockManager, CACHE_FUNCTIONS) as spent:
                rate = _rate(core, seed=number)
            if number:
                rates[caching].append(rate)
                share = max(share, spent.total_s / spent.wall_s) if caching else share
    ratios = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
    low, middle, high = (round(value, 4) for value in statistics.quantiles(ratios, n=4))
    return CacheCost(middle, (low, high), round(share, 5), round(statistics.median(rates[True]), 1))


def _rate(core: EngineCore, seed: int) -> float:
    """Tokens, computed and sampled, a second."""
    rng = random.Random(f"{seed}/{core.block_manager.prefix_caching}")
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    sequences = [
        Sequence(
            f"s{number}",
            [rng.randrange(1_000, 40_000) for _ in range(NUM_PROMPT_TOKENS)],
            sampling,
            priority=Priority(arrival=number),
            hash_root=core.hash_root(),
        )
        for number in range(NUM_PROMPTS)
    ]
    begin_s = time.perf_counter()
    generate(core, sequences)
    return NUM_PROMPTS * (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS) / (time.perf_counter() - begin_s)


@dataclass(slots=True)
class _Spent:
    total_s: float = 0.0
    wall_s: float = 0.0


@contextlib.contextmanager
def _timed(owner: type, names: tuple[str, ...]) -> Iterator[_Spent]:
    """Time spent inside methods of a class, calls among them counted once."""
    spent, depth = _Spent(), [0]
    originals: dict[str, Callable[..., Any]] = {name: getattr(owner, name) for name in names}

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            begin_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                depth[0] -= 1
                spent.total_s += time.perf_counter() - begin_s if depth[0] == 0 else 0.0

        return call

    begin_s = time.perf_counter()
    for name, original in originals.items():
        setattr(owner, name, wrapped(original))
    try:
        yield spent
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
        spent.wall_s = time.perf_counter() - begin_s


async def _same_prompt_twice(config: Config) -> list[LongPrompt]:
    rng = random.Random(4)
    prompt = [rng.randrange(1_000, 40_000) for _ in range(LONG_PROMPT_TOKENS)]
    other = [rng.randrange(1_000, 40_000) for _ in range(50)]
    async with LocalCluster(config) as cluster, AsyncClient(cluster.endpoints.grpc) as client:
        await _request(client, other)  # first use of everything
        return [await _request(client, prompt) for _ in range(2)]


async def _request(client: AsyncClient, prompt: list[int]) -> LongPrompt:
    options = GenerateOptions(prompt=prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
    first_s: float | None = None
    begin_s = time.perf_counter()
    async with client.generate(options) as events:
        async for event in events:
            if event.WhichOneof("event") == "delta" and first_s is None:
                first_s = time.perf_counter()
            if event.WhichOneof("event") == "completed":
                completed = event.completed
    assert first_s is not None
    return LongPrompt(
        ttft_ms=round(1e3 * (first_s - begin_s), 1),
        computed_tokens=len(prompt) - completed.usage.cached_tokens,
        cached_tokens=completed.usage.cached_tokens,
        shipped_blocks=completed.timings.num_blocks_shipped,
        reused_blocks=completed.timings.num_blocks_reused,
    )
