"""vLLM's engine as a child of `bench/engine.py`; run with the Python of its own environment.

Questions and answers are those of `answering.py`. Its engine steps in this process, so that it stands still
between two questions.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from answering import answer_questions

MOST_CONTEXT = 2_176


class Batch:
    """The sequences of one start."""

    def __init__(self, engine: Any, prompts: list[list[int]], room: int, number: int) -> None:
        from vllm import SamplingParams

        self._engine = engine
        self._ids = [f"{number}-{place}" for place in range(len(prompts))]
        self._counts = dict.fromkeys(self._ids, 0)
        params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True, detokenize=False)
        for seq_id, prompt in zip(self._ids, prompts, strict=True):
            engine.add_request(seq_id, {"prompt_token_ids": prompt}, params)

    def prefill(self) -> None:
        while min(self._counts.values()) == 0:
            self._step()

    def decode(self, steps: int) -> int:
        return sum(self._step() for _ in range(steps))

    def end(self) -> None:
        self._engine.abort_request(self._ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _step(self) -> int:
        before = sum(self._counts.values())
        for output in self._engine.step():
            self._counts[output.request_id] = len(output.outputs[0].token_ids)
        return sum(self._counts.values()) - before


def main() -> None:
    """Entry point: MODEL_FOLDER."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints where answers go
    from vllm import LLM

    engine = LLM(sys.argv[1], dtype="bfloat16", max_model_len=MOST_CONTEXT, enable_prefix_caching=False).llm_engine
    answer_questions(partial(Batch, engine), answers)


if __name__ == "__main__":
    main()
