"""Our engine as a child of `bench/engine.py`; questions and answers are those of `bench/peers/answering.py`."""

from __future__ import annotations

import argparse
import sys

from bench.peers.answering import answer_questions
from engine.core import EngineCore
from engine.opening import open_core
from engine.outputs import SequenceFailed, TokenSampled
from engine.sequence import Priority, Sequence
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.sampling import SamplingParams

NUM_BLOCKS = 4_400
"""32 sequences of 2,000 tokens and some."""


class Batch:
    """The sequences of one start."""

    def __init__(self, core: EngineCore, prompts: list[list[int]], room: int) -> None:
        self._core = core
        self._owners = [f"s{number}" for number in range(len(prompts))]
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        for number, (owner, prompt) in enumerate(zip(self._owners, prompts, strict=True)):
            core.add(Sequence(owner, prompt, params, priority=Priority(arrival=number)))

    def prefill(self) -> None:
        """Steps until all have their first token."""
        started: set[str] = set()
        while len(started) < len(self._owners):
            started |= {output.seq_id for output in self._step()}

    def decode(self, steps: int) -> int:
        """Steps, and how many tokens came."""
        return sum(len(self._step()) for _ in range(steps))

    def end(self) -> None:
        for owner in self._owners:
            if owner in self._core.sequences:
                self._core.remove(owner)
        while self._core.has_work:
            self._core.step()

    def _step(self) -> list[TokenSampled]:
        outputs = self._core.step()
        failed = [output for output in outputs if isinstance(output, SequenceFailed)]
        assert not failed, failed
        return [output for output in outputs if isinstance(output, TokenSampled)]


def open_engine(options: argparse.Namespace) -> EngineCore:
    """As `options` of `parser` want it; without a prefix cache, which the peers go without, too."""
    engine = EngineConfig(
        num_blocks=NUM_BLOCKS,
        num_threads=options.threads,
        max_batched_tokens=options.budget,
        block_size=options.block_size,
        kernels=options.kernels,
        prefix_caching=False,
        preemption="recompute",
        speculation="none",  # peers do without, too
    )
    model = ModelConfig(name="bench", path=options.folder, dtype="bfloat16", quantization=options.quantization)
    return open_core(Config(model=model, engine=engine))


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("folder")
    made.add_argument("--threads", type=int, required=True)
    made.add_argument("--kernels", default="native")
    made.add_argument("--quantization", default="none")
    made.add_argument("--budget", type=int, default=2048, help="most tokens of a step")
    made.add_argument("--block-size", type=int, default=16)
    return made


def main() -> None:
    """Entry point."""
    core = open_engine(parser().parse_args())
    answer_questions(lambda prompts, room, _: Batch(core, prompts, room), sys.stdout)


if __name__ == "__main__":
    main()
