"""From the lengths of real requests and a memory budget: which block size and batch to configure, and why.

    python -m engine.plan --folder FOLDER --lengths FILE.csv --memory-bytes N     (one JSON object; for `kvferry plan`)

The lengths say how many blocks a sequence holds at a random moment of its life, and how much that varies; from it
follows how many sequences the memory holds. The real scheduler and block manager then run the requests at saturation,
without a model, and count the preemptions that each watermark leaves. That takes seconds whatever the input: a machine
that is too large is simulated smaller, and with tokens that stand for several (`Scale`). Torch-free.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from engine.core import EngineCore, EngineLimits
from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.outputs import ChunkComputed, Output, SequencePreempted, TokenSampled
from engine.scripted import SCRIPT_FILE, SLOT_BYTES, load_script_config
from engine.sequence import Priority, Sequence
from kvferry.errors import FailedPrecondition, KvferryError, ResourceExhausted
from kvferry.kv_layout import KvLayout
from kvferry.lengths import RequestLength, read_lengths
from kvferry.sampling import SamplingParams

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_TAIL_WASTE = 0.04
"""The largest block size that wastes no more than this is chosen: larger blocks mean fewer, larger copies."""
SAFE_DEVIATIONS = 2.33
"""Standard deviations of room: more blocks are wanted than there are in one moment of a hundred."""
WATERMARKS = (0.01, 0.02, 0.05, 0.1)
MAX_PREEMPTIONS = 0.1
"""The smallest watermark with at most this many preemptions a request is chosen; fewer are not worth idle blocks."""
MAX_COUNTED_REQUESTS = 20_000
MAX_SIMULATED_SEQUENCES = 96
"""A simulation with more of them at once is scaled down; fewer sequences vary more, so it errs upwards."""
NUM_GENERATIONS = 4
"""How often the simulation replaces all running sequences; the first ones, which start in step, are not counted."""
MIN_SIMULATED_SEQUENCES = 16
"""A simulation is not made smaller than this while tokens can be made coarser instead."""
MAX_PLANNED_WORK = 60_000
MAX_WORK = 150_000
"""Of one simulation, in tokens decoded or what takes as long (about 10 µs): what its scale is chosen for, and where it
ends, since preemptions make more of it than planned."""
WORK_PER_STEP = 4
WORK_PER_REQUEST = 8
PREFILL_TOKENS_PER_WORK = 64
NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "hidden_size": ("hidden_size", "n_embd"),
}
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx")

PROGRESS_WORD = "progress"

Report = Callable[[float], None]
"""Told how much is done, from 0 to 1."""


class PlanRunner:
    """A `Runner` (`engine/runner.py`) without contents: every token it is asked for is 0."""

    def __init__(self, layout: KvLayout, num_blocks: int, max_context: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_context = max_context
        self.vocab_size = 1 << 31
        self.window: int | None = None
        self.suits_drafts = False  # it has no text
        self._contents = memoryview(bytearray(layout.block_bytes))

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        return [None if part.sample is None else Sampled(0) for part in slices]

    def block_view(self, block_id: int) -> memoryview:
        return self._contents

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        return bytes(self.layout.block_bytes)

    def populate(self) -> None:
        """It has no memory."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks a sequence holds at a random moment of its decoding, and the tokens in them.

    Attributes:
        mean_blocks, deviation_blocks: mean and standard deviation of the number of blocks.
        mean_tokens: mean number of tokens whose KV is in them.
    """

    block_size: int
    mean_blocks: float
    deviation_blocks: float
    mean_tokens: float

    @property
    def tail_waste(self) -> float:
        """Share of the held slots that hold no token."""
        return 1.0 - self.mean_tokens / (self.mean_blocks * self.block_size)

    def max_sequences(self, num_blocks: int) -> int:
        """Sequences whose blocks, varying as they do, stay within `num_blocks` but in one moment of a hundred."""
        spread = SAFE_DEVIATIONS * self.deviation_blocks
        root = (math.sqrt(spread**2 + 4 * self.mean_blocks * num_blocks) - spread) / (2 * self.mean_blocks)
        return int(root**2 + 1e-9)


def holding(lengths: SequenceOf[RequestLength], block_size: int) -> Holding:
    """Averages over every step of every request: with t outputs known, prompt + t tokens are in the blocks."""
    num_steps = sum_blocks = sum_squares = sum_tokens = 0
    for length in lengths:
        first, last = length.num_prompt_tokens, length.num_tokens - 1
        num_steps += length.num_output_tokens
        sum_tokens += (first + last) * length.num_output_tokens // 2
        sum_blocks += _sum_blocks(last, block_size) - _sum_blocks(first - 1, block_size)
        sum_squares += _sum_squares(last, block_size) - _sum_squares(first - 1, block_size)
    mean_blocks = sum_blocks / num_steps
    deviation = math.sqrt(max(0.0, sum_squares / num_steps - mean_blocks**2))
    return Holding(block_size, mean_blocks, deviation, sum_tokens / num_steps)


def _sum_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of 1 token, of 2, and so on up to `num_tokens`, added up."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def _sum_squares(num_tokens: int, block_size: int) -> int:
    """Squares of the same numbers, added up."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) * (2 * full + 1) // 6 + rest * (full + 1) ** 2


@dataclass(frozen=True, slots=True)
class Preemptions:
    """What the simulation counted with one watermark, at saturation.

    Attributes:
        num_requests: requests that finished while it counted.
        is_whole: it ran all generations, and was not ended for the work it took.
    """

    watermark: float
    per_100_requests: float
    mean_running: float
    num_requests: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One block size and what would follow from it.

    Attributes:
        mean_sequences: sequences that fit on average.
        safe_sequences: sequences that fit with room for what their blocks vary.
    """

    block_size: int
    num_blocks: int
    mean_blocks: float
    deviation_blocks: float
    tail_waste: float
    mean_sequences: int
    safe_sequences: int


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What is planned for.

    Attributes:
        layout: KV of the model; its block size is not looked at.
        lengths: requests as they come.
        memory_bytes: for KV blocks, on one worker.
        max_batched_tokens: token budget of a step as configured; a batch cannot be larger.
    """

    layout: KvLayout
    lengths: SequenceOf[RequestLength]
    memory_bytes: int
    max_batched_tokens: int = 512

    @property
    def counted(self) -> SequenceOf[RequestLength]:
        """The requests, or every so many-th of a very long list: averages need no more."""
        return self.lengths[:: -(-len(self.lengths) // MAX_COUNTED_REQUESTS)]

    @property
    def max_tokens(self) -> int:
        return max(length.num_tokens for length in self.lengths)


def choices(given: PlanInput) -> list[Choice]:
    """All block sizes whose pool holds the longest request."""
    found = []
    longest = given.max_tokens
    for block_size in BLOCK_SIZES:
        num_blocks = given.memory_bytes // (given.layout.bytes_per_token * block_size)
        if num_blocks * block_size < longest or num_blocks < 2:
            continue
        found.append(_choice(num_blocks, holding(given.counted, block_size)))
    if not found:
        raise ResourceExhausted(
            f"memory: {given.memory_bytes} bytes hold {given.memory_bytes // given.layout.bytes_per_token} tokens of "
            f"{given.layout.bytes_per_token} bytes of KV each; the longest request has {longest}"
        )
    return found


def _choice(num_blocks: int, held: Holding) -> Choice:
    return Choice(
        block_size=held.block_size,
        num_blocks=num_blocks,
        mean_blocks=held.mean_blocks,
        deviation_blocks=held.deviation_blocks,
        tail_waste=held.tail_waste,
        mean_sequences=max(1, int(num_blocks / held.mean_blocks)),
        safe_sequences=max(1, held.max_sequences(num_blocks)),
    )


def choose(found: SequenceOf[Choice]) -> Choice:
    """The largest block size within the waste allowed, else the one that wastes least."""
    frugal = [choice for choice in found if choice.tail_waste <= MAX_TAIL_WASTE]
    return frugal[-1] if frugal else min(found, key=lambda choice: choice.tail_waste)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much smaller than planned the simulated machine is.

    A simulated token stands for `num_merged` tokens, in requests and in blocks. As long as those divide a block, a
    sequence holds as many blocks after as many tokens as without; beyond, a block is one simulated token.

    Attributes:
        divisor: how many times fewer sequences run.
        num_merged: tokens of one simulated token, a power of two.
        block_size: of the simulated blocks, in simulated tokens.
        num_blocks: of the simulated pool.
        max_running: sequences in the simulated batch.
        lengths: the requests that are run, over and over, in simulated tokens.
        memory_share: share of the planned memory that the simulated pool stands for.
    """

    divisor: int
    num_merged: int
    block_size: int
    num_blocks: int
    max_running: int
    lengths: SequenceOf[RequestLength]
    memory_share: float

    @property
    def max_tokens(self) -> int:
        return max(length.num_tokens for length in self.lengths)


def scale_of(given: PlanInput, choice: Choice) -> Scale:
    """The largest machine that can be simulated with the work allowed; tokens are merged up to a block first."""
    divisor, num_merged = -(-choice.mean_sequences // MAX_SIMULATED_SEQUENCES), 1
    lengths = drawn(given.lengths, NUM_GENERATIONS * choice.mean_sequences // divisor)
    while _planned_work(lengths, choice.mean_sequences // divisor, num_merged, given) > MAX_PLANNED_WORK:
        if num_merged >= choice.block_size and choice.mean_sequences // divisor >= 2 * MIN_SIMULATED_SEQUENCES:
            divisor *= 2
        else:
            num_merged *= 2
    merged = [_merged(length, num_merged) for length in lengths]
    block_size = max(1, choice.block_size // num_merged)
    longest = max(length.num_tokens for length in merged)
    share = choice.num_blocks * choice.block_size // (divisor * block_size * num_merged)
    num_blocks = max(share, -(-longest // block_size) + 1)
    return Scale(
        divisor=divisor,
        num_merged=num_merged,
        block_size=block_size,
        num_blocks=num_blocks,
        max_running=choice.mean_sequences // divisor,
        lengths=merged,
        memory_share=num_blocks * block_size * num_merged / (choice.num_blocks * choice.block_size),
    )


def drawn(lengths: SequenceOf[RequestLength], number: int) -> SequenceOf[RequestLength]:
    """The requests as they come, or `number` of them from all over the list when it is longer, in no order of size."""
    count = len(lengths)
    if count <= number:
        return lengths
    stride = max(1, int(count * 0.618))  # near the golden section, strides spread evenly however many there are
    while math.gcd(stride, count) != 1:
        stride += 1
    return [lengths[index * stride % count] for index in range(number)]


def _planned_work(lengths: SequenceOf[RequestLength], num_running: int, num_merged: int, given: PlanInput) -> float:
    """Work of all generations without preemptions; a step of many prompts has fewer decodes."""
    num_prompt = sum(length.num_prompt_tokens for length in lengths) / len(lengths) / num_merged
    num_output = sum(length.num_output_tokens for length in lengths) / len(lengths) / num_merged
    num_steps = max(num_output / num_running, num_prompt / max(given.max_batched_tokens, num_running))
    per_request = num_steps * (num_running + WORK_PER_STEP) + num_prompt / PREFILL_TOKENS_PER_WORK + WORK_PER_REQUEST
    return NUM_GENERATIONS * num_running * per_request


def _merged(length: RequestLength, num_merged: int) -> RequestLength:
    """Rounded up, as blocks are."""
    return RequestLength(-(-length.num_prompt_tokens // num_merged), -(-length.num_output_tokens // num_merged))


def _ignore(done: float) -> None:
    """A `Report` to nobody."""


def simulate(given: PlanInput, scale: Scale, report: Report = _ignore) -> list[Preemptions]:
    """Runs the requests at saturation through the real scheduler with rising watermarks, up to the one to choose."""
    counted: list[Preemptions] = []
    for index, watermark in enumerate(WATERMARKS):
        counted.append(_simulate(given, scale, watermark, _part_of(report, index)))
        if counted[-1].per_100_requests <= 100 * MAX_PREEMPTIONS:
            break
    report(1.0)
    return counted


def _part_of(report: Report, index: int) -> Report:
    """The report of one watermark, as a part of that of all."""
    return lambda done: report((index + done) / len(WATERMARKS))


def _simulate(given: PlanInput, scale: Scale, watermark: float, report: Report) -> Preemptions:
    limits = EngineLimits(
        max_batched_tokens=max(given.max_batched_tokens, scale.max_running),
        max_running=scale.max_running,
        num_watermark_blocks=max(1, int(scale.num_blocks * watermark)),
        prefix_caching=False,
    )
    layout = dataclasses.replace(given.layout, block_size=scale.block_size)
    core = EngineCore(PlanRunner(layout, scale.num_blocks, scale.max_tokens), limits)
    return _saturate(core, scale, report).summary(watermark)


@dataclass(slots=True)
class Tally:
    """What a simulation has counted so far."""

    num_steps: int = 0
    sum_running: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    work: float = 0.0
    is_whole: bool = True

    def add(self, outputs: SequenceOf[Output], num_left: int) -> None:
        """One step: what came of it, and how many sequences are in the batch after it."""
        num_finished = sum(isinstance(one, TokenSampled) and one.finish is not None for one in outputs)
        num_prefilled = sum(one.num_tokens for one in outputs if isinstance(one, ChunkComputed))
        self.num_steps += 1
        self.num_finished += num_finished
        self.num_preempted += sum(isinstance(one, SequencePreempted) for one in outputs)
        self.sum_running += num_left + num_finished  # those that finished in the step ran in it
        self.work += WORK_PER_STEP + WORK_PER_REQUEST * num_finished + num_left
        self.work += num_prefilled / PREFILL_TOKENS_PER_WORK

    def summary(self, watermark: float) -> Preemptions:
        return Preemptions(
            watermark=watermark,
            per_100_requests=round(100 * self.num_preempted / max(1, self.num_finished), 1),
            mean_running=round(self.sum_running / self.num_steps, 1),
            num_requests=self.num_finished,
            is_whole=self.is_whole,
        )


def _saturate(core: EngineCore, scale: Scale, report: Report) -> Tally:
    """Keeps requests queued for some generations, of which the first is not counted unless the work ends with it."""
    requests = enumerate(itertools.cycle(scale.lengths))
    first, later = Tally(), Tally()
    num_waiting, num_more = scale.max_running, (NUM_GENERATIONS - 1) * scale.max_running
    while later.num_finished < num_more:
        work = first.work + later.work
        if work >= MAX_WORK:
            kept = later if later.num_finished else first
            kept.is_whole = False
            return kept
        while len(core.scheduler.waiting) < num_waiting:
            core.add(_sequence(*next(requests)))
        tally = first if first.num_finished < num_waiting else later
        tally.add(core.step(), len(core.scheduler.running))
        report(max(work / MAX_WORK, (first.num_finished + later.num_finished) / (num_waiting + num_more)))
    return later


def _sequence(number: int, length: RequestLength) -> Sequence:
    sampling = SamplingParams(max_tokens=length.num_output_tokens, ignore_eos=True)
    return Sequence(str(number), [0] * length.num_prompt_tokens, sampling, priority=Priority(arrival=number))


def make_plan(given: PlanInput, report: Report = _ignore) -> dict[str, Any]:
    """The plan as plain values: what to set, the figures it rests on, and the reasons as sentences."""
    found = choices(given)
    choice = choose(found)
    scale = scale_of(given, choice)
    counted = simulate(given, scale, report)
    settings: dict[str, float] = {"block_size": choice.block_size, "kv_memory_bytes": given.memory_bytes}
    settings |= {"watermark": counted[-1].watermark, "max_running": choice.mean_sequences}
    if choice.mean_sequences > given.max_batched_tokens:
        settings["max_batched_tokens"] = choice.mean_sequences
    return {
        "settings": settings,
        "concurrency": choice.safe_sequences,
        "requests": {
            "count": len(given.lengths),
            "mean_prompt_tokens": _mean([length.num_prompt_tokens for length in given.lengths]),
            "mean_output_tokens": _mean([length.num_output_tokens for length in given.lengths]),
            "longest_tokens": given.max_tokens,
        },
        "bytes_per_token": given.layout.bytes_per_token,
        "chosen": dataclasses.asdict(choice),
        "block_sizes": [dataclasses.asdict(one) for one in found],
        "simulated": {
            "scale": scale.divisor,
            "memory_share": float(f"{scale.memory_share:.3g}"),
            "max_running": scale.max_running,
            "tokens_per_simulated_token": scale.num_merged,
            "watermarks": [dataclasses.asdict(one) for one in counted],
        },
        "reasons": _reasons(found, choice, scale, counted),
    }


def _mean(values: SequenceOf[int]) -> float:
    return round(sum(values) / len(values), 1)


def _reasons(found: SequenceOf[Choice], choice: Choice, scale: Scale, counted: SequenceOf[Preemptions]) -> list[str]:
    is_frugal = choice.tail_waste <= MAX_TAIL_WASTE
    waste = ", ".join(f"{one.block_size}: {one.tail_waste:.1%}" for one in found)
    preempted = ", ".join(f"{one.watermark:.0%}: {one.per_100_requests:g}" for one in counted)
    return [
        f"block_size {choice.block_size}: "
        + (f"the largest whose tail waste is at most {MAX_TAIL_WASTE:.0%}" if is_frugal else "the least tail waste")
        + f" (by block size {waste})",
        f"max_running {choice.mean_sequences}: a sequence holds {choice.mean_blocks:.1f} ± "
        f"{choice.deviation_blocks:.1f} blocks at a random moment of its decoding, and there are {choice.num_blocks}; "
        "more sequences than that could only be paid for by preemption",
        f"watermark {counted[-1].watermark:g}: preemptions in 100 requests at saturation, by watermark "
        f"{preempted}; {counted[-1].mean_running:g} sequences run on average{_simulated(scale, counted)}",
        f"concurrency {choice.safe_sequences}: with so many requests in flight, blocks run short in one moment of a "
        "hundred; more are served too, but wait or are preempted",
    ]


def _simulated(scale: Scale, counted: SequenceOf[Preemptions]) -> str:
    """On what the preemptions were counted, where that is not the whole machine to the end."""
    notes = []
    if scale.divisor > 1:
        notes.append(
            f"simulated with {scale.max_running} sequences at most, 1/{scale.divisor} of max_running, in "
            f"{scale.memory_share:.3g} of the memory"
        )
    if scale.num_merged > 1:
        notes.append(f"simulated {scale.num_merged} tokens at a time")
    if scale.divisor > 1 and scale.memory_share * scale.divisor <= 1:
        notes.append("which errs upwards")
    if not all(one.is_whole for one in counted):
        notes.append(f"ended early, after {counted[-1].num_requests} requests")
    return f" ({', '.join(notes)})" if notes else ""


def read_layout(folder: Path, dtype: str) -> KvLayout:
    """Size of the KV of the model in `folder`, from its configuration; FailedPrecondition names what is missing."""
    if (folder / SCRIPT_FILE).is_file():  # a slot of a scripted model is as many bytes, whatever its shape is called
        return KvLayout(1, 1, SLOT_BYTES // 4, 1, "bfloat16", "")
    path = folder / "config.json"
    config = _read_config(path)
    num_layers, num_heads, hidden_size = (_number(path, config, names) for names in NAMES.values())
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    return KvLayout(num_layers, num_kv_heads, config.get("head_dim") or hidden_size // num_heads, 1, dtype, "")


def read_max_context(folder: Path, max_context: int | None = None) -> int | None:
    """Most tokens of one request: of what the model in `folder` says and `max_context`, the lower; None: neither."""
    if (folder / SCRIPT_FILE).is_file():
        own = [load_script_config(folder).max_context]
    else:
        config = _read_config(folder / "config.json")
        own = [config[name] for name in CONTEXT_NAMES if isinstance(config.get(name), int)][:1]
    return min([*own, *([] if max_context is None else [max_context])], default=None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        return dict(config)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FailedPrecondition(f"{path}: is not a readable configuration ({error})") from error


def _number(path: Path, config: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise FailedPrecondition(f"{path}: has no {names[0]}")


class PercentLines:
    """Tells a parent process how much is done: a line for each percent, such as `progress 12`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._percent = 0

    def __call__(self, done: float) -> None:
        percent = int(100 * done)
        if percent > self._percent:
            self._percent = percent
            self._file.write(f"{PROGRESS_WORD} {percent}\n")
            self._file.flush()


def main(arguments: list[str] | None = None) -> int:
    """Prints the plan as JSON."""
    parsed = _parser().parse_args(arguments)
    try:
        given = PlanInput(
            read_layout(parsed.folder, parsed.dtype),
            read_lengths(parsed.lengths, read_max_context(parsed.folder, parsed.max_context)),
            parsed.memory_bytes,
            parsed.max_batched_tokens,
        )
        plan = make_plan(given, PercentLines(sys.stderr) if parsed.progress else _ignore)
    except KvferryError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    sys.stdout.write(json.dumps(plan) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.plan",
        description="Plan block size and batch from request lengths and a memory budget; prints JSON.",
        epilog="example: python -m engine.plan --folder models/smollm2 --lengths lengths.csv --memory-bytes 8589934592",
    )
    parser.add_argument("--folder", type=Path, required=True, help="the model's folder")
    parser.add_argument("--lengths", type=Path, required=True, help="CSV of prompt_len,output_len")
    parser.add_argument("--memory-bytes", type=int, required=True, help="memory for KV blocks")
    parser.add_argument("--dtype", default="bfloat16", help="of KV: float32 or bfloat16")
    parser.add_argument("--max-batched-tokens", type=int, default=512, help="token budget of a step")
    parser.add_argument("--max-context", type=int, help="most tokens of a request, where lower than the model's own")
    parser.add_argument("--progress", action="store_true", help="write `progress PERCENT` lines to standard error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
