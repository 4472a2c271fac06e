"""From the lengths of real requests and a memory budget: which block size and batch to configure, and why.

    python -m engine.plan --folder FOLDER --lengths FILE.csv --memory-bytes N     (one JSON object; for `kvferry plan`)

The lengths say how many blocks a sequence holds at a random moment of its life, and how much that varies; from it
follows how many sequences the memory holds. The real scheduler and block manager then run the requests at saturation,
without a model, and count the preemptions that each watermark leaves. Torch-free.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core import EngineCore, EngineLimits
from engine.forward_batch import Sampled, SequenceSlice
from engine.outputs import SequencePreempted, TokenSampled
from engine.scripted import SCRIPT_FILE, SLOT_BYTES
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
NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "hidden_size": ("hidden_size", "n_embd"),
}


class PlanRunner:
    """A `Runner` (`engine/runner.py`) without contents: every token it is asked for is 0."""

    def __init__(self, layout: KvLayout, num_blocks: int, max_context: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_context = max_context
        self.vocab_size = 1 << 31
        self.window: int | None = None
        self._contents = memoryview(bytearray(layout.block_bytes))

    def run(self, slices: list[SequenceSlice]) -> list[Sampled | None]:
        return [None if part.sample is None else Sampled(0) for part in slices]

    def block_view(self, block_id: int) -> memoryview:
        return self._contents

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        return bytes(self.layout.block_bytes)


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
        for num_blocks in range(-(-first // block_size), -(-last // block_size) + 1):
            num_held = min(last, num_blocks * block_size) - max(first, (num_blocks - 1) * block_size + 1) + 1
            sum_blocks += num_blocks * num_held
            sum_squares += num_blocks**2 * num_held
    mean_blocks = sum_blocks / num_steps
    deviation = math.sqrt(max(0.0, sum_squares / num_steps - mean_blocks**2))
    return Holding(block_size, mean_blocks, deviation, sum_tokens / num_steps)


@dataclass(frozen=True, slots=True)
class Preemptions:
    """What the simulation counted with one watermark, at saturation."""

    watermark: float
    per_100_requests: float
    mean_running: float


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
    for block_size in BLOCK_SIZES:
        num_blocks = given.memory_bytes // (given.layout.bytes_per_token * block_size)
        if num_blocks * block_size < given.max_tokens or num_blocks < 2:
            continue
        found.append(_choice(num_blocks, holding(given.counted, block_size)))
    if not found:
        raise ResourceExhausted(
            f"memory: {given.memory_bytes} bytes hold {given.memory_bytes // given.layout.bytes_per_token} tokens of "
            f"{given.layout.bytes_per_token} bytes of KV each; the longest request has {given.max_tokens}"
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


def scale_of(choice: Choice) -> int:
    """How many times smaller than planned the simulated memory is."""
    return -(-choice.mean_sequences // MAX_SIMULATED_SEQUENCES)


def simulate(given: PlanInput, choice: Choice) -> list[Preemptions]:
    """Runs the requests at saturation through the real scheduler with rising watermarks, up to the one to choose."""
    counted: list[Preemptions] = []
    for watermark in WATERMARKS:
        counted.append(_simulate(given, choice, watermark))
        if counted[-1].per_100_requests <= 100 * MAX_PREEMPTIONS:
            break
    return counted


def _simulate(given: PlanInput, choice: Choice, watermark: float) -> Preemptions:
    scale = scale_of(choice)
    num_blocks = max(choice.num_blocks // scale, -(-given.max_tokens // choice.block_size) + 1)
    max_running = max(1, choice.mean_sequences // scale)
    limits = EngineLimits(
        max_batched_tokens=max(given.max_batched_tokens, max_running),
        max_running=max_running,
        num_watermark_blocks=max(1, int(num_blocks * watermark)),
        prefix_caching=False,
    )
    layout = dataclasses.replace(given.layout, block_size=choice.block_size)
    core = EngineCore(PlanRunner(layout, num_blocks, given.max_tokens + 1), limits)
    per_request, mean_running = _saturate(core, given.lengths, max_running)
    return Preemptions(watermark, round(100 * per_request, 1), round(mean_running, 1))


def _saturate(core: EngineCore, lengths: SequenceOf[RequestLength], num_waiting: int) -> tuple[float, float]:
    """Keeps `num_waiting` requests queued for some generations; preemptions a request, sequences in the batch."""
    requests = enumerate(itertools.cycle(lengths))
    num_finished = num_preempted = num_steps = sum_running = 0
    while num_finished < NUM_GENERATIONS * num_waiting:
        while len(core.scheduler.waiting) < num_waiting:
            core.add(_sequence(*next(requests)))
        for output in core.step():
            num_finished += isinstance(output, TokenSampled) and output.finish is not None
            num_preempted += isinstance(output, SequencePreempted) and num_finished >= num_waiting
        if num_finished >= num_waiting:
            num_steps += 1
            sum_running += len(core.scheduler.running)
    return num_preempted / (num_finished - num_waiting), sum_running / num_steps


def _sequence(number: int, length: RequestLength) -> Sequence:
    sampling = SamplingParams(max_tokens=length.num_output_tokens, ignore_eos=True)
    return Sequence(str(number), [0] * length.num_prompt_tokens, sampling, priority=Priority(arrival=number))


def make_plan(given: PlanInput) -> dict[str, Any]:
    """The plan as plain values: what to set, the figures it rests on, and the reasons as sentences."""
    found = choices(given)
    choice = choose(found)
    counted = simulate(given, choice)
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
        "simulated": {"scale": scale_of(choice), "watermarks": [dataclasses.asdict(one) for one in counted]},
        "reasons": _reasons(found, choice, counted),
    }


def _mean(values: SequenceOf[int]) -> float:
    return round(sum(values) / len(values), 1)


def _reasons(found: SequenceOf[Choice], choice: Choice, counted: SequenceOf[Preemptions]) -> list[str]:
    is_frugal = choice.tail_waste <= MAX_TAIL_WASTE
    waste = ", ".join(f"{one.block_size}: {one.tail_waste:.1%}" for one in found)
    preempted = ", ".join(f"{one.watermark:.0%}: {one.per_100_requests:g}" for one in counted)
    scaled = f", simulated at 1/{scale_of(choice)} of the memory, which errs upwards" if scale_of(choice) > 1 else ""
    return [
        f"block_size {choice.block_size}: "
        + (f"the largest whose tail waste is at most {MAX_TAIL_WASTE:.0%}" if is_frugal else "the least tail waste")
        + f" (by block size {waste})",
        f"max_running {choice.mean_sequences}: a sequence holds {choice.mean_blocks:.1f} ± "
        f"{choice.deviation_blocks:.1f} blocks at a random moment of its decoding, and there are {choice.num_blocks}; "
        "more sequences than that could only be paid for by preemption",
        f"watermark {counted[-1].watermark:g}: preemptions in 100 requests at saturation, by watermark "
        f"{preempted}{scaled}; {counted[-1].mean_running:g} sequences run on average"
        + (" at that scale" if scaled else ""),
        f"concurrency {choice.safe_sequences}: with so many requests in flight, blocks run short in one moment of a "
        "hundred; more are served too, but wait or are preempted",
    ]


def read_layout(folder: Path, dtype: str) -> KvLayout:
    """Size of the KV of the model in `folder`, from its configuration; FailedPrecondition names what is missing."""
    if (folder / SCRIPT_FILE).is_file():  # a slot of a scripted model is as many bytes, whatever its shape is called
        return KvLayout(1, 1, SLOT_BYTES // 4, 1, "bfloat16", "")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
    except (OSError, ValueError, AttributeError) as error:
        raise FailedPrecondition(f"{path}: is not a readable configuration ({error})") from error
    num_layers, num_heads, hidden_size = (_number(path, config, names) for names in NAMES.values())
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    return KvLayout(num_layers, num_kv_heads, config.get("head_dim") or hidden_size // num_heads, 1, dtype, "")


def _number(path: Path, config: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise FailedPrecondition(f"{path}: has no {names[0]}")


def main(arguments: list[str] | None = None) -> int:
    """Prints the plan as JSON."""
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
    parsed = parser.parse_args(arguments)
    try:
        given = PlanInput(
            read_layout(parsed.folder, parsed.dtype),
            read_lengths(parsed.lengths),
            parsed.memory_bytes,
            parsed.max_batched_tokens,
        )
        plan = make_plan(given)
    except KvferryError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    sys.stdout.write(json.dumps(plan) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
