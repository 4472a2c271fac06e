"""Our engine as a child of `bench/engine.py`: asked for one measurement a line, answers with its times.

    {"n": 8, "prompt": 128, "output": 64}  ─►  {"prefill_s": 0.9, "whole_s": 3.1}

The same questions go to the peers (`bench/peers/`). No prompt comes twice, so no prefix cache helps anybody.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from engine.core import EngineCore
from engine.local import generate
from engine.opening import open_core
from engine.sequence import Sequence
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import SamplingParams

NUM_BLOCKS = 4_200
"""32 sequences of 2,000 tokens and some."""


def seconds(core: EngineCore, randomness: random.Random, *, n: int, prompt: int, output: int) -> float:
    """Time of a batch of `n` prompts, greedy, without end-of-sequence."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    sequences = [
        Sequence(str(number), [randomness.randrange(100, 40_000) for _ in range(prompt)], params) for number in range(n)
    ]
    begin_s = time.perf_counter()
    results = generate(core, sequences)
    took_s = time.perf_counter() - begin_s
    assert all(len(result.token_ids) == output for result in results.values())
    return took_s


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kernels", default="native")
    options = parser.parse_args()
    engine = EngineConfig(
        num_blocks=NUM_BLOCKS, num_threads=options.threads, max_batched_tokens=2048, kernels=options.kernels
    )
    model = ModelConfig(name="bench", path=options.folder, dtype=options.dtype)
    core = open_core(Config(model=model, engine=engine))
    randomness = random.Random(0)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prefill_s = seconds(core, randomness, n=asked["n"], prompt=asked["prompt"], output=1)
        whole_s = seconds(core, randomness, n=asked["n"], prompt=asked["prompt"], output=asked["output"])
        print(json.dumps({"prefill_s": prefill_s, "whole_s": whole_s}), flush=True)


if __name__ == "__main__":
    main()
