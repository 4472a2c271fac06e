"""The scheduler in virtual time: no sequence waits for ever, and how long is said by a bound.

A step takes `STEP_S` and `TOKEN_S` for each of its tokens. The bound: the running unit of the highest priority, call it
r, progresses in every step. It decodes a token or computes a whole chunk (the budget holds one beside all decodes), and
only lower ones are preempted for it. Output is never lost; computed KV of r is lost only when r is preempted. So a
request s ends after at most

    sum over q in Q(s) of steps(q) steps of at most MAX_STEP_S, where
    steps(q) = choices(q) x max_tokens(q) + (1 + preemptions(q)) x (prefill_steps(q) + 1)

and Q(s) are s itself, those in the system when s arrived, those of better priority that came later, and those that
overtook s, which are at most MAX_BYPASSES: r is always one of Q(s), because while s waits after a preemption nothing of
lower priority runs or is let in. Preemptions are bounded by the blocks that outputs take: each is made for a block that
a sequence of higher priority writes at once, and never writes again.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from decode_svc.admission import DecodeAdmission
from engine.block_pool import BlockQuota
from engine.core import EngineCore, EngineLimits
from engine.outputs import (
    BeamsFinished,
    GrantMade,
    Output,
    SequenceFailed,
    SequencePreempted,
    SequenceStarted,
    TokenSampled,
)
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.sequence import Sequence
from kvferry.errors import ResourceExhausted
from kvferry.sampling import BeamParams
from tests.support.engines import (
    BLOCK_SIZE,
    WatchedRunner,
    first_tokens,
    make_core,
    make_sequence,
    run_to_end,
    ship,
)

STEP_S = 0.010
TOKEN_S = 0.001
NUM_BLOCKS = 24
MAX_RUNNING = 8
CHUNK = 16
MAX_BYPASSES = 16
MAX_STEP_S = STEP_S + (MAX_RUNNING + CHUNK) * TOKEN_S


def small_engine(
    mode: PreemptionMode = "recompute",
    *,
    num_blocks: int = NUM_BLOCKS,
    max_running: int = MAX_RUNNING,
    quotas: dict[str, BlockQuota] | None = None,
) -> EngineCore:
    limits = EngineLimits(
        max_batched_tokens=max_running + CHUNK,
        max_running=max_running,
        max_chunk_tokens=CHUNK,
        num_swap_blocks=NUM_BLOCKS,
        preemption=PreemptionPolicy(mode, recompute_s_per_token=1.0, swap_s_per_block=1.8),
        quotas=quotas or {},
    )
    return make_core(num_blocks, limits)


@dataclass(slots=True)
class Request:
    """One request's way through the simulation; times in virtual seconds."""

    sequence: Sequence
    at_s: float
    num_choices: int
    num_open: int  # choices, or the one beam search, that must still end
    started_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0  # of its choices, or of its gang
    num_overtakers: int = 0
    rivals: set[str] = field(default_factory=set)  # Q(s) without s

    @property
    def num_lanes(self) -> int:
        """Sequences it becomes."""
        return self.sequence.beam.width if self.sequence.beam is not None else self.num_choices

    @property
    def prefill_steps(self) -> int:
        """Steps to compute all its KV anew, the last token's of its choices included."""
        return self.num_lanes * (-(-(self.sequence.max_kv_tokens + 1) // CHUNK) + 1)

    @property
    def bound_steps(self) -> int:
        num_outputs = self.num_lanes * self.sequence.sampling.max_tokens
        return num_outputs + (1 + self.num_preemptions) * (self.prefill_steps + 1)


class Simulation:
    """One engine and requests that come to it at given times."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}  # those that arrived
        self.live: set[str] = set()
        self._to_come: deque[Request] = deque()

    def at(self, at_s: float, sequence: Sequence) -> None:
        """Lets `sequence` arrive; calls come in order of time."""
        num_choices = sequence.num_choices
        self._to_come.append(Request(sequence, at_s, num_choices, num_open=num_choices))

    def run(self) -> None:
        """Until everything has ended; books and order are checked after each step."""
        while self._to_come or self.live:
            if not self.live:
                self.now_s = max(self.now_s, self._to_come[0].at_s)
            while self._to_come and self._to_come[0].at_s <= self.now_s:
                self._arrive(self._to_come.popleft())
            assert self.core.has_work, f"ended without a word: {sorted(self.live)}"
            self._step()

    def _arrive(self, request: Request) -> None:
        name, key = request.sequence.seq_id, request.sequence.priority.key
        request.rivals = set(self.live)
        for other in self.live:
            if key < self.requests[other].sequence.priority.key:
                self.requests[other].rivals.add(name)
        self.core.add(request.sequence)
        self.requests[name] = request
        self.live.add(name)

    def _step(self) -> None:
        runner = self.core.runner
        assert isinstance(runner, WatchedRunner)
        before = runner.num_tokens_run
        outputs = self.core.step()
        assert outputs or not self.core.is_blocked, "sequences wait and nothing runs"
        self.now_s += STEP_S + TOKEN_S * (runner.num_tokens_run - before)
        self.core.check_integrity()
        gangs = set[str]()
        for output in outputs:
            self._take(output, gangs)

    def _take(self, output: Output, gangs: set[str]) -> None:
        request = self.requests[output.seq_id]
        match output:
            case SequenceFailed():
                raise AssertionError(output)
            case SequenceStarted():
                self._start(request)
            case SequencePreempted():
                if request.sequence.beam is None or output.seq_id not in gangs:
                    request.num_preemptions += 1
                gangs.add(output.seq_id)
            case BeamsFinished():
                self._finish(request)
            case TokenSampled() if output.finish is not None:
                request.num_open -= 1
                if request.num_open == 0:
                    self._finish(request)

    def _start(self, request: Request) -> None:
        request.started_s = self.now_s
        key = request.sequence.priority.key
        for waiting in self.core.scheduler.waiting:
            assert waiting.num_preemptions == 0 or waiting.priority.key > key, "let in before a preempted one"
        for name in self.live:
            other = self.requests[name]
            if other.started_s is None and other.sequence.priority.key < key:
                other.num_overtakers += 1
                other.rivals.add(request.sequence.seq_id)

    def _finish(self, request: Request) -> None:
        request.finished_s = self.now_s
        self.live.discard(request.sequence.seq_id)

    def bound_s(self, request: Request) -> float:
        """See the module docstring."""
        rivals = [self.requests[name] for name in request.rivals]
        return MAX_STEP_S * sum(one.bound_steps for one in [request, *rivals])

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())


def mixed_load(core: EngineCore, seed: int, num_requests: int = 60) -> list[tuple[float, Sequence]]:
    """Poisson arrivals of short and long prompts in three tiers, some of several choices, some beam searches, and two
    that fill the pool exactly; no two share a prefix."""
    rng = random.Random(seed)
    at_s, load = 0.0, []
    for number in range(num_requests):
        at_s += rng.expovariate(1 / 0.10)
        kind = rng.random()
        num_prompt_tokens = rng.randint(30, 60) if rng.random() < 0.25 else rng.randint(1, 12)
        max_tokens, num_choices, beam = rng.randint(2, 30), 1, None
        if number in (num_requests // 3, num_requests // 3 + 1):
            num_prompt_tokens, max_tokens = 60, NUM_BLOCKS * BLOCK_SIZE - 60 + 1
        elif kind < 0.2:
            num_choices = rng.randint(2, 4)
        elif kind < 0.35:
            num_prompt_tokens, max_tokens, beam = min(num_prompt_tokens, 30), rng.randint(2, 10), BeamParams(3)
        sequence = make_sequence(
            core,
            f"s{number}",
            [number, *(rng.randrange(1024) for _ in range(num_prompt_tokens - 1))],
            max_tokens,
            arrival=number,
            tier_rank=rng.choice([0, 1, 1, 2]),
            temperature=1.0,
            seed=number,
            num_choices=num_choices,
            beam=beam,
        )
        load.append((at_s, sequence))
    return load


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("seed", range(6))
def test_no_sequence_waits_for_ever(seed: int, mode: PreemptionMode) -> None:
    """Every one ends within its bound, is overtaken a bounded number of times, and preemption stays bounded."""
    simulation = Simulation(small_engine(mode))
    for at_s, sequence in mixed_load(simulation.core, seed):
        simulation.at(at_s, sequence)
    simulation.run()
    assert simulation.num_preemptions > 5, "the load is too light to show anything"
    most = 0
    for request in simulation.requests.values():
        assert request.started_s is not None and request.finished_s is not None
        assert request.finished_s - request.at_s <= simulation.bound_s(request), request
        assert request.num_overtakers <= MAX_BYPASSES
        most = max(most, request.num_overtakers)
    assert most > 0, "nobody was ever overtaken"
    num_output_blocks = sum(
        request.num_lanes * (-(-request.sequence.sampling.max_tokens // BLOCK_SIZE) + 2)
        for request in simulation.requests.values()
    )
    assert simulation.num_preemptions <= num_output_blocks
    assert simulation.core.pool.counts.used == 0 and simulation.core.swap_space.num_used == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 40, 77])
def test_two_that_fill_the_pool_exactly_both_finish(mode: PreemptionMode, num_prompt_tokens: int) -> None:
    simulation = Simulation(small_engine(mode, num_blocks=20))
    for number in range(2):
        prompt = [number] * num_prompt_tokens
        simulation.at(0.0, make_sequence(simulation.core, str(number), prompt, 81 - num_prompt_tokens, arrival=number))
    simulation.run()
    assert all(request.finished_s is not None for request in simulation.requests.values())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_of_three_fifths_of_the_pool_do_not_throw_each_other_out_for_ever(mode: PreemptionMode) -> None:
    """R060: preemptions are few, and together they take less than 2.5 times as long as one after the other."""

    def both(second_at_s: float) -> Simulation:
        simulation = Simulation(small_engine(mode, num_blocks=20))
        for number, at_s in enumerate((0.0, second_at_s)):
            simulation.at(at_s, make_sequence(simulation.core, str(number), [number] * 8, 41, arrival=number))
        simulation.run()
        return simulation

    serial, together = both(1000.0), both(0.0)
    assert serial.num_preemptions == 0
    assert 1 <= together.num_preemptions <= 2
    assert together.now_s < 2.5 * (serial.now_s - 1000.0) * 2


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_one_comes_back_before_later_arrivals(mode: PreemptionMode) -> None:
    """R061: small requests of its tier keep coming; the one that was thrown out still goes first."""
    simulation = Simulation(small_engine(mode, num_blocks=20))
    core = simulation.core
    simulation.at(0.0, make_sequence(core, "first", [1] * 8, 60, arrival=0))
    simulation.at(0.0, make_sequence(core, "victim", [2] * 8, 60, arrival=1))
    for number in range(2, 150):
        simulation.at(0.02 * number, make_sequence(core, f"s{number}", [3, number], 6, arrival=number))
    simulation.run()  # which checks the order
    victim = simulation.requests["victim"]
    assert victim.num_preemptions >= 1
    assert victim.finished_s is not None and victim.finished_s <= simulation.bound_s(victim)
    assert victim.rivals <= {"first"}, "nobody came between"


def test_what_can_never_fit_is_refused_at_once_and_stops_nobody() -> None:
    """R063: within the context, beyond the pool."""
    simulation = Simulation(small_engine())
    core = simulation.core
    with pytest.raises(ResourceExhausted, match=r"up to 25 blocks .* pool has 24"):
        core.add(make_sequence(core, "big", [1] * 96, 2))
    for number in range(10):
        simulation.at(0.0, make_sequence(core, str(number), [2, number], 5, arrival=number))
    simulation.run()
    assert not core.sequences


def test_a_big_head_of_the_queue_neither_stops_small_ones_nor_waits_for_ever() -> None:
    """R066: small ones keep coming for good; a bounded number of them passes it."""
    simulation = Simulation(small_engine())
    core = simulation.core
    simulation.at(0.0, make_sequence(core, "holder", [1] * 40, 30, arrival=0))
    simulation.at(0.02, make_sequence(core, "big", [2] * 80, 10, arrival=1))
    for number in range(2, 300):
        simulation.at(0.02 * number, make_sequence(core, f"s{number}", [3, number], 6, arrival=number))
    simulation.run()
    big, small = simulation.requests["big"], simulation.requests["s2"]
    assert big.started_s is not None and small.started_s is not None and small.started_s < big.started_s
    assert 10 <= big.num_overtakers <= MAX_BYPASSES
    assert big.finished_s is not None and big.finished_s <= simulation.bound_s(big)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_more_clients_than_seats_in_a_closed_loop(mode: PreemptionMode) -> None:
    """R068: one client more than seats, ten minutes, a tenth of the requests cancelled: queues, never hangs."""
    core = small_engine(mode, max_running=4)
    rng, now_s, number = random.Random(7), 0.0, 0
    since: dict[str, float] = {}  # when each client's request began
    waits: list[float] = []
    counts: Counter[str] = Counter()
    while now_s < 600.0:
        while len(since) < 5:
            number += 1
            name = f"s{number}"
            prompt = [number % 1024, *(rng.randrange(1024) for _ in range(rng.randrange(24)))]
            core.add(make_sequence(core, name, prompt, rng.randint(2, 24), arrival=number))
            since[name] = now_s
        assert len(core.scheduler.running) <= 4
        for output in core.step():
            if isinstance(output, TokenSampled) and output.finish:
                waits.append(now_s - since.pop(output.seq_id))
                counts["finished"] += 1
        now_s += 0.05
        if rng.random() < 0.012:
            name = rng.choice(sorted(since))
            core.remove(name)
            del since[name]
            counts["cancelled"] += 1
    run_to_end(core)
    assert core.pool.counts.used == 0 and not core.sequences
    assert counts["finished"] > 1_000 and counts["cancelled"] > 50
    assert max(waits) < 0.05 * 5 * (24 + 2 + 3 * 3), "the serial bound of five requests"


# -- followers of a prefix under way -----------------------------------------------------------------------------------


def test_those_that_wait_for_a_prefix_are_not_overtaken_by_it_for_ever() -> None:
    """A follower whose leader is cancelled, again and again, still gets there: it becomes the leader."""
    core = small_engine(num_blocks=64)
    prompt = list(range(60))
    for number in range(6):
        core.add(make_sequence(core, str(number), prompt, 5, arrival=number))
    for number in range(3):  # the prompt takes four chunks
        core.step()
        assert [one.seq_id for one in core.scheduler.running] == [str(number)]
        core.remove(str(number))
        core.check_integrity()
    outputs = run_to_end(core)
    assert sum(isinstance(one, TokenSampled) and one.finish is not None for one in outputs) == 3
    assert core.stats().num_prefill_tokens <= 60 + 2 * BLOCK_SIZE + 3 * 4, "each went on where the last one stopped"


def test_a_higher_tier_does_not_wait_for_a_lower_ones_prefix() -> None:
    core = small_engine(num_blocks=64)
    prompt = list(range(60))
    core.add(make_sequence(core, "low", prompt, 5, arrival=0, tier_rank=2))
    core.step()
    core.add(make_sequence(core, "high", prompt, 5, arrival=1, tier_rank=0))
    core.add(make_sequence(core, "lowest", prompt, 5, arrival=2, tier_rank=2))
    core.step()
    assert [one.seq_id for one in core.scheduler.running] == ["high", "low"]
    run_to_end(core)


# -- a decode worker: grants, reservations, local work -----------------------------------------------------------------


class DecodeTrial:
    """A decode worker's engine; requests are shipped to it within the step after their grant."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.admission = DecodeAdmission(core)
        self.num_made = 0
        self.finished: dict[tuple[str, int], int] = {}  # (attempt, choice) -> step
        self.granted: dict[str, int] = {}  # attempt -> step
        self.num_tokens: Counter[str] = Counter()
        self.num_steps = 0
        self._prompts: dict[str, tuple[Sequence, list[int]]] = {}

    def offer(self, name: str, prompt: list[int], max_tokens: int, **kwargs: object) -> Sequence:
        self.num_made += 1
        arguments = {"arrival": self.num_made, **kwargs}
        sequence = make_sequence(self.core, name, prompt, max_tokens, **arguments)  # type: ignore[arg-type]
        self.admission.register(sequence)
        self.admission.offer(name, sequence.block_hashes(len(prompt) // BLOCK_SIZE, BLOCK_SIZE), len(prompt))
        self._prompts[name] = sequence, prompt
        return sequence

    def commit(self, name: str) -> None:
        sequence, prompt = self._prompts[name]
        ship(self.core, sequence)
        self.admission.commit(name, first_tokens(prompt, sequence))

    def step(self, *, commits: bool = True) -> None:
        self.num_steps += 1
        for output in self.admission.poll():
            if isinstance(output, GrantMade):
                self.granted[output.seq_id] = self.num_steps
                if commits:
                    self.commit(output.seq_id)
        for output in self.core.step():
            if isinstance(output, TokenSampled):
                self.num_tokens[output.seq_id] += 1
                if output.finish is not None:
                    self.finished[output.seq_id, output.choice] = self.num_steps
        self.core.check_integrity()

    def flood(self, num_steps: int, *, tier_rank: int = 0, is_over: Callable[[], bool] = lambda: False) -> None:
        """Offers that never end: two small ones always wait."""
        for _ in range(num_steps):
            if is_over():
                return
            while self.admission.num_waiting < 2:
                self.offer(f"flood{self.num_made}", [self.num_made % 1024, 7], 8, tier_rank=tier_rank)
            self.step()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_shipped_in_requests_that_all_grow_are_slow_but_never_frozen(mode: PreemptionMode) -> None:
    """R062: as many as are granted, all with long outputs: each step makes a token, all of them end."""
    trial = DecodeTrial(small_engine(mode))
    for number in range(12):
        trial.offer(str(number), [number] * 10, 60)
    for _ in range(600):
        if len(trial.finished) == 12:
            break
        before = trial.num_tokens.total()
        for _ in range(6):  # a recompute takes up to five chunks
            trial.step()
        assert trial.num_tokens.total() > before, "frozen"
    assert len(trial.finished) == 12
    assert trial.core.stats().num_preemptions > 3
    assert trial.core.pool.counts.used == 0


def test_long_outputs_through_a_tiny_decode_pool() -> None:
    """R058: whoever is preempted on decode is computed again there; nothing is lost on the way to and fro."""
    trial = DecodeTrial(small_engine(num_blocks=14))
    for number in range(6):
        trial.offer(str(number), [number] * 16, 38)
    for _ in range(600):
        trial.step()
    assert {name: trial.num_tokens[name] for name, _ in trial.finished} == {str(number): 37 for number in range(6)}
    assert trial.core.stats().num_preemptions >= 3


def test_finished_transfers_behind_a_head_that_cannot_be_placed_join_the_batch() -> None:
    """R064: a big offer waits at the head; what is granted already is collected, and passes it."""
    trial = DecodeTrial(small_engine())
    for number in range(3):
        trial.offer(f"granted{number}", [number] * 16, 8)
    trial.step(commits=False)
    trial.offer("big", [9] * 88, 4)
    trial.step(commits=False)
    assert trial.granted.keys() == {f"granted{number}" for number in range(3)}
    for number in range(3):
        trial.commit(f"granted{number}")
    trial.offer("small", [8], 4)
    for _ in range(30):
        trial.step()
    assert {name for name, _ in trial.finished} == {"granted0", "granted1", "granted2", "small", "big"}
    assert trial.granted["small"] < trial.granted["big"]


def test_choices_that_found_no_seat_are_not_overtaken_for_ever() -> None:
    """More choices than seats: those in the queue have started, and go before offers that come later."""
    trial = DecodeTrial(small_engine(max_running=2))
    trial.offer("family", [1] * 4, 10, num_choices=4)
    trial.flood(120, is_over=lambda: sum(name == "family" for name, _ in trial.finished) == 4)
    assert sorted(choice for name, choice in trial.finished if name == "family") == [0, 1, 2, 3]


def test_a_prompt_computed_on_decode_is_not_overtaken_for_ever() -> None:
    """Local prefill shares seats and blocks with shipments; later offers pass it a bounded number of times."""
    trial = DecodeTrial(small_engine(max_running=2))
    for number in range(2):
        trial.offer(f"first{number}", [number] * 4, 10)
    trial.step()
    local = make_sequence(trial.core, "local", [5] * 8, 4, arrival=trial.num_made + 1)
    trial.num_made += 1
    trial.core.add(local)
    trial.flood(200, is_over=lambda: ("local", 0) in trial.finished)
    assert ("local", 0) in trial.finished
    num_before = sum(step < trial.finished["local", 0] for step in trial.granted.values())
    assert num_before <= 2 + MAX_BYPASSES + 2


def test_a_batch_never_grows_past_its_seats() -> None:
    """Seats of reservations are taken: a prompt computed here beside them must not push the batch beyond its bound."""
    trial = DecodeTrial(small_engine(max_running=2))
    for number in range(2):
        trial.offer(f"reserved{number}", [number] * 4, 10)
    trial.step(commits=False)
    assert len(trial.granted) == 2
    for number in range(2):
        trial.core.add(make_sequence(trial.core, f"local{number}", [5 + number] * 4, 10, arrival=10 + number))
    trial.step()
    for number in range(2):
        trial.commit(f"reserved{number}")
        assert len(trial.core.scheduler.running) <= 2


def test_a_choice_stopped_while_it_waits_for_a_grant_holds_nothing_afterwards() -> None:
    trial = DecodeTrial(small_engine(num_blocks=8))
    trial.core.add(make_sequence(trial.core, "holder", [9] * 20, 8))
    trial.core.step()
    trial.offer("stopped", [2] * 20, 4)
    trial.step()
    trial.admission.stop_choice("stopped", 0)
    trial.admission.unregister("stopped")
    for _ in range(10):
        trial.step(commits=False)
    assert "stopped" not in trial.granted and trial.admission.num_waiting == 0
    assert trial.core.pool.counts.used == 0


def test_pins_do_not_stop_a_shipment_for_ever() -> None:
    """What is granted to shipments counts like what is computed here: pins are given up when nothing else helps."""
    trial = DecodeTrial(small_engine())
    core = trial.core
    core.add(make_sequence(core, "warm", list(range(49)), 1))
    run_to_end(core)
    core.pool.pin("pin", core.pool.published_blocks()[:12])
    trial.offer("big", [2] * 60, 4)
    for _ in range(30):
        trial.step()
    assert ("big", 0) in trial.finished


# -- tenants ---------------------------------------------------------------------------------------------------------


def started(outputs: Iterable[Output]) -> list[str]:
    return [output.seq_id for output in outputs if isinstance(output, SequenceStarted)]


def test_a_tenant_over_its_quota_does_not_hold_up_the_others() -> None:
    """It is its own doing: with room in the pool, others are let in as they come, however many."""
    core = make_core(60, EngineLimits(max_batched_tokens=64, max_running=64, quotas={"metered": BlockQuota(6)}))
    core.add(make_sequence(core, "one", [1] * 12, 10, arrival=1, tenant="metered"))
    core.step()
    core.add(make_sequence(core, "two", [1] * 2 + [2] * 14, 2, arrival=2, tenant="metered"))
    for number in range(7):
        names = [f"{number}.{index}" for index in range(4)]
        for index, name in enumerate(names):
            core.add(make_sequence(core, name, [3, number, index], 2, arrival=3 + 4 * number + index))
        assert started(core.step()) == names


def test_a_tenant_preempted_by_its_quota_does_not_stop_the_grants_of_others() -> None:
    trial = DecodeTrial(small_engine(num_blocks=40, quotas={"metered": BlockQuota(8)}))
    for number in range(2):
        sequence = make_sequence(
            trial.core, f"metered{number}", [number] * 8, 25, arrival=number, tenant="metered", temperature=1.0
        )
        trial.core.add(sequence)
    while not trial.core.stats().num_preemptions:
        trial.step()
    trial.offer("other", [5, 5], 3)
    trial.step()
    trial.step()
    assert "other" in trial.granted


def test_a_tenant_whose_own_pins_fill_its_quota_is_served_all_the_same() -> None:
    """Its request fits its quota alone, so it was taken; others keep the worker busy for good."""
    core = make_core(40, EngineLimits(max_batched_tokens=64, max_running=8, quotas={"metered": BlockQuota(8)}))
    core.add(make_sequence(core, "warm", list(range(32)), 1, tenant="metered"))
    run_to_end(core)
    core.pool.pin("pin", core.pool.published_blocks(), tenant="metered")
    assert core.pool.num_pinned == 8
    core.add(make_sequence(core, "big", [2] * 28, 4, arrival=1, tenant="metered"))
    begun: set[str] = set()
    for number in range(300):
        if len(core.sequences) < 4:
            core.add(make_sequence(core, f"s{number}", [3, number], 8, arrival=2 + number))
        begun.update(started(core.step()))
        core.check_integrity()
    assert "big" in begun


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_sequence_at_its_tenants_quota_is_not_swapped_in_and_out_for_ever(mode: PreemptionMode) -> None:
    """A pin takes the last block of its quota: it comes back when its next token has room too, which ends the pin."""
    core = small_engine(mode, quotas={"metered": BlockQuota(6)})
    core.add(make_sequence(core, "warm", [1, 2, 3, 4], 1, tenant="metered"))
    run_to_end(core)
    core.pool.pin("pin", core.pool.published_blocks(), tenant="metered")
    core.add(make_sequence(core, "a", [5] * 8, 17, tenant="metered"))
    run_to_end(core, max_steps=60)
    assert core.stats().num_preemptions <= 3


def test_quotas_bound_what_a_tenant_holds_and_all_of_it_still_ends() -> None:
    core = small_engine(num_blocks=40, quotas={"metered": BlockQuota(10, 4)})
    rng = random.Random(3)
    most: dict[str, int] = defaultdict(int)
    for number in range(40):
        tenant = "metered" if number % 2 else "other"
        prompt = [rng.randrange(1024) for _ in range(rng.randint(1, 20))]
        core.add(make_sequence(core, str(number), prompt, rng.randint(2, 20), arrival=number, tenant=tenant))
    num_finished = 0
    while core.has_work:
        num_finished += sum(isinstance(one, TokenSampled) and one.finish is not None for one in core.step())
        for tenant, blocks in core.pool.census().tenants.items():
            most[tenant] = max(most[tenant], blocks.num_used)
        core.check_integrity()
    assert num_finished == 40
    assert most["metered"] == 10 and most["other"] > 10
