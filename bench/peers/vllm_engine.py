"""vLLM's engine as a child of `bench/engine.py`; run with the Python of its own environment.

Questions and answers are those of `bench/engine_worker.py`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

MOST_CONTEXT = 2_176


def main() -> None:
    """Entry point: MODEL_FOLDER."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints where answers go
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=MOST_CONTEXT, enable_prefix_caching=False)
    randomness = random.Random(0)

    def seconds(n: int, prompt: int, output: int) -> float:
        batch = [{"prompt_token_ids": [randomness.randrange(100, 40_000) for _ in range(prompt)]} for _ in range(n)]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        begin_s = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - begin_s

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prefill_s = seconds(asked["n"], asked["prompt"], 1)
        whole_s = seconds(asked["n"], asked["prompt"], asked["output"])
        print(json.dumps({"prefill_s": prefill_s, "whole_s": whole_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
