"""OpenVINO GenAI's continuous batching as a child of `bench/engine.py`; run with the Python of its own environment.

Questions and answers are those of `answering.py`. It reads the GGUF itself; what is not set is its default
(on a CPU with AVX-512 in bfloat16: activations in bfloat16, keys and values in int8).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import numpy as np
from answering import answer_questions

CACHE_GB = 2
BUDGET = 2_048
MOST_SEQUENCES = 64


class Batch:
    """The sequences of one start."""

    def __init__(self, pipe: Any, prompts: list[list[int]], room: int, number: int) -> None:
        import openvino as ov
        import openvino_genai as genai

        self._pipe = pipe
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = room, True, False
        self._handles = [
            pipe.add_request(number * 1_000 + place, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            for place, prompt in enumerate(prompts)
        ]
        self._has_begun = [False] * len(prompts)

    def prefill(self) -> None:
        while not all(self._has_begun):
            self._step()

    def decode(self, steps: int) -> int:
        return sum(self._step() for _ in range(steps))

    def end(self) -> None:
        for handle in self._handles:
            handle.cancel()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()

    def _step(self) -> int:
        self._pipe.step()
        count = 0
        for place, handle in enumerate(self._handles):
            if handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
                self._has_begun[place] = True
        return count


def main() -> None:
    """Entry point: GGUF_FILE THREADS."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = BUDGET, MOST_SEQUENCES
    properties = {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
    pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", properties)
    answer_questions(partial(Batch, pipe), answers)


if __name__ == "__main__":
    main()
