"""Our engine in virtual time: the real `EngineCore`, scheduler and block manager over a runner that tells the time.

    arrivals ──► EngineCore.add ──► step: schedule → TimedRunner.run moves the clock by the step model ──► Meter

No KV exists: output tokens are the number of their choice, so that no two outputs are equal, and what counts is which
blocks are held, for how long, by how many sequences.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from bench.paging.beams import steering_candidates
from bench.paging.figures import Meter, RunFigures, Slots
from bench.paging.step_model import StepModel
from bench.paging.workload import Arrival
from engine.core import EngineCore, EngineLimits
from engine.forward_batch import OnKvWritten, Sampled, SampledToken, SampleRequest, SequenceSlice
from engine.outputs import BeamsFinished, Output, TokenSampled
from engine.plan import PlanRunner
from engine.preemption import PreemptionPolicy
from engine.sequence import Priority, Sequence
from kvferry.kv_layout import KvLayout
from kvferry.sampling import BeamParams, SamplingParams

PREFIX_TOKEN, PROMPT_TOKEN, FIRST_OWN_TOKEN = 1, 2, 10
MAX_CONTEXT = 1 << 25


@dataclass(slots=True)
class VirtualClock:
    """Time that passes only when it is told to."""

    now_s: float = 0.0

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)


class TimedRunner(PlanRunner):
    """Moves the clock by what a step, or the copy of a block, would take; beams go on as they were recorded.

    `slots` and `num_held` are what the last step found: after copies on write, with the tokens that it computes.

    Args:
        block_copy_s: to copy one block, one way.
    """

    core: EngineCore
    slots: Slots
    num_held: int

    def __init__(
        self, layout: KvLayout, num_blocks: int, model: StepModel, clock: VirtualClock, block_copy_s: float = 0.0
    ) -> None:
        super().__init__(layout, num_blocks, MAX_CONTEXT)
        self.arrivals: dict[str, Arrival] = {}
        self._model = model
        self._clock = clock
        self._block_copy_s = block_copy_s

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        num_tokens = sum(len(part.token_ids) for part in slices)
        self.num_held = len(self.core.scheduler.running)
        self.slots = _slots(self.core, num_tokens)
        self._clock.now_s += self._model.step_s(num_tokens, sum(part.context_length for part in slices))
        return [None if part.sample is None else self._sample(part, part.sample) for part in slices]

    def _sample(self, part: SequenceSlice, request: SampleRequest) -> Sampled:
        if request.num_candidates == 0:
            tokens = range(request.choice, request.choice + request.num_choices)
            return Sampled(tokens[0], others=tuple(map(SampledToken, tokens[1:])))
        sequence = self.core.sequences[part.seq_id]
        beam = self.arrivals[sequence.owner_id].beam
        assert beam is not None
        if sequence.gang is None:
            return Sampled(None, candidates=steering_candidates("0" * beam.width, 0))
        step = (sequence.gang.search.num_output_tokens - 1) % len(beam.parents)
        number = sequence.gang.members.index(sequence)
        return Sampled(None, candidates=steering_candidates(beam.parents[step], number))

    def block_view(self, block_id: int) -> memoryview:
        self._clock.now_s += self._block_copy_s
        return super().block_view(block_id)


@dataclass(frozen=True, slots=True)
class PagedSystem:
    """Settings of our engine in a simulation.

    Attributes:
        watermark: as in the configuration.
        swap_slots: token slots of the host pool; with any, preempted sequences are swapped.
        block_copy_s: to copy one block, one way.
    """

    num_slots: int
    model: StepModel
    max_batched_tokens: int
    max_running: int
    block_size: int = 16
    watermark: float = 0.01
    prefix_caching: bool = False
    swap_slots: int = 0
    block_copy_s: float = 0.0

    def run(self, arrivals: SequenceOf[Arrival], num_warm_up: int = 0, *, is_whole_run: bool = False) -> RunFigures:
        """Serves `arrivals`, which are in order of time, to the end; see `Meter` for what is averaged."""
        clock = VirtualClock()
        runner = self._runner(clock, arrivals)
        core = runner.core
        meter = Meter(core.pool.num_blocks * self.block_size, num_warm_up, is_whole_run)
        endings = _Endings(meter, {str(one.number): one for one in arrivals})
        coming = deque(arrivals)
        while coming or core.has_work:
            while coming and coming[0].at_s <= clock.now_s:
                core.add(_sequence(coming.popleft()))
            if not core.has_work:
                clock.now_s = coming[0].at_s
                continue
            before_s = clock.now_s
            num_finished = endings.count(core.step(), clock)
            meter.step(
                clock.now_s - before_s,
                runner.slots,
                runner.num_held,
                num_finished,
                is_saturated=len(core.scheduler.waiting) > 0,
            )
        core.check_integrity()
        return meter.figures(core.scheduler.num_preemptions)

    def _runner(self, clock: VirtualClock, arrivals: Iterable[Arrival]) -> TimedRunner:
        num_blocks = self.num_slots // self.block_size
        limits = EngineLimits(
            max_batched_tokens=self.max_batched_tokens,
            max_running=min(self.max_running, self.max_batched_tokens),
            num_watermark_blocks=max(1, int(num_blocks * self.watermark)),
            prefix_caching=self.prefix_caching,
            num_swap_blocks=self.swap_slots // self.block_size,
            preemption=PreemptionPolicy("swap" if self.swap_slots else "recompute"),
        )
        layout = KvLayout(1, 1, 2, self.block_size, "bfloat16", "simulated")
        runner = TimedRunner(layout, num_blocks, self.model, clock, self.block_copy_s)
        runner.arrivals = {str(one.number): one for one in arrivals}
        runner.core = EngineCore(runner, limits, clock_ns=clock.now_ns)
        return runner


@dataclass(slots=True)
class _Endings:
    """Tells the meter of every request whose last choice has ended."""

    meter: Meter
    arrivals: dict[str, Arrival]
    _num_ended: Counter[str] = field(default_factory=Counter)

    def count(self, outputs: SequenceOf[Output], clock: VirtualClock) -> int:
        num_finished = 0
        for output in outputs:
            if isinstance(output, BeamsFinished) or (isinstance(output, TokenSampled) and output.finish is not None):
                arrival = self.arrivals[output.seq_id]
                self._num_ended[output.seq_id] += 1
                if self._num_ended[output.seq_id] == arrival.num_choices:
                    self.meter.finish(arrival.at_s, clock.now_s, arrival.length.num_output_tokens)
                    num_finished += 1
        return num_finished


def _sequence(arrival: Arrival) -> Sequence:
    """A prompt that shares its prefix with all others and nothing more."""
    length = arrival.length
    own = [FIRST_OWN_TOKEN + arrival.number, *[PROMPT_TOKEN] * (length.num_prompt_tokens - arrival.num_prefix_tokens)]
    return Sequence(
        str(arrival.number),
        [*[PREFIX_TOKEN] * arrival.num_prefix_tokens, *own][: length.num_prompt_tokens],
        SamplingParams(max_tokens=length.num_output_tokens, ignore_eos=True),
        priority=Priority(arrival=arrival.number),
        num_choices=arrival.num_choices,
        beam=None if arrival.beam is None else BeamParams(arrival.beam.width),
    )


def _slots(core: EngineCore, num_new_tokens: int) -> Slots:
    """Slots of used blocks. A shared block counts once, as full: another is copied before one of its holders writes."""
    running = core.scheduler.running
    allocated = core.pool.counts.used * core.layout.block_size
    unshared = sum(len(sequence.block_table) for sequence in running) * core.layout.block_size
    used = num_new_tokens + sum(sequence.num_computed_tokens for sequence in running) - (unshared - allocated)
    return Slots(used, 0, allocated - used, allocated, unshared)
