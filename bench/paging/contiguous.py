"""The systems before paging: one contiguous reservation a sequence, by buddy allocation, or a static batch.

*Orca* variants schedule by iteration, first come first served, with the token budget of our own scheduler, so that they
differ from it in memory alone. They reserve when a sequence joins: Oracle its true length, Pow2 the prompt and the
next power of two above the output, Max the longest sequence allowed. The *static batch* (as FasterTransformer) takes
as many waiting requests as maximal reservations fit, pads them to the longest, and ends when the longest ends.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.paging.figures import Meter, RunFigures, Slots
from bench.paging.step_model import StepModel
from bench.paging.workload import Arrival
from kvferry.lengths import RequestLength


@dataclass(frozen=True, slots=True)
class Region:
    """`size` slots from `offset` on; the size is a power of two."""

    offset: int
    size: int


class BuddyPool:
    """Binary buddy allocation over any number of slots: arenas of falling powers of two."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        offset = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(offset)
                offset += size

    def allocate(self, num_slots: int) -> Region | None:
        """The smallest power of two that holds `num_slots`, split off the smallest free region; None without one."""
        wanted = round_up(num_slots)
        size = wanted
        while size in self._free and not self._free[size]:
            size *= 2
        if size not in self._free:
            return None
        offset = min(self._free[size])
        self._free[size].remove(offset)
        while size > wanted:
            size //= 2
            self._free[size].add(offset + size)
        return Region(offset, wanted)

    def free(self, region: Region) -> None:
        """Gives a region back and merges it with its buddies."""
        offset, size = region.offset, region.size
        while offset ^ size in self._free.get(size, ()):
            self._free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._free[size].add(offset)


def round_up(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


class Reservation(enum.Enum):
    """How much a contiguous system reserves."""

    ORACLE = "Orca (Oracle)"
    POW2 = "Orca (Pow2)"
    MAX = "Orca (Max)"

    def num_slots(self, length: RequestLength, max_tokens: int) -> int:
        match self:
            case Reservation.ORACLE:
                return length.num_tokens
            case Reservation.POW2:
                return min(max_tokens, length.num_prompt_tokens + round_up(length.num_output_tokens))
            case Reservation.MAX:
                return max_tokens


@dataclass(slots=True)
class _Held:
    arrival: Arrival
    region: Region
    num_reserved: int
    num_computed: int = 0
    num_output: int = 0

    @property
    def num_uncomputed(self) -> int:
        return self.arrival.length.num_prompt_tokens + self.num_output - self.num_computed


@dataclass(slots=True)
class ContiguousSystem:
    """One Orca variant in virtual time."""

    reservation: Reservation
    num_slots: int
    max_tokens: int
    model: StepModel
    max_batched_tokens: int
    max_running: int
    now_s: float = 0.0
    _pool: BuddyPool = field(init=False)
    _waiting: deque[Arrival] = field(default_factory=deque)
    _held: list[_Held] = field(default_factory=list)
    _slots: Slots = field(default_factory=lambda: Slots(0, 0, 0, 0, 0))
    _num_held: int = 0

    def __post_init__(self) -> None:
        self._pool = BuddyPool(self.num_slots)

    def run(self, arrivals: Sequence[Arrival], num_warm_up: int = 0) -> RunFigures:
        """Serves `arrivals`, which are in order of time, to the end."""
        meter = Meter(self.num_slots, num_warm_up)
        coming = deque(arrivals)
        while coming or self._waiting or self._held:
            while coming and coming[0].at_s <= self.now_s:
                self._waiting.append(coming.popleft())
            if not self._waiting and not self._held:
                self.now_s = coming[0].at_s
                continue
            before_s = self.now_s
            num_finished = self._step(meter)
            meter.step(
                self.now_s - before_s, self._slots, self._num_held, num_finished, is_saturated=bool(self._waiting)
            )
        return meter.figures()

    def _step(self, meter: Meter) -> int:
        """One iteration: decodes, prompts under way, then newcomers, within the budget; returns how many finished."""
        budget = self.max_batched_tokens
        chunks: list[tuple[_Held, int]] = []
        for held in sorted(self._held, key=lambda one: one.num_uncomputed > 1):
            num_tokens = min(held.num_uncomputed, budget)
            budget -= num_tokens
            chunks.append((held, num_tokens))
        while budget > 0 and (newcomer := self._admit()):
            num_tokens = min(newcomer.num_uncomputed, budget)
            budget -= num_tokens
            chunks.append((newcomer, num_tokens))
        for held, num_tokens in chunks:
            held.num_computed += num_tokens
        self._slots, self._num_held = self._count_slots(), len(self._held)
        scheduled = [held for held, num_tokens in chunks if num_tokens > 0]
        num_context_tokens = sum(held.num_computed for held in scheduled)
        self.now_s += self.model.step_s(self.max_batched_tokens - budget, num_context_tokens)
        return sum(self._sample(held, meter) for held in scheduled)

    def _admit(self) -> _Held | None:
        """The oldest waiting request, if it fits; nobody overtakes it."""
        if not self._waiting or len(self._held) >= self.max_running:
            return None
        num_reserved = self.reservation.num_slots(self._waiting[0].length, self.max_tokens)
        region = self._pool.allocate(num_reserved)
        if region is None:
            return None
        held = _Held(self._waiting.popleft(), region, num_reserved)
        self._held.append(held)
        return held

    def _sample(self, held: _Held, meter: Meter) -> bool:
        """One token where all known ones are computed; whether it was the last."""
        if held.num_uncomputed > 0:
            return False
        held.num_output += 1
        length = held.arrival.length
        if held.num_output < length.num_output_tokens:
            return False
        self._pool.free(held.region)
        self._held.remove(held)
        meter.finish(held.arrival.at_s, self.now_s, length.num_output_tokens)
        return True

    def _count_slots(self) -> Slots:
        used = sum(held.num_computed for held in self._held)
        needed = sum(held.arrival.length.num_tokens for held in self._held)
        reserved = sum(held.num_reserved for held in self._held)
        allocated = sum(held.region.size for held in self._held)
        return Slots(used, needed - used, reserved - needed, allocated, allocated)


def run_static_batches(
    arrivals: Sequence[Arrival], num_slots: int, max_tokens: int, model: StepModel, max_batched_tokens: int
) -> RunFigures:
    """Serves `arrivals` in static batches; a result is out when its batch has ended."""
    meter = Meter(num_slots, 0)
    max_batch = num_slots // max_tokens
    coming = deque(arrivals)
    now_s = 0.0
    while coming:
        now_s = max(now_s, coming[0].at_s)
        batch: list[Arrival] = []
        while coming and coming[0].at_s <= now_s and len(batch) < max_batch:
            batch.append(coming.popleft())
        start_s = now_s
        now_s += _batch_s([one.length for one in batch], model, max_batched_tokens)
        for one in batch:
            meter.finish(one.at_s, now_s, one.length.num_output_tokens)
        slots = Slots(0, 0, 0, len(batch) * max_tokens, len(batch) * max_tokens)
        is_full = len(batch) == max_batch
        meter.step(now_s - start_s, slots, len(batch), len(batch), is_saturated=is_full)
    return meter.figures()


def _batch_s(lengths: Sequence[RequestLength], model: StepModel, max_batched_tokens: int) -> float:
    """Time of a padded batch: the prompts in steps of the budget, then one step for each further token."""
    size = len(lengths)
    num_prompt = max(length.num_prompt_tokens for length in lengths)
    num_output = max(length.num_output_tokens for length in lengths)
    prefill_s = model.prefill_s(size * num_prompt, max_batched_tokens)
    num_context_tokens = size * sum(num_prompt + step for step in range(1, num_output))
    decode_s = (num_output - 1) * model.step_s(size, 0) + model.context_token_s * num_context_tokens
    return prefill_s + decode_s
