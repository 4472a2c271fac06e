"""Chooses what one step computes: continuous batching, chunked prefill, optimistic admission, preemption.

There are no phases: every running sequence has tokens whose KV is missing (one while it decodes, many while it
prefills) and gets as many of them as the token budget allows: decodes first, then prompts, each in order of priority.
When a sequence cannot grow, the running unit (a sequence, or the beams of a gang) of the lowest priority gives up its
blocks and waits again: swapped to the host pool, or to be recomputed from what the prefix cache still holds. When a
waiting one finds no room, held prompts whose shipment has no grant yet are parked. Plain state machine: no torch, no
clock, no threads. What a step has left of budget and blocks may go to drafts (`speculation.py`), which nothing gives
way to.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from engine.block_manager import BlockManager
from engine.block_pool import Room
from engine.preemption import RECOMPUTE, PreemptionPolicy
from engine.sequence import Sequence, SequenceStatus
from engine.speculation import Speculator, may_speculate
from engine.waiting_queue import Admission, WaitingQueue
from kvferry.stats import MemoryCounters

MAX_SCORED_TOKENS = 256
"""Tokens of a step whose logits are all needed, a row of the vocabulary each: 50 MB of float32 with 49,152 entries."""
MAX_DRAFTED_TOKENS = 128
"""Those of a step's drafts, which need theirs too."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`num_tokens` tokens of `sequence`, from its first uncomputed one on, and a draft behind the last known one."""

    sequence: Sequence
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk holds the last known token, so that the next one can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence that gave up its blocks, and how."""

    sequence: Sequence
    is_swapped: bool


@dataclass(slots=True)
class Schedule:
    """One step: what is computed, who joined, who was preempted."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens + len(chunk.draft) for chunk in self.chunks)

    @property
    def num_scored_tokens(self) -> int:
        """Those of sequences that are still to tell log-probabilities of their prompts."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.sequence.scoring is not None)


class Scheduler:
    """Queues of one engine.

    Args:
        block_manager: the blocks.
        max_batched_tokens: token budget of a step.
        max_running: most sequences in the batch; every one of them may need a token of the budget.
        max_chunk_tokens: most tokens of one sequence in one step.
        preemption: recompute or swap.
        counters: what is counted here.
        speculator: makes drafts; None: there are none.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_batched_tokens: int,
        max_running: int,
        max_chunk_tokens: int,
        preemption: PreemptionPolicy | None = None,
        counters: MemoryCounters | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        if max_running > max_batched_tokens:
            raise ValueError(
                f"max_running: must be at most max_batched_tokens ({max_batched_tokens}), got {max_running}"
            )
        self.block_manager = block_manager
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.max_chunk_tokens = max_chunk_tokens
        self.preemption = preemption or RECOMPUTE
        self.counters = counters or MemoryCounters()
        self.speculator = speculator
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of priority; beams of a gang side by side
        self.reserved: set[Sequence] = set()  # will join when their KV has arrived
        self.held: list[Sequence] = []  # computed and kept for shipping, in order of priority

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def is_due_before(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits in this queue, for room and not for its quota, comes before `sequence`.

        Preempted ones, and choices that found no place in the batch, wait here too.
        """
        ready = (other for other in self.waiting if not other.waits_for_quota)
        first = next(ready, None)
        return first is not None and first.priority.key < sequence.priority.key

    @property
    def num_preemptions(self) -> int:
        return self.counters.num_recompute_preemptions + self.counters.num_swap_preemptions

    @property
    def num_seats_taken(self) -> int:
        """Places in the batch: of running and reserved sequences, and of the beams that prompts will fork into."""
        return sum(sequence.num_seats for sequence in (*self.running, *self.reserved))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence without blocks; of a gang, the first member stands for all."""
        for member in sequence.unit:
            member.status = SequenceStatus.WAITING
        self.waiting.push(sequence)

    def start(self, sequence: Sequence) -> None:
        """Puts a sequence that has its blocks into the batch."""
        self.reserved.discard(sequence)
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=lambda other: other.priority.key)

    def hold(self, sequence: Sequence) -> None:
        """Ends a prompt's part in the batch; it keeps its blocks until it is removed, or parked."""
        self.remove(sequence)
        sequence.status = SequenceStatus.HELD
        bisect.insort(self.held, sequence, key=lambda other: other.priority.key)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of queue and batch; its blocks stay with it."""
        self.waiting.remove(sequence)
        self.reserved.discard(sequence)
        for members in (self.running, self.held):
            if sequence in members:
                members.remove(sequence)

    def schedule(self) -> Schedule:
        """Decides the next step and makes room for it."""
        schedule = Schedule()
        self._schedule_decodes(schedule)
        self._schedule_prefills(schedule)
        if not schedule.preempted:
            self._schedule_waiting(schedule)
            self._add_drafts(schedule)
        return schedule

    # -- running sequences ----------------------------------------------------------------------------------------

    def _schedule_decodes(self, schedule: Schedule) -> None:
        """One token for each sequence that decodes; these go first so that no prompt can stall them."""
        for sequence in [other for other in self.running if other.num_uncomputed_tokens == 1]:
            if sequence.gang is not None and (sequence is not sequence.unit[0] or not sequence.gang.can_step):
                continue  # the gang goes with its first member, when all can
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence.unit, schedule):
                schedule.chunks += [ScheduledChunk(member, 1) for member in sequence.unit]

    def _schedule_prefills(self, schedule: Schedule) -> None:
        """Chunks of prompts under way; their blocks were allocated when they were admitted."""
        for sequence in [other for other in self.running if other.num_uncomputed_tokens > 1]:
            self._append_chunk(schedule, sequence)

    def _append_chunk(self, schedule: Schedule, sequence: Sequence) -> None:
        num_missing = sequence.num_uncomputed_tokens
        if sequence.gang is not None:
            num_missing -= 1  # the last one is computed with those of the other beams
            if not sequence.prefix_is_computed():
                return
        budget = self.max_batched_tokens - schedule.num_tokens
        num_tokens = min(num_missing, budget, self.max_chunk_tokens)
        if sequence.scoring is not None:
            num_tokens = min(num_tokens, MAX_SCORED_TOKENS - schedule.num_scored_tokens)
        if num_tokens > 0:
            schedule.chunks.append(ScheduledChunk(sequence, num_tokens))

    def _make_room(self, unit: SequenceOf[Sequence], schedule: Schedule) -> bool:
        """Room for one token more of each; lower priorities, then the unit itself, give up theirs."""
        for sequence in unit:
            while not self.block_manager.prepare_write(sequence):
                victim = self._victim(sequence)
                self.preempt(victim, schedule)
                if victim[0] is unit[0]:
                    return False
        return True

    def _victim(self, sequence: Sequence) -> SequenceOf[Sequence]:
        """The unit of the lowest priority; of the same tenant where its quota is what is short.

        Not one whose blocks may be on their way out, which must stay as they are.
        """
        others = [other for other in self.running if not other.hold_after_prefill]
        if self.block_manager.is_over_quota(sequence):
            others = [other for other in others if other.tenant == sequence.tenant]
        return others[-1].unit

    def preempt(self, unit: SequenceOf[Sequence], schedule: Schedule) -> None:
        """Takes a running unit's blocks and queues it, swapped or to be recomputed; noted in `schedule`."""
        prefers_swap = self.preemption.prefers_swap(unit, self.block_manager.block_size)
        is_swapped = prefers_swap and self.block_manager.swap_out(unit)
        for sequence in unit:
            self.running.remove(sequence)
            sequence.num_preemptions += 1
            schedule.preempted.append(Preempted(sequence, is_swapped))
            if is_swapped:
                self.counters.num_swap_preemptions += 1
            else:
                sequence.num_lost_tokens = sequence.num_computed_tokens
                self.counters.num_recompute_preemptions += 1
                self.block_manager.free(sequence)
        self.add(unit[0])

    def _add_drafts(self, schedule: Schedule) -> None:
        """Drafts behind the decodes, from the budget and the blocks that are left; nothing is preempted for them."""
        if self.speculator is None:
            return
        num_decodes = sum(chunk.sequence.num_uncomputed_tokens == 1 for chunk in schedule.chunks)
        outlook = self.speculator.outlook(num_decodes)
        budget = min(self.max_batched_tokens - schedule.num_tokens, MAX_DRAFTED_TOKENS)
        for index, chunk in enumerate(schedule.chunks):
            sequence = chunk.sequence
            if not may_speculate(sequence):
                continue
            num_left = sequence.max_kv_tokens - sequence.num_tokens  # the last output token's KV is not wanted
            most = min(budget, num_left, self.max_chunk_tokens - chunk.num_tokens)
            draft = self.speculator.propose(sequence, most, outlook)
            draft = draft[: self.block_manager.extend(sequence, len(draft))]
            if draft:
                schedule.chunks[index] = replace(chunk, draft=tuple(draft))
                budget -= len(draft)

    # -- waiting sequences ----------------------------------------------------------------------------------------

    def _schedule_waiting(self, schedule: Schedule) -> None:
        schedule.admitted.extend(self.waiting.admit(lambda sequence: self._try_admit(sequence, schedule)))

    def _try_admit(self, sequence: Sequence, schedule: Schedule) -> Admission:
        unit = sequence.unit
        if schedule.num_tokens >= self.max_batched_tokens or self.num_seats_taken >= self.max_running:
            return Admission.CLOSED
        if not self.has_seats_for(sequence):
            return self.refusal(sequence)
        was_swapped = sequence.swapped is not None
        if not was_swapped and self.defers_to_prefix(sequence, sequence.num_hittable_tokens):
            return Admission.NO_ROOM if sequence.num_preemptions else Admission.DEFERRED
        take = self.block_manager.swap_in if was_swapped else self.block_manager.admit
        room = take(unit, keep_watermark=bool(self.running))
        while room is not Room.ENOUGH and self.park_one(sequence, room):
            room = take(unit, keep_watermark=bool(self.running))
        sequence.waits_for_quota = room is Room.OVER_QUOTA
        if room is not Room.ENOUGH:
            return Admission.OVER_QUOTA if room is Room.OVER_QUOTA else Admission.NO_ROOM
        if not was_swapped:
            self._count_admission(unit)
        for member in unit:
            self.start(member)
            if not was_swapped or member.num_uncomputed_tokens > 1:
                self._append_chunk(schedule, member)
        return Admission.TAKEN

    def park_one(self, sequence: Sequence, room: Room) -> bool:
        """Has a held prompt that waits for its grant give up its blocks for `sequence`; False: none can help it.

        The lowest priority goes first, but any may have to go, also one of a better tier: what cannot be parked runs or
        is being shipped, and ends without more blocks of this pool. So nothing waits in a circle, not even by way of a
        decode worker, whose room may be reserved for a prompt that waits here.
        """
        for held in reversed(self.held):
            helps = room is Room.NO_BLOCKS or self.block_manager.holds_blocks_of(held, sequence.tenant)
            if helps and held.hold.park():  # not before, and the blocks are freed only after
                self.held.remove(held)
                held.status = SequenceStatus.PARKED
                held.num_lost_tokens = held.num_computed_tokens
                self.counters.num_parked_prompts += 1
                self.block_manager.free(held)
                return True
        return False

    def has_seats_for(self, sequence: Sequence) -> bool:
        """Whether the batch has places for a sequence and the beams it is or will be."""
        num_seats = sum(member.num_seats for member in sequence.unit)
        return self.num_seats_taken + num_seats <= self.max_running

    def refusal(self, sequence: Sequence) -> Admission:
        """What to say to a search for whose beams the batch has too few places, but has some."""
        num_blocks = self.block_manager.num_blocks_for(sequence.num_tokens)
        sequence.waits_for_quota = self.block_manager.is_over_quota(sequence, num_blocks)
        return Admission.OVER_QUOTA if sequence.waits_for_quota else Admission.NO_ROOM

    def defers_to_prefix(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether another sequence is about to have the next block this one lacks: sooner than computing it anew.

        One of a lower tier is not waited for. `num_tokens`: how many of the sequence's tokens may be hits.
        """
        leader = self.block_manager.computing_next(sequence, num_tokens)
        if leader is None or leader.priority.tier_rank > sequence.priority.tier_rank:
            return False
        self.counters.num_prefix_waits += not sequence.has_waited_for_prefix  # once a sequence
        sequence.has_waited_for_prefix = True
        return True

    def _count_admission(self, unit: SequenceOf[Sequence]) -> None:
        for sequence in unit:
            lost = min(sequence.num_lost_tokens, sequence.num_tokens)
            self.counters.num_recomputed_tokens += max(0, lost - sequence.num_computed_tokens)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
