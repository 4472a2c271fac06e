"""What sampling costs a step: 32 rows of 49,152 logits with no option, with each, and with all of them.

Greedy without an option is the base; all others are measured in turn with it. The rules look back on 600 tokens, half
of them output. Definitions:

    ms      median of one call of `sample_rows`, in the process of the engine, numpy's and torch's threads as they are
    ratio   of these medians to the base's
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from engine.forward_batch import SampleRequest
from engine.sampler import sample_rows
from kvferry.sampling import LogitRules, SamplingParams

NUM_ROWS, VOCAB_SIZE = 32, 49_152
NUM_CONTEXT, NUM_OUTPUT = 600, 300
NUM_ROUNDS = 41
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
BIAS = tuple((token_id, 1.0) for token_id in range(50))
BAD_WORDS = tuple((token_id, token_id + 1) for token_id in range(50))
FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.02": {"temperature": 0.8, "min_p": 0.02},
    "these filters together": FILTERS,
    "presence and frequency": {"rules": LogitRules(**PENALTIES)},
    "repetition": {"rules": LogitRules(repetition_penalty=1.1)},
    "bias on 50 ids": {"rules": LogitRules(bias=BIAS)},
    "1,000 allowed ids": {"rules": LogitRules(allowed_token_ids=tuple(range(1_000)))},
    "50 bad words": {"rules": LogitRules(bad_words=BAD_WORDS)},
    "min_tokens": {"min_tokens": 400, "stop_token_ids": (1, 2, 3)},
    "log-probabilities": {"logprobs": True},
    "with 5 alternatives": {"logprobs": True, "num_top_logprobs": 5},
    "with 20 alternatives": {"logprobs": True, "num_top_logprobs": 20},
    "with 128 chosen ids": {"logprobs": True, "logprob_token_ids": tuple(range(128))},
    "all": {
        **FILTERS,
        "rules": LogitRules(repetition_penalty=1.1, bias=BIAS, bad_words=BAD_WORDS, **PENALTIES),
        "min_tokens": 400,
        "stop_token_ids": (1, 2, 3),
        "logprobs": True,
        "num_top_logprobs": 20,
    },
}


def run_sampling() -> dict[str, dict[str, float]]:
    """By case: ms and ratio."""
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    batches = {name: _requests(fields) for name, fields in CASES.items()}
    times_s: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(NUM_ROUNDS):
        for name, requests in batches.items():
            begin_s = time.perf_counter()
            sample_rows(logits, requests)
            times_s[name].append(time.perf_counter() - begin_s)
    medians = {name: statistics.median(times) for name, times in times_s.items()}
    return {
        name: {"ms": round(1e3 * median, 2), "ratio": round(median / medians["greedy"], 1)}
        for name, median in medians.items()
    }


def _requests(fields: dict[str, Any]) -> list[SampleRequest]:
    rng = random.Random(0)
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(NUM_CONTEXT)]
    values = {"temperature": 0.0, **fields}
    return [
        SampleRequest(
            SamplingParams(max_tokens=1_000, seed=seed, **values), NUM_CONTEXT, NUM_OUTPUT, token_ids=token_ids
        )
        for seed in range(NUM_ROWS)
    ]
