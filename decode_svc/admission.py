"""Decode admission: which shipments may begin, and when a shipped sequence joins the batch. Plain state machine.

    register ──► offer ──► (waits) ──► granted ──► commit ──► in the batch
        └────────────────── unregister, at any point, frees everything once

A grant is one step, all or nothing: look up the prompt's blocks, pin the hits, reserve the rest and the room for the
next token. Nothing is held while a grant waits, so nothing can wait in a circle. Grants go by tier, deadline and
arrival, and so do preempted sequences among them. Runs on the engine's thread, between two steps (`EngineLoop.submit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.block_pool import Room
from engine.core import EngineCore
from engine.forward_batch import SampledToken
from engine.outputs import GrantMade, Output, SequenceCommitted
from engine.sequence import Sequence, SequenceStatus
from engine.waiting_queue import Admission, WaitingQueue
from kvferry.errors import FailedPrecondition, NotFound
from kvtransfer.transport import CommitOutcome


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room is reserved.

    Attributes:
        block_ids: the sequence's blocks, one an index; those not wanted hold their contents already.
        wanted: indices of the blocks that must be shipped, ascending.
    """

    block_ids: tuple[int, ...]
    wanted: tuple[int, ...]


class DecodeAdmission:
    """Registrations, waiting grants and reservations of one decode worker."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._waiting = WaitingQueue()
        self._registered: set[str] = set()  # whose KV is to arrive; others compute their prompts here
        self._committed: set[str] = set()
        self._new_commits: list[Output] = []  # at most two an attempt, told at the next step

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def register(self, sequence: Sequence) -> None:
        """Takes an attempt into the books; it holds no blocks yet. Raises like `EngineCore.add`."""
        self._core.register(sequence)
        self._registered.add(sequence.seq_id)

    def unregister(self, seq_id: str) -> None:
        """Ends an attempt in whatever state it is; an unknown id does nothing."""
        for sequence in self._core.remove(seq_id):
            self._waiting.remove(sequence)
        self._registered.discard(seq_id)
        self._committed.discard(seq_id)
        self._new_commits = [output for output in self._new_commits if output.seq_id != seq_id]

    def stop_choice(self, seq_id: str, choice: int) -> None:
        """Ends one choice of an attempt, also one that waits for its grant."""
        for sequence in self._core.remove_choice(seq_id, choice):
            self._waiting.remove(sequence)

    def offer(self, seq_id: str, block_hashes: list[bytes], num_tokens: int) -> bool:
        """Queues a grant for the attempt; False when it is committed already and needs none.

        Raises:
            NotFound: the attempt is not registered (any more).
            FailedPrecondition: the offer is not of this sequence, another one for it is under way, or nothing is to
                arrive for it.
        """
        if seq_id in self._committed:
            return False
        sequence = self._sequence(seq_id)
        if seq_id not in self._registered:
            raise FailedPrecondition(f"attempt {seq_id} computes its prompt on this worker")
        if sequence.block_table or sequence in self._waiting:
            raise FailedPrecondition(f"attempt {seq_id} is being shipped already")
        block_size = self._core.layout.block_size
        if num_tokens != sequence.num_tokens:
            raise FailedPrecondition(f"num_tokens: {num_tokens} offered, {sequence.num_tokens} registered")
        if block_hashes != sequence.block_hashes(num_tokens // block_size, block_size):
            raise FailedPrecondition("block_hashes: not those of the registered sequence")
        self._waiting.push(sequence)
        return True

    def _sequence(self, seq_id: str) -> Sequence:
        sequence = self._core.sequences.get(seq_id)
        if sequence is None:
            raise NotFound(f"attempt {seq_id} is not registered with this worker")
        return sequence

    def poll(self) -> list[Output]:
        """Tells of commits, and makes the grants that fit now; called before every step."""
        commits, self._new_commits = self._new_commits, []
        return [*commits, *self._make_grants()]

    def _make_grants(self) -> list[Output]:
        granted = self._waiting.admit(self._try_grant)
        if not granted and len(self._waiting) and self._core.yield_pins():
            granted = self._waiting.admit(self._try_grant)
        return [GrantMade(sequence.seq_id, self._wanted(sequence)) for sequence in granted]

    def _try_grant(self, sequence: Sequence) -> Admission:
        scheduler = self._core.scheduler
        if scheduler.num_seats_taken >= scheduler.max_running or scheduler.is_due_before(sequence):
            return Admission.CLOSED
        if not scheduler.has_seats_for(sequence):
            return scheduler.refusal(sequence)
        if self._core.defers_to_prefix(sequence):
            return Admission.DEFERRED
        match self._core.reserve(sequence):
            case Room.ENOUGH:
                return Admission.TAKEN
            case Room.OVER_QUOTA:
                return Admission.OVER_QUOTA
            case Room.NO_BLOCKS:
                return Admission.NO_ROOM

    def _wanted(self, sequence: Sequence) -> tuple[int, ...]:
        block_size = self._core.layout.block_size
        first = (sequence.num_cached_tokens or 0) // block_size
        return tuple(range(first, self._core.block_manager.num_blocks_for(sequence.num_tokens)))

    def reservation(self, seq_id: str) -> Reservation:
        """The reservation made for an attempt; raises NotFound when there is none."""
        sequence = self._sequence(seq_id)
        if sequence.status is not SequenceStatus.RESERVED:
            raise NotFound(f"attempt {seq_id} has no reservation")
        return Reservation(tuple(sequence.block_table), self._wanted(sequence))

    def withdraw(self, seq_id: str, num_arrived_tokens: int) -> None:
        """The shipment ended without a commit: frees what it held. Tokens of leading verified blocks stay cached."""
        sequence = self._core.sequences.get(seq_id)
        if sequence is None or seq_id in self._committed:
            return
        self._waiting.remove(sequence)
        if sequence.status is SequenceStatus.RESERVED:
            self._core.release_reservation(sequence, num_arrived_tokens)

    def commit(
        self, seq_id: str, first: list[SampledToken], digests: Mapping[int, bytes] = MappingProxyType({})
    ) -> CommitOutcome:
        """Everything arrived: the sequence joins the batch, with the token of each choice that the sender sampled.

        `digests`: of the full blocks that arrived, by index.

        Raises:
            NotFound: the attempt or its reservation is gone.
            FailedPrecondition: the tokens are not one a choice, are not the model's, or leave nothing to decode.
        """
        if seq_id in self._committed:
            return CommitOutcome.ALREADY_COMMITTED
        sequence = self._sequence(seq_id)
        if sequence.status is not SequenceStatus.RESERVED:
            raise NotFound(f"attempt {seq_id} has no reservation")
        _check_tokens(first, self._core.runner.vocab_size)
        choices = _choices_left(sequence, first)
        self._committed.add(seq_id)
        num_cached_tokens = sequence.num_cached_tokens or 0
        outputs = self._core.adopt(sequence, first, digests)
        self._new_commits += [SequenceCommitted(seq_id, num_cached_tokens, choices), *outputs]
        return CommitOutcome.COMMITTED


def _check_tokens(first: list[SampledToken], vocab_size: int) -> None:
    """They come from another process."""
    for token in first:
        if not 0 <= token.token_id < vocab_size:
            raise FailedPrecondition(
                f"commit.first_token_ids: {token.token_id}, the vocabulary has {vocab_size} tokens"
            )
        logprob = 0.0 if token.logprob is None else token.logprob.logprob
        if not (math.isfinite(logprob) and logprob <= 0.0):
            raise FailedPrecondition(f"commit.first_logprobs: {logprob} is no logarithm of a probability")


def _choices_left(sequence: Sequence, first: list[SampledToken]) -> tuple[int, ...]:
    """The choices that go on after their first token; a beam search counts as one."""
    if sequence.beam is not None:
        if any(one.logprob is None for one in first):
            raise FailedPrecondition("commit.first_logprobs: missing, and a beam search needs them")
        if not first or len({one.token_id for one in first}) != len(first):
            raise FailedPrecondition("commit.first_token_ids: the candidates of a beam search must differ")
        return (sequence.choice,)
    if len(first) != sequence.num_choices:
        raise FailedPrecondition(f"commit.first_token_ids: {len(first)} tokens for {sequence.num_choices} choices")
    index = sequence.num_output_tokens + 1
    ended = [sequence.sampling.finish_after(one.token_id, index) is not None for one in first]
    if all(ended):
        raise FailedPrecondition(f"commit.first_token_ids: token {first[0].token_id} ends the sequence")
    numbers = [sequence.choice + offset for offset, is_over in enumerate(ended) if not is_over]
    return tuple(number for number in numbers if number not in sequence.stopped_choices)
