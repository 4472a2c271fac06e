"""Chooses what one step computes: continuous batching, chunked prefill, optimistic admission, preemption by recompute.

There are no phases: every running sequence has tokens whose KV is missing (one while it decodes, many while it
prefills) and gets as many of them as the token budget allows: decodes first, then prompts, each in order of priority.
When a sequence cannot grow, the running sequence of the lowest priority gives up its blocks and waits again; its full
blocks stay cached, the rest is recomputed. Plain state machine: no torch, no clock, no threads.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.sequence import Sequence, SequenceStatus
from engine.waiting_queue import Admission, WaitingQueue


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`num_tokens` tokens of `sequence`, from its first uncomputed one on."""

    sequence: Sequence
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk holds the last known token, so that the next one can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(slots=True)
class Schedule:
    """One step: what is computed, who joined, who was preempted."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Queues of one engine.

    Args:
        block_manager: the blocks.
        max_batched_tokens: token budget of a step.
        max_running: most sequences in the batch; every one of them may need a token of the budget.
        max_chunk_tokens: most tokens of one sequence in one step.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_batched_tokens: int, max_running: int, max_chunk_tokens: int
    ) -> None:
        if max_running > max_batched_tokens:
            raise ValueError(
                f"max_running: must be at most max_batched_tokens ({max_batched_tokens}), got {max_running}"
            )
        self.block_manager = block_manager
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.max_chunk_tokens = max_chunk_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of priority
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def has_preempted(self) -> bool:
        return any(sequence.num_preemptions > 0 for sequence in self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence without blocks."""
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)

    def start(self, sequence: Sequence) -> None:
        """Puts a sequence that has its blocks into the batch."""
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=lambda other: other.priority.key)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of queue and batch; its blocks stay with it."""
        self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)

    def schedule(self) -> Schedule:
        """Decides the next step and makes room for it."""
        schedule = Schedule()
        self._schedule_decodes(schedule)
        self._schedule_prefills(schedule)
        if not schedule.preempted:
            self._schedule_waiting(schedule)
        return schedule

    def _schedule_decodes(self, schedule: Schedule) -> None:
        """One token for each sequence that decodes; these go first so that no prompt can stall them."""
        for sequence in [other for other in self.running if other.num_uncomputed_tokens == 1]:
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence, schedule):
                schedule.chunks.append(ScheduledChunk(sequence, 1))

    def _schedule_prefills(self, schedule: Schedule) -> None:
        """Chunks of prompts under way; their blocks were allocated when they were admitted."""
        for sequence in [other for other in self.running if other.num_uncomputed_tokens > 1]:
            self._append_chunk(schedule, sequence)

    def _append_chunk(self, schedule: Schedule, sequence: Sequence) -> None:
        budget = self.max_batched_tokens - schedule.num_tokens
        num_tokens = min(sequence.num_uncomputed_tokens, budget, self.max_chunk_tokens)
        if num_tokens > 0:
            schedule.chunks.append(ScheduledChunk(sequence, num_tokens))

    def _make_room(self, sequence: Sequence, schedule: Schedule) -> bool:
        """Room for one token more; lower priorities, then the sequence itself, give up theirs."""
        while not self.block_manager.grow(sequence, sequence.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            schedule.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.block_manager.free(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.add(victim)

    def _schedule_waiting(self, schedule: Schedule) -> None:
        def try_admit(sequence: Sequence) -> Admission:
            if schedule.num_tokens >= self.max_batched_tokens or len(self.running) >= self.max_running:
                return Admission.CLOSED
            if not self.block_manager.admit(sequence, keep_watermark=bool(self.running)):
                return Admission.NO_ROOM
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            self.start(sequence)
            self._append_chunk(schedule, sequence)
            return Admission.TAKEN

        schedule.admitted.extend(self.waiting.admit(try_admit))
