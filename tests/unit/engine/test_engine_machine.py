"""Random operations on one engine, integrity checked after each, every token compared with the oracle as it comes.

Requests of one and several choices and beam searches, computed here, shipped in and held for shipping out, resumed,
stopped, cancelled; tenants with quotas, pins, flushes; preemption by want of room and at random, recompute and swap;
held prompts parked and recalled; drafts of every kind, right and wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import integers, sampled_from

from decode_svc.admission import DecodeAdmission
from engine.beam import Hypothesis
from engine.block_pool import BlockQuota, Room, TenantBlocks
from engine.core import EngineLimits
from engine.memory_admin import pin_prefix
from engine.outputs import (
    BeamsFinished,
    CandidatesFound,
    GrantMade,
    Output,
    SequenceFailed,
    SequencePreempted,
    SequenceRestored,
    TokenSampled,
)
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.scripted import slots_of
from engine.sequence import Sequence, SequenceStatus
from kvferry.errors import ResourceExhausted
from kvferry.sampling import BeamParams, SamplingParams
from kvferry.spec import CachedPrefix
from tests.support.drafts import LONGEST_DRAFT, scripted_drafts, speculate
from tests.support.engines import (
    BLOCK_SIZE,
    deny_room,
    expected_beams,
    expected_tokens,
    first_tokens,
    make_core,
    make_sequence,
    poison_free_blocks,
    ship,
)

NUM_BLOCKS = 24
MAX_LIVE_ATTEMPTS = 16
MAX_STEPS_TO_DRAIN = 2_000
QUOTA = BlockQuota(max_used_blocks=12, max_cached_blocks=4)
TENANTS = ("", "metered", "other")
EVERYTHING = (
    "added", "offered", "resumed", "held", "cancelled", "stopped before the fork", "stopped after the fork",
    "committed", "withdrawn", "flushed", "pinned", "unpinned", "beams finished", "choices finished", "over quota",
    "never fits", "preempted by recompute", "preempted by swap", "secured", "recalled", "restored", "shipped out",
    "cancelled while parked",
)  # fmt: skip


@dataclass(slots=True)
class Attempt:
    """What one attempt has to bring, and what it brought."""

    sequence: Sequence
    prompt: list[int]
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice, those of before a resume included
    num_told: Counter[int] = field(default_factory=Counter)  # tokens known outside, by choice
    beams: tuple[Hypothesis, ...] = ()
    open: set[int] = field(default_factory=set)  # choices that must still end
    is_shared: bool = False  # its blocks may be another tenant's
    secured_blocks: list[int] | None = None  # its table since it is held and secured


class EngineTrial:
    """One engine and everything that can be done to it.

    Args:
        mode: how preempted sequences give up their blocks; "auto" swaps those that fill their blocks well.
        seed: of the random preemptions; with an odd one the metered tenant shares blocks with others, whose hits then
            count against its quota.
        speculates: sequences that decode get drafts.
    """

    def __init__(self, mode: PreemptionMode = "auto", seed: int = 0, *, speculates: bool = False) -> None:
        limits = EngineLimits(
            max_batched_tokens=64,
            max_running=8,
            max_chunk_tokens=16,
            num_swap_blocks=16,
            preemption=PreemptionPolicy(mode, recompute_s_per_token=1.0, swap_s_per_block=1.8),
            quotas={"metered": QUOTA},
        )
        self.core = make_core(NUM_BLOCKS, limits)
        self.admission = DecodeAdmission(self.core)
        self.attempts: dict[str, Attempt] = {}
        self.granted: set[str] = set()
        self.met: Counter[str] = Counter()
        self.pressure = 0.0  # how often a running sequence is denied the room it asks for
        self._sharers = TENANTS if seed % 2 else ("", "other")
        self._num_made = 0
        self._count_denials()
        rng = random.Random(seed)
        deny_room(self.core, lambda: rng.random() < self.pressure)
        self.drafts = scripted_drafts(random.Random(seed))
        if speculates:
            speculate(self.core, self.drafts)

    def _count_denials(self) -> None:
        pool = self.core.pool
        room = pool.room

        def counted(num_blocks: int, *, revived: Iterable[int] = (), spare: int = 0, tenant: str = "") -> Room:
            answer = room(num_blocks, revived=revived, spare=spare, tenant=tenant)
            self.met["over quota"] += answer is Room.OVER_QUOTA
            return answer

        pool.room = counted  # type: ignore[method-assign]

    # -- requests -------------------------------------------------------------------------------------------------

    def draw(self, rng: random.Random, *, is_held: bool = False) -> Attempt:
        """A request of random kind whose prompt shares its beginning with the others of its family."""
        self._num_made += 1
        family, num_tokens = rng.randrange(3), rng.randint(1, 40)
        prompt = [family * 100 + position for position in range(num_tokens)]
        prompt[-1] += self._num_made % 3
        beam = BeamParams(rng.randint(1, 3), 1.0, rng.random() < 0.5, 1) if rng.random() < 0.2 else None
        num_choices = 1 if beam or rng.random() < 0.5 else rng.randint(2, 4)
        is_resumed = beam is None and num_choices == 1 and rng.random() < 0.3
        tenant, choice = rng.choice(TENANTS), rng.randrange(4) if is_resumed else 0
        is_shared = tenant in self._sharers and rng.random() < 0.2
        sampling = SamplingParams(
            max_tokens=rng.randint(2, 10 if beam else 30), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9)
        )
        if rng.random() < 0.3:  # an end that comes sooner
            stop = rng.choice(expected_tokens(prompt, sampling, choice))
            sampling = SamplingParams(
                sampling.max_tokens, sampling.temperature, seed=sampling.seed, stop_token_ids=(stop,)
            )
        whole = expected_tokens(prompt, sampling, choice)
        output = whole[: rng.randrange(len(whole))] if is_resumed and not is_held else []
        sequence = make_sequence(
            self.core,
            f"s{self._num_made}",
            prompt,
            sampling.max_tokens,
            output=output,
            arrival=self._num_made,
            tier_rank=rng.randrange(3),
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            tenant=tenant,
            shared_salt="club" if is_shared else "",
            choice=choice,
            num_choices=num_choices,
            beam=beam,
            hold_after_prefill=is_held,
            use_prefix_cache=rng.random() < 0.85,
        )
        self.met["resumed"] += bool(output)
        return Attempt(sequence, prompt, is_shared=is_shared)

    def _expect(self, attempt: Attempt) -> None:
        """What the oracle says of an attempt that was taken."""
        sequence = attempt.sequence
        attempt.open = set(range(sequence.choice, sequence.choice + sequence.num_choices))
        if sequence.beam is not None:
            attempt.beams = expected_beams(attempt.prompt, sequence.beam, sequence.sampling)
        else:
            attempt.tokens = {c: expected_tokens(attempt.prompt, sequence.sampling, c) for c in attempt.open}
            attempt.num_told.update({c: sequence.num_output_tokens for c in attempt.open})
        self.attempts[sequence.seq_id] = attempt

    def add(self, rng: random.Random, *, is_held: bool = False) -> None:
        attempt = self.draw(rng, is_held=is_held)
        try:
            self.core.add(attempt.sequence)
        except ResourceExhausted:
            self.met["never fits"] += 1
            return
        self._expect(attempt)
        self.met["held" if is_held else "added"] += 1

    def offer(self, rng: random.Random) -> None:
        attempt = self.draw(rng)
        sequence = attempt.sequence
        try:
            self.admission.register(sequence)
        except ResourceExhausted:
            self.met["never fits"] += 1
            return
        self._expect(attempt)
        self._offer(sequence)
        self.met["offered"] += 1

    def _offer(self, sequence: Sequence) -> None:
        hashes = sequence.block_hashes(sequence.num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self.admission.offer(sequence.seq_id, hashes, sequence.num_tokens)

    def commit(self, rng: random.Random) -> None:
        """A granted shipment arrives whole; one whose first tokens end all choices is never committed."""
        attempt = self.attempts[rng.choice(sorted(self.granted))]
        sequence = attempt.sequence
        first = first_tokens(attempt.prompt, sequence)
        if sequence.beam is None:
            ended = {
                choice
                for choice, one in enumerate(first, sequence.choice)
                if sequence.sampling.finish_after(one.token_id, sequence.num_output_tokens + 1)
            }
            if len(ended) == len(first):
                self.cancel(sequence.seq_id)
                return
            attempt.open -= ended
            attempt.num_told.update({choice: 1 for choice in attempt.num_told})
        ship(self.core, sequence)
        self.granted.discard(sequence.seq_id)
        self.admission.commit(sequence.seq_id, first)
        self.met["committed"] += 1
        self._forget_if_over(sequence.seq_id)

    def withdraw(self, rng: random.Random) -> None:
        """A granted shipment breaks off after some blocks and is offered again."""
        sequence = self.attempts[rng.choice(sorted(self.granted))].sequence
        self.granted.discard(sequence.seq_id)
        ship(self.core, sequence)
        num_full = sequence.num_tokens // BLOCK_SIZE
        self.admission.withdraw(sequence.seq_id, rng.randint(0, num_full) * BLOCK_SIZE)
        self.every_block_is_accounted_for()
        self._offer(sequence)
        self.met["withdrawn"] += 1

    def cancel(self, seq_id: str) -> None:
        """Twice: the second one does nothing."""
        self.granted.discard(seq_id)
        self.met["cancelled while parked"] += self.attempts[seq_id].sequence.hold.is_parked
        del self.attempts[seq_id]
        for _ in range(2):
            self.admission.unregister(seq_id)
        self.met["cancelled"] += 1

    def stop_choice(self, rng: random.Random) -> None:
        """The caller has enough of one choice; with the last one goes the attempt."""
        seq_id = rng.choice(sorted(self.attempts))
        attempt = self.attempts[seq_id]
        if attempt.sequence.beam is not None or attempt.sequence.hold_after_prefill or not attempt.open:
            return
        choice = rng.choice(sorted(attempt.open))
        self.met["stopped before the fork" if attempt.sequence.num_choices > 1 else "stopped after the fork"] += 1
        attempt.open.discard(choice)
        self.admission.stop_choice(seq_id, choice)
        if not attempt.open:
            self.cancel(seq_id)

    # -- shipping out ---------------------------------------------------------------------------------------------

    def secure(self, rng: random.Random) -> None:
        """The grant for a prompt comes, computed or not; or it had come, and the shipment is over."""
        started = [
            one for one in self.attempts.values() if one.sequence.hold_after_prefill and one.sequence.was_started
        ]
        if started:
            self._ship_out(rng.choice(started))

    def _ship_out(self, attempt: Attempt) -> None:
        sequence = attempt.sequence
        if not sequence.hold.secure():
            self.met["recalled"] += sequence.status is SequenceStatus.PARKED
            self.core.recall(sequence)
        elif attempt.secured_blocks is None:
            self.met["secured"] += 1
            self._note_secured(attempt)
        else:
            self._check_contents(sequence)
            self.cancel(sequence.seq_id)
            self.met["shipped out"] += 1

    def _note_secured(self, attempt: Attempt) -> None:
        if attempt.sequence.status is SequenceStatus.HELD:
            attempt.secured_blocks = list(attempt.sequence.block_table)

    def _check_contents(self, sequence: Sequence) -> None:
        """What a shipment reads."""
        size, contents = self.core.layout.block_bytes, slots_of(sequence.token_ids)
        for index in range(self.core.layout.num_blocks_for(sequence.num_tokens)):
            expected = contents[index * size : (index + 1) * size]
            assert bytes(self.core.runner.block_view(sequence.block_table[index]))[: len(expected)] == expected

    # -- memory ---------------------------------------------------------------------------------------------------

    def flush(self, rng: random.Random) -> None:
        self.core.pool.flush(rng.choice([None, *TENANTS]))
        self.met["flushed"] += 1

    def pin(self, rng: random.Random) -> None:
        attempt = self.attempts[rng.choice(sorted(self.attempts))]
        sequence = attempt.sequence
        salt = "club" if attempt.is_shared else ""
        prefix = CachedPrefix(tuple(sequence.token_ids), tenant=sequence.tenant, shared_salt=salt)
        try:
            self.met["pinned"] += pin_prefix(self.core, f"pin{rng.randrange(3)}", prefix) > 0
        except ResourceExhausted:
            self.met["pin refused"] += 1

    def unpin(self, rng: random.Random) -> None:
        self.met["unpinned"] += self.core.pool.unpin(f"pin{rng.randrange(3)}", tenant=rng.choice(TENANTS)) > 0

    # -- stepping -------------------------------------------------------------------------------------------------

    def run_once(self) -> None:
        poison_free_blocks(self.core)
        for output in [*self.admission.poll(), *self.core.step()]:
            self._take(output)

    def _take(self, output: Output) -> None:
        match output:
            case GrantMade():
                self.granted.add(output.seq_id)
            case TokenSampled():
                self._take_token(output)
            case BeamsFinished():
                attempt = self.attempts[output.seq_id]
                assert output.beams == attempt.beams
                attempt.open.clear()
                self.met["beams finished"] += 1
                self._forget_if_over(output.seq_id)
            case CandidatesFound():
                attempt = self.attempts[output.seq_id]
                assert [one.token_id for one in output.candidates] == [
                    one.token_id for one in first_tokens(attempt.prompt, attempt.sequence)
                ]
                assert attempt.open, "candidates were told twice"
                attempt.open.clear()
            case SequencePreempted():
                self.met["preempted by swap" if output.is_swapped else "preempted by recompute"] += 1
                assert output.seq_id in self.attempts
            case SequenceRestored():
                self.met["restored"] += 1
                self._note_secured(self.attempts[output.seq_id])
            case SequenceFailed():
                raise AssertionError(output)

    def _take_token(self, output: TokenSampled) -> None:
        attempt, choice = self.attempts[output.seq_id], output.choice
        assert choice in attempt.open, "a token of a choice that has ended"
        assert output.token_index == attempt.num_told[choice], "a token was lost or doubled"
        assert output.token_id == attempt.tokens[choice][output.token_index]
        attempt.num_told[choice] += 1
        is_held = attempt.sequence.hold_after_prefill
        is_last = attempt.num_told[choice] == len(attempt.tokens[choice])
        assert (output.finish is not None) == is_last
        if is_last or is_held:
            attempt.open.discard(choice)
            self.met["choices finished"] += 1
            self._forget_if_over(output.seq_id)

    def _forget_if_over(self, seq_id: str) -> None:
        attempt = self.attempts[seq_id]
        if not attempt.open and not attempt.sequence.hold_after_prefill:
            del self.attempts[seq_id]

    # -- what always holds ------------------------------------------------------------------------------------------

    def every_block_is_accounted_for(self) -> None:
        self.core.check_integrity()

    def every_sequence_is_where_it_says(self) -> None:
        scheduler, sequences = self.core.scheduler, self.core.sequences
        running = set(map(id, scheduler.running))
        assert len(running) <= scheduler.max_running
        assert len(running) == len(scheduler.running)
        for sequence in sequences.values():
            assert (sequence.status is SequenceStatus.RUNNING) == (id(sequence) in running), sequence.seq_id
            assert len({member.status for member in sequence.unit}) == 1
            assert sequence.owner_id in self.attempts, "a sequence outlives its attempt"
            assert sequence.status is not SequenceStatus.PARKED or not sequence.block_table, sequence.seq_id
        held = [sequence for sequence in sequences.values() if sequence.status is SequenceStatus.HELD]
        assert sorted(map(id, held)) == sorted(map(id, scheduler.held))
        for attempt in self.attempts.values():
            assert attempt.secured_blocks in (None, attempt.sequence.block_table), "secured blocks were taken"

    def no_tenant_reads_anothers_blocks(self) -> None:
        for sequence in self.core.sequences.values():
            attempt = self.attempts[sequence.owner_id]
            if not attempt.is_shared:
                assert {self.core.pool.tenant(block_id) for block_id in sequence.held_blocks} <= {sequence.tenant}
        if "metered" not in self._sharers:
            metered = self.core.pool.census().tenants.get("metered", TenantBlocks())
            assert metered.num_used <= (QUOTA.max_used_blocks or 0)

    def published_blocks_hold_what_their_hash_names(self) -> None:
        size = self.core.layout.block_bytes
        for sequence in self.core.sequences.values():
            if sequence.block_table and sequence.prefix_leader is None:
                contents = slots_of(sequence.token_ids)
                for index in range(sequence.num_computed_tokens // BLOCK_SIZE):
                    view = self.core.runner.block_view(sequence.block_table[index])
                    assert bytes(view) == contents[index * size : (index + 1) * size]

    # -- the end ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Whatever is left runs to its end: nothing waits for ever, nothing is lost, nothing is left behind."""
        self.pressure = 0.0
        rng = random.Random(1)
        for _ in range(MAX_STEPS_TO_DRAIN):
            for attempt in [one for one in self.attempts.values() if one.sequence.hold_after_prefill]:
                if attempt.sequence.was_started:
                    self._ship_out(attempt)
            while self.granted:
                self.commit(rng)
            if not self.attempts:
                break
            self.run_once()
            self.every_block_is_accounted_for()
        waiting = {name: one.sequence.status.value for name, one in self.attempts.items()}
        assert not self.attempts, f"attempts that never ended: {waiting}"
        assert not self.core.has_work and not self.core.sequences and self.admission.num_waiting == 0
        self.core.pool.unpin_all()
        self.core.check_integrity()
        assert self.core.pool.counts.used == 0
        assert self.core.swap_space.num_used == 0


def run_operations(trial: EngineTrial, seed: int, num_operations: int) -> None:
    """Random operations, half of them steps; the books are checked after each."""
    rng = random.Random(seed)
    for number in range(num_operations):
        operation(trial, rng)
        trial.every_block_is_accounted_for()
        trial.every_sequence_is_where_it_says()
        if number % 16 == 0:
            trial.no_tenant_reads_anothers_blocks()
            trial.published_blocks_hold_what_their_hash_names()
        if number % 500 == 0:
            trial.pressure = rng.choice([0.0, 0.0, 0.05, 0.2])
    trial.drain()


def operation(trial: EngineTrial, rng: random.Random) -> None:
    which = rng.random()
    if which < 0.3:
        if len(trial.attempts) < MAX_LIVE_ATTEMPTS:
            kind = rng.randrange(4)
            if kind < 2:
                trial.offer(rng)
            else:
                trial.add(rng, is_held=kind == 3)
        else:
            trial.secure(rng)
    elif which < 0.36 and trial.granted:
        (trial.commit if rng.random() < 0.8 else trial.withdraw)(rng)
    elif which < 0.37 and trial.attempts:
        trial.cancel(rng.choice(sorted(trial.attempts)))
    elif which < 0.39 and trial.attempts:
        trial.stop_choice(rng)
    elif which < 0.41 and trial.attempts:
        (trial.pin if rng.random() < 0.4 else trial.unpin)(rng)
    elif which < 0.411:
        trial.flush(rng)
    elif which < 0.43:
        trial.secure(rng)
    else:
        trial.run_once()


def assert_everything_was_met(trial: EngineTrial, part: float = 1.0) -> None:
    """`part`: of the operations of a long run."""
    assert not [name for name in EVERYTHING if trial.met[name] == 0], trial.met
    memory, many = trial.core.memory, 100 * part
    assert memory.num_blocks_copied > many
    assert memory.num_blocks_swapped_out > many and memory.num_blocks_swapped_in > many
    assert memory.num_recompute_preemptions > many and memory.num_swap_preemptions > many
    assert memory.num_prefix_waits > many / 10
    assert trial.core.pool.num_evictions > many
    assert trial.core.stats().num_cached_tokens > 10 * many


@pytest.mark.parametrize("num_operations", [8_000, pytest.param(100_000, marks=pytest.mark.sweep)])
def test_thousands_of_random_operations_keep_the_books(num_operations: int) -> None:
    """The same operations in one long run, so that all of them meet each other often."""
    trial = EngineTrial(seed=1)
    run_operations(trial, 21, num_operations)
    assert_everything_was_met(trial)


def test_drafts_right_and_wrong_keep_the_books() -> None:
    """Every token as without, no block published that holds what was only drafted, quotas kept."""
    trial = EngineTrial(seed=3, speculates=True)
    run_operations(trial, 22, 5_000)
    assert_everything_was_met(trial, part=0.2)
    num_lengths = LONGEST_DRAFT + 1
    wanted = {(length, right) for length in range(1, num_lengths) for right in range(length + 1)}
    assert wanted <= trial.drafts.met.keys()
    stats = trial.core.stats()
    assert stats.num_drafts == sum(trial.drafts.met.values())
    assert stats.num_draft_tokens == sum(length * number for (length, _), number in trial.drafts.met.items())
    assert stats.num_accepted_tokens == sum(right * number for (_, right), number in trial.drafts.met.items())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_either_kind_of_preemption_alone_keeps_the_books(mode: PreemptionMode) -> None:
    trial = EngineTrial(mode, seed=2)
    run_operations(trial, 21, 2_000)
    assert trial.met["preempted by swap" if mode == "swap" else "preempted by recompute"] > 20
    assert mode == "swap" or trial.met["preempted by swap"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["auto", "recompute", "swap"])
@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_thousand_random_operations_keep_the_books(mode: PreemptionMode, seed: int) -> None:
    trial = EngineTrial(mode, seed=seed)
    run_operations(trial, 1_000 + seed, 100_000)
    if mode == "auto":
        assert_everything_was_met(trial)


class EngineMachine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which makes a failing run short."""

    def __init__(self) -> None:
        super().__init__()
        self.trial = EngineTrial(speculates=True)

    @rule(seed=integers(0, 1 << 30))
    def add(self, seed: int) -> None:
        self.trial.add(random.Random(seed))

    @rule(seed=integers(0, 1 << 30))
    def hold(self, seed: int) -> None:
        self.trial.add(random.Random(seed), is_held=True)

    @rule(seed=integers(0, 1 << 30))
    def offer(self, seed: int) -> None:
        self.trial.offer(random.Random(seed))

    @precondition(lambda self: self.trial.attempts)
    @rule(seed=integers(0, 100))
    def secure(self, seed: int) -> None:
        self.trial.secure(random.Random(seed))

    @rule(number=integers(1, 5), pressure=sampled_from([0.0, 0.0, 0.2]))
    def step(self, number: int, pressure: float) -> None:
        self.trial.pressure = pressure
        for _ in range(number):
            self.trial.run_once()
            self.trial.every_block_is_accounted_for()

    @precondition(lambda self: self.trial.granted)
    @rule(seed=integers(0, 100), is_whole=sampled_from([True, True, False]))
    def ship(self, seed: int, is_whole: bool) -> None:
        (self.trial.commit if is_whole else self.trial.withdraw)(random.Random(seed))

    @precondition(lambda self: self.trial.attempts)
    @rule(choice=integers(0, 100))
    def cancel(self, choice: int) -> None:
        names = sorted(self.trial.attempts)
        self.trial.cancel(names[choice % len(names)])

    @precondition(lambda self: self.trial.attempts)
    @rule(seed=integers(0, 100))
    def stop_choice(self, seed: int) -> None:
        self.trial.stop_choice(random.Random(seed))

    @precondition(lambda self: self.trial.attempts)
    @rule(seed=integers(0, 100))
    def pin(self, seed: int) -> None:
        self.trial.pin(random.Random(seed))

    @rule(seed=integers(0, 100))
    def unpin(self, seed: int) -> None:
        self.trial.unpin(random.Random(seed))

    @rule(seed=integers(0, 100))
    def flush(self, seed: int) -> None:
        self.trial.flush(random.Random(seed))

    @invariant()
    def everything_holds(self) -> None:
        self.trial.every_block_is_accounted_for()
        self.trial.every_sequence_is_where_it_says()
        self.trial.no_tenant_reads_anothers_blocks()
        self.trial.published_blocks_hold_what_their_hash_names()

    def teardown(self) -> None:
        self.trial.drain()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.sweep
def test_hypothesis_finds_no_operations_that_break_the_books() -> None:
    """New ones every time; the suite's are always the same."""
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=3_000, stateful_step_count=60, deadline=None)
    )
