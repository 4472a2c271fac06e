"""Tokens a second of one sequence with and without speculation: texts that quote their prompt, and others.

    .venv/bin/python -m bench speculation --json out.json

Chats of the default model, greedy, n = 1, until it ends its turn or has said 128 tokens. Time is that of the engine's
thread in its steps behind the first token: processor time, so that a machine which is shared tells the same, or with
--wall what passes (more than one thread computes then). With and without alternate, the median of the rounds counts;
that the tokens are the same is checked in each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.paging.tables import Table
from bench.report import Reporter, add_json_option, at_least_one, write
from engine.core import EngineCore
from engine.opening import open_core
from engine.outputs import TokenSampled
from engine.sequence import Sequence as EngineSequence
from engine.speculation import Speculator
from kvferry.config import Config, EngineConfig, ModelConfig
from kvferry.model_store import ModelStore
from kvferry.sampling import SamplingParams
from router.text.chat_template import ChatMessage
from router.text.tokenizer import TextTokenizer

TEXTS = Path(__file__).parent / "texts"
KINDS = ("quoting", "others")
SEPARATOR = "====\n"
MAX_TOKENS = 128
LEAST = {"quoting": 1.7, "others": 0.97}
"""What the ratio of each text should be at least."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Figures:
    """One text.

    Attributes:
        number: its place in the file, from 1.
        num_tokens: that the model said.
        num_steps, num_accepted: with speculation: steps behind the first token, and tokens of drafts that came out.
        plain, speculating: tokens a second, the first one left out.
    """

    kind: str
    number: int
    num_tokens: int
    num_steps: int
    num_accepted: int
    plain: float
    speculating: float

    @property
    def ratio(self) -> float:
        return self.speculating / self.plain


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: its tokens, the steps behind the first one and the time they took."""

    token_ids: tuple[int, ...]
    num_steps: int
    seconds: float


class Bench:
    """One engine, which speculates or not."""

    def __init__(self, core: EngineCore, ending_ids: tuple[int, ...], clock: Clock) -> None:
        assert core.speculator is not None
        self._core, self._clock = core, clock
        self._own = core.speculator
        self.row_cost = self._own.row_cost
        self._sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, eos_token_ids=ending_ids)

    def measure(self, kind: str, number: int, prompt: Sequence[int], rounds: int) -> Figures:
        """A round without and one with, in turn."""
        plain, speculating = list[Run](), list[Run]()
        for _ in range(rounds):
            plain.append(self._run(prompt, None))
            num_before = self._own.num_accepted_tokens
            speculating.append(self._run(prompt, self._own))
            num_accepted = self._own.num_accepted_tokens - num_before
        said = {run.token_ids for run in (*plain, *speculating)}
        assert len(said) == 1, f"text {number} of {kind} is answered in {len(said)} ways"
        return Figures(
            kind,
            number,
            num_tokens=len(plain[0].token_ids),
            num_steps=speculating[0].num_steps,
            num_accepted=num_accepted,
            plain=_rate(plain),
            speculating=_rate(speculating),
        )

    def _run(self, prompt: Sequence[int], speculator: Speculator | None) -> Run:
        core, tokens, num_steps, seconds = self._core, list[int](), 0, 0.0
        core.speculator = core.scheduler.speculator = speculator
        core.add(EngineSequence("text", prompt, self._sampling, use_prefix_cache=False))
        while core.has_work:
            is_decode = bool(tokens)
            begin_s = self._clock()
            outputs = core.step()
            took_s = self._clock() - begin_s
            tokens += [output.token_id for output in outputs if isinstance(output, TokenSampled)]
            if is_decode:
                num_steps += 1
                seconds += took_s
        return Run(tuple(tokens), num_steps, seconds)


def _rate(runs: Sequence[Run]) -> float:
    return statistics.median((len(run.token_ids) - 1) / run.seconds for run in runs)


def prompts_of(tokenizer: TextTokenizer, kind: str) -> list[list[int]]:
    """The texts of a kind as chats of one message."""
    texts = (TEXTS / f"{kind}.txt").read_text(encoding="utf-8").split(SEPARATOR)
    return [tokenizer.encode_chat([ChatMessage("user", text.strip("\n"))]) for text in texts]


def _table(kind: str, figures: Sequence[Figures]) -> Table:
    ratios = [one.ratio for one in figures]
    rows = [
        (one.number, one.num_tokens, one.num_steps, one.num_accepted, one.plain, one.speculating, one.ratio)
        for one in figures
    ]
    note = (
        f"Ratio: median {statistics.median(ratios):.2f}, least {min(ratios):.2f}; "
        f"{sum(ratio >= LEAST[kind] for ratio in ratios)} of {len(ratios)} at {LEAST[kind]} or more."
    )
    header = ("text", "tokens", "steps", "accepted", "tokens/s without", "tokens/s with", "ratio")
    definition = (
        "Tokens a second behind the first token, median of the rounds; steps and accepted tokens of drafts with it."
    )
    return Table(kind, f"Speculation, texts: {kind}", definition, header, tuple(rows), notes=(note,))


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench speculation", description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    parser.add_argument("--threads", type=at_least_one, default=1)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--wall", action="store_true", help="measure what passes, not the engine's processor time")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.threads > 1 and not options.wall:
        parser.error("--threads: processor time is that of one thread; with more, --wall is needed")
    report = Reporter()
    name = Config().model.name
    folder = ModelStore(Config().model.cache_path).prepare(name, report)
    model = ModelConfig(name=name, path=str(folder), dtype=options.dtype, quantization=options.quantization)
    engine = EngineConfig(num_blocks=64, num_threads=options.threads, speculation="prompt_lookup")
    core = open_core(Config(model=model, engine=engine))
    tokenizer = TextTokenizer.load(folder)
    bench = Bench(core, tuple(tokenizer.eos_token_ids), time.perf_counter if options.wall else time.thread_time)
    figures: list[Figures] = []
    for kind in KINDS:
        for number, prompt in enumerate(prompts_of(tokenizer, kind), start=1):
            figures.append(bench.measure(kind, number, prompt, options.rounds))
            report(f"{kind} {number}: {figures[-1].ratio:.2f}")
    tokenizer.close()
    tables = [_table(kind, [one for one in figures if one.kind == kind]) for kind in KINDS]
    texts = [asdict(one) | {"ratio": one.ratio} for one in figures]
    write(options.json, "speculation", tables, {"draft_row_cost": bench.row_cost, "texts": texts})
    return 0
