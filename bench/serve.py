"""Closed-loop serving on this machine: router + 1 prefill + 1 decode, one engine alone, and transformers' `generate`.

The same prompts for all, random token ids of the default model, greedy, end of sequence ignored. Definitions:

    ttft_ms         request sent → first token received, median
    tpot_ms         (last token − first token) ÷ (output tokens − 1) of a request, median over requests
    tokens_per_s    output tokens of all requests ÷ wall time of the run
    ship_ms         first block frame → acknowledged commit, median; it overlaps prefill
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from kvferry.client import AsyncClient, GenerateOptions
from kvferry.cluster import LocalCluster
from kvferry.config import Config, load_config
from kvferry.model_store import ModelStore

NUM_PROMPT_TOKENS = 128
NUM_OUTPUT_TOKENS = 32
CONCURRENCY = (1, 8)
REQUESTS_PER_CLIENT = 3
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the table."""

    system: str
    concurrency: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    ship_ms: float | None = None


def run_serve() -> list[dict[str, object]]:
    """All systems, one after the other."""
    config = load_config()
    folder = ModelStore(config.model.cache_path).prepare(config.model.name)
    config = config.replace("model", path=str(folder), dtype=DTYPE)
    config = config.replace("router", grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    figures = [*asyncio.run(_serve("split 1+1", config, 1)), *asyncio.run(_serve("single engine", config, 0))]
    figures.append(_transformers(folder))
    return [dataclasses.asdict(line) for line in figures]


async def _serve(system: str, config: Config, num_prefill: int) -> list[Figures]:
    async with (
        LocalCluster(config, num_prefill=num_prefill, num_decode=1) as cluster,
        AsyncClient(cluster.endpoints.grpc) as client,
    ):
        await _request(client, _prompt(0))  # first use of everything
        return [await _closed_loop(system, client, number) for number in CONCURRENCY]


async def _closed_loop(system: str, client: AsyncClient, concurrency: int) -> Figures:
    """`concurrency` clients, each with one request after the other."""
    samples: list[_Sample] = []

    async def run_client(number: int) -> None:
        for turn in range(REQUESTS_PER_CLIENT):
            seed = 1_000 * concurrency + 100 * number + turn + 1
            samples.append(await _request(client, _prompt(seed)))

    start_s = time.perf_counter()
    await asyncio.gather(*(run_client(number) for number in range(concurrency)))
    wall_s = time.perf_counter() - start_s
    return Figures(
        system,
        concurrency,
        ttft_ms=_median_ms([sample.ttft_s for sample in samples]),
        tpot_ms=_median_ms([sample.tpot_s for sample in samples]),
        tokens_per_s=round(len(samples) * NUM_OUTPUT_TOKENS / wall_s, 1),
        ship_ms=_median_ms([sample.ship_s for sample in samples]),
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    ttft_s: float
    tpot_s: float
    ship_s: float


async def _request(client: AsyncClient, prompt: list[int]) -> _Sample:
    options = GenerateOptions(prompt=prompt, max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    arrivals: list[float] = []
    ship_s = 0.0
    start_s = time.perf_counter()
    async with client.generate(options) as events:
        async for event in events:
            if event.WhichOneof("event") == "delta" and event.delta.token_ids:
                arrivals.append(time.perf_counter())
            if event.WhichOneof("event") == "completed":
                ship_s = event.completed.timings.ship_s
    return _Sample(arrivals[0] - start_s, (arrivals[-1] - arrivals[0]) / (NUM_OUTPUT_TOKENS - 1), ship_s)


def _transformers(folder: Path) -> Figures:
    """The plain model in this process, one request at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    model.generation_config.eos_token_id = None
    samples = [_generate_alone(model, _prompt(seed)) for seed in range(REQUESTS_PER_CLIENT + 1)][1:]
    total_s = sum(sample.ttft_s + sample.tpot_s * (NUM_OUTPUT_TOKENS - 1) for sample in samples)
    return Figures(
        "transformers generate",
        1,
        ttft_ms=_median_ms([sample.ttft_s for sample in samples]),
        tpot_ms=_median_ms([sample.tpot_s for sample in samples]),
        tokens_per_s=round(len(samples) * NUM_OUTPUT_TOKENS / total_s, 1),
    )


def _generate_alone(model: object, prompt: list[int]) -> _Sample:
    import torch

    tokens = torch.tensor([prompt])
    spent_s = []
    for num_tokens in (1, NUM_OUTPUT_TOKENS):
        start_s = time.perf_counter()
        model.generate(  # type: ignore[attr-defined]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        spent_s.append(time.perf_counter() - start_s)
    first_s, all_s = spent_s
    return _Sample(first_s, (all_s - first_s) / (NUM_OUTPUT_TOKENS - 1), 0.0)


def _prompt(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1_000, 40_000) for _ in range(NUM_PROMPT_TOKENS)]


def _median_ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 1)
