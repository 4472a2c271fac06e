"""Random operations on one engine, integrity checked after each: add, step, cancel, shipments in every state, flush."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from decode_svc.admission import DecodeAdmission
from engine.core import EngineCore, EngineLimits
from engine.outputs import GrantMade, TokenSampled
from engine.scripted import ScriptedRunner, reference_continuation, slots_of
from engine.sequence import Priority, Sequence
from kvferry.errors import ResourceExhausted
from kvferry.sampling import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 24
MAX_STEPS_TO_DRAIN = 5_000


class EngineMachine(RuleBasedStateMachine):
    """What a decode worker's engine goes through; every token is compared with the oracle as it comes."""

    def __init__(self) -> None:
        super().__init__()
        limits = EngineLimits(max_batched_tokens=64, max_running=8, max_chunk_tokens=16)
        self.core = EngineCore(ScriptedRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), limits, clock_ns=int)
        self.admission = DecodeAdmission(self.core)
        self.expected: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.granted: set[str] = set()
        self.num_made = 0

    def make(self, family: int, num_tokens: int, max_tokens: int, rank: int) -> Sequence:
        """A sequence whose prompt shares its beginning with the others of its family."""
        self.num_made += 1
        prompt = [family * 100 + position for position in range(num_tokens)]
        prompt[-1] += self.num_made % 3
        sequence = Sequence(
            f"s{self.num_made}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            priority=Priority(tier_rank=rank, arrival=self.num_made),
            hash_root=self.core.hash_root(),
        )
        self.prompts[sequence.seq_id] = prompt
        self.expected[sequence.seq_id] = reference_continuation(prompt, max_tokens)
        return sequence

    @rule(family=integers(0, 2), num_tokens=integers(1, 40), max_tokens=integers(1, 30), rank=integers(0, 2))
    def add(self, family: int, num_tokens: int, max_tokens: int, rank: int) -> None:
        self.core.add(self.make(family, num_tokens, max_tokens, rank))

    @rule(family=integers(0, 2), num_tokens=integers(1, 40), max_tokens=integers(2, 30), rank=integers(0, 2))
    def offer(self, family: int, num_tokens: int, max_tokens: int, rank: int) -> None:
        sequence = self.make(family, num_tokens, max_tokens, rank)
        self.admission.register(sequence)
        self.admission.offer(sequence.seq_id, sequence.block_hashes(num_tokens // BLOCK_SIZE, BLOCK_SIZE), num_tokens)

    @rule()
    def refuse_what_can_never_fit(self) -> None:
        try:
            self.core.add(self.make(0, 60, 60, 0))
        except ResourceExhausted:
            return
        raise AssertionError("a sequence larger than the pool was taken")

    @rule(number=integers(1, 5))
    def step(self, number: int) -> None:
        for _ in range(number):
            self.run_once()

    def run_once(self) -> None:
        for output in [*self.admission.poll(), *self.core.step()]:
            if isinstance(output, GrantMade):
                self.granted.add(output.seq_id)
            if isinstance(output, TokenSampled):
                assert output.token_id == self.expected[output.seq_id][output.token_index]

    @precondition(lambda self: self.granted)
    @rule(choice=integers(0, 100), all_arrived=sampled_from([True, True, False]))
    def ship(self, choice: int, all_arrived: bool) -> None:
        """A granted shipment arrives whole and is committed, or breaks off after some blocks."""
        seq_id = sorted(self.granted)[choice % len(self.granted)]
        self.granted.discard(seq_id)
        reservation, prompt = self.admission.reservation(seq_id), self.prompts[seq_id]
        size = BLOCK_SIZE * 8
        contents = slots_of(prompt).ljust(len(reservation.block_ids) * size, b"\0")
        arrived = reservation.wanted if all_arrived else reservation.wanted[: len(reservation.wanted) // 2]
        for index in arrived:
            view = self.core.runner.block_view(reservation.block_ids[index])
            view[:] = contents[index * size : (index + 1) * size]
        if all_arrived:
            self.admission.commit(seq_id, self.expected[seq_id][:1])
            return
        first_missing = next(iter(sorted(set(reservation.wanted) - set(arrived))), len(prompt) // BLOCK_SIZE)
        self.admission.withdraw(seq_id, min(first_missing, len(prompt) // BLOCK_SIZE) * BLOCK_SIZE)

    @precondition(lambda self: self.core.sequences)
    @rule(choice=integers(0, 100))
    def cancel(self, choice: int) -> None:
        seq_id = sorted(self.core.sequences)[choice % len(self.core.sequences)]
        self.granted.discard(seq_id)
        for _ in range(2):
            self.admission.unregister(seq_id)

    @rule()
    def flush(self) -> None:
        self.core.pool.flush()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.core.check_integrity()

    @invariant()
    def cached_blocks_hold_what_their_hash_names(self) -> None:
        for sequence in self.core.sequences.values():
            for index in range(sequence.num_published_blocks):
                view = bytes(self.core.runner.block_view(sequence.block_table[index]))
                size = BLOCK_SIZE * 8
                tokens = sequence.token_ids[: (index + 1) * BLOCK_SIZE]
                assert view == slots_of(tokens)[index * size : (index + 1) * size]

    def teardown(self) -> None:
        """Whatever is left runs to its end: nothing waits for ever."""
        for seq_id in [name for name, one in self.core.sequences.items() if one not in self.core.scheduler.running]:
            if self.core.sequences[seq_id] not in list(self.core.scheduler.waiting):
                self.admission.unregister(seq_id)
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.core.has_work:
                break
            self.run_once()
        assert not self.core.has_work, "sequences are left that never ran"
        self.core.check_integrity()
        assert self.core.pool.counts.used == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_twenty_thousand_random_operations_keep_the_books() -> None:
    """The same operations in one long run, so that eviction, preemption and reuse meet each other often."""
    machine, rng = EngineMachine(), random.Random(20)
    for _ in range(20_000):
        which = rng.random()
        if which < 0.15 and len(machine.core.sequences) < 30:
            machine.add(rng.randrange(3), rng.randint(1, 40), rng.randint(1, 30), rng.randrange(3))
        elif which < 0.3 and len(machine.core.sequences) < 30:
            machine.offer(rng.randrange(3), rng.randint(1, 40), rng.randint(2, 30), rng.randrange(3))
        elif which < 0.35 and machine.granted:
            machine.ship(rng.randrange(100), rng.random() < 0.7)
        elif which < 0.4 and machine.core.sequences:
            machine.cancel(rng.randrange(100))
        elif which < 0.401:
            machine.flush()
        else:
            machine.run_once()
        machine.every_block_is_accounted_for()
    machine.teardown()
    assert machine.core.stats().num_preemptions > 100
    assert machine.core.pool.num_evictions > 1_000
