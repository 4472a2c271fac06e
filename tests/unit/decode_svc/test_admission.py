"""Decode admission: grants all or nothing, in order, freed once; commits idempotent."""

from __future__ import annotations

import pytest

from decode_svc.admission import DecodeAdmission, Reservation
from engine.core import EngineCore, EngineLimits
from engine.forward_batch import SampledToken
from engine.outputs import GrantMade, SequenceCommitted, TokenSampled
from engine.scheduler import Schedule
from engine.scripted import ScriptedRunner, reference_continuation, slots_of
from engine.sequence import Priority, Sequence
from kvferry.errors import FailedPrecondition, NotFound
from kvferry.sampling import BeamParams, SamplingParams
from kvtransfer.transport import CommitOutcome

BLOCK_SIZE = 4


def make(num_blocks: int = 16) -> DecodeAdmission:
    return DecodeAdmission(EngineCore(ScriptedRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE), EngineLimits()))


def core_of(admission: DecodeAdmission) -> EngineCore:
    return admission._core


def sequence(
    admission: DecodeAdmission, name: str, prompt: list[int], *, arrival: int = 0, rank: int = 0, max_tokens: int = 5
) -> Sequence:
    made = Sequence(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        priority=Priority(tier_rank=rank, arrival=arrival),
        hash_root=core_of(admission).hash_root(),
    )
    admission.register(made)
    return made


def offer(admission: DecodeAdmission, made: Sequence) -> bool:
    hashes = made.block_hashes(made.num_tokens // BLOCK_SIZE, BLOCK_SIZE)
    return admission.offer(made.seq_id, list(hashes), made.num_tokens)


def fill(admission: DecodeAdmission, made: Sequence, reservation: Reservation) -> None:
    """Writes what a shipment would bring."""
    runner = core_of(admission).runner
    contents = slots_of(made.token_ids).ljust(len(reservation.block_ids) * BLOCK_SIZE * 8, b"\0")
    for index in reservation.wanted:
        size = BLOCK_SIZE * 8
        runner.block_view(reservation.block_ids[index])[:] = contents[index * size : (index + 1) * size]


def tokens(token_ids: list[int]) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in token_ids]


def run(admission: DecodeAdmission) -> dict[str, list[int]]:
    """Steps until nothing is left to run; output tokens by sequence."""
    tokens: dict[str, list[int]] = {}
    core = core_of(admission)
    while core.has_work:
        for output in [*admission.poll(), *core.step()]:
            if isinstance(output, TokenSampled):
                tokens.setdefault(output.seq_id, []).append(output.token_id)
        core.check_integrity()
    return tokens


def ship(admission: DecodeAdmission, made: Sequence) -> list[int]:
    """A whole shipment; returns the first token."""
    assert offer(admission, made)
    assert [output.seq_id for output in admission.poll()] == [made.seq_id]
    fill(admission, made, admission.reservation(made.seq_id))
    first = reference_continuation(made.token_ids, 1)
    assert admission.commit(made.seq_id, tokens(first)) is CommitOutcome.COMMITTED
    return first


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_a_shipped_sequence_continues_as_if_it_had_been_computed_here(num_tokens: int) -> None:
    admission = make()
    prompt = list(range(num_tokens))
    first = ship(admission, sequence(admission, "a", prompt))
    assert isinstance(admission.poll()[0], SequenceCommitted)
    assert first + run(admission)["a"] == reference_continuation(prompt, 5)
    admission.unregister("a")
    assert core_of(admission).pool.counts.used == 0


def test_only_missing_blocks_are_wanted_the_second_time() -> None:
    admission = make()
    prompt = list(range(10))
    ship(admission, sequence(admission, "a", prompt))
    run(admission)
    again = sequence(admission, "b", prompt)
    offer(admission, again)
    assert admission.poll() == [GrantMade("b", (2,))]
    whole = sequence(admission, "c", prompt[:8])
    offer(admission, whole)
    assert admission.poll() == [GrantMade("c", ())]
    core_of(admission).check_integrity()


def test_a_grant_waits_holding_nothing_until_there_is_room() -> None:
    admission = make(num_blocks=6)
    first, second = sequence(admission, "a", [1] * 12, arrival=1), sequence(admission, "b", [2] * 12, arrival=2)
    offer(admission, first)
    offer(admission, second)
    assert [output.seq_id for output in admission.poll()] == ["a"]
    assert core_of(admission).pool.counts.used == 4
    assert admission.num_waiting == 1
    admission.withdraw("a", 0)
    assert {output.seq_id for output in admission.poll()} == {"b"}
    assert admission.num_waiting == 0


def test_grants_go_by_tier_then_arrival() -> None:
    admission = make(num_blocks=4)
    holder = sequence(admission, "holder", [9] * 12)
    offer(admission, holder)
    admission.poll()
    for name, rank, arrival in (("late", 1, 3), ("early", 1, 2), ("strict", 0, 4)):
        offer(admission, sequence(admission, name, [rank, arrival] * 6, rank=rank, arrival=arrival, max_tokens=1))
    order = []
    previous = "holder"
    for _ in range(3):
        admission.unregister(previous)
        (grant,) = admission.poll()
        order.append(grant.seq_id)
        previous = grant.seq_id
    assert order == ["strict", "early", "late"]


def test_verified_blocks_of_a_failed_shipment_are_not_shipped_again() -> None:
    admission = make()
    made = sequence(admission, "a/1", list(range(12)))
    offer(admission, made)
    admission.poll()
    fill(admission, made, admission.reservation("a/1"))
    admission.withdraw("a/1", 8)
    admission.unregister("a/1")
    retry = sequence(admission, "a/2", list(range(12)))
    offer(admission, retry)
    assert admission.poll() == [GrantMade("a/2", (2,))]


def test_a_second_commit_and_a_second_offer_change_nothing() -> None:
    admission = make()
    made = sequence(admission, "a", [1, 2, 3])
    first = ship(admission, made)
    assert admission.commit("a", tokens([999])) is CommitOutcome.ALREADY_COMMITTED
    assert offer(admission, made) is False
    admission.withdraw("a", 0)  # the shipment's own end must not take the running sequence's blocks
    assert first + run(admission)["a"] == reference_continuation([1, 2, 3], 5)
    assert admission.commit("a", tokens([999])) is CommitOutcome.ALREADY_COMMITTED


def test_nothing_is_told_of_a_committed_attempt_that_ended_before_the_next_step() -> None:
    """Another attempt may have its name by then."""
    admission = make()
    ship(admission, sequence(admission, "a", [1, 2, 3]))
    admission.unregister("a")
    assert admission.poll() == []


def test_what_is_not_registered_or_does_not_fit_is_refused() -> None:
    admission = make()
    made = sequence(admission, "a", list(range(8)))
    with pytest.raises(NotFound, match="b is not registered"):
        admission.offer("b", [], 8)
    with pytest.raises(FailedPrecondition, match="num_tokens: 7 offered, 8 registered"):
        admission.offer("a", [], 7)
    with pytest.raises(FailedPrecondition, match="block_hashes"):
        admission.offer("a", [b"x" * 32, b"y" * 32], 8)
    with pytest.raises(NotFound, match="no reservation"):
        admission.commit("a", tokens([1]))
    offer(admission, made)
    with pytest.raises(FailedPrecondition, match="being shipped already"):
        offer(admission, made)


@pytest.mark.parametrize("phase", ["registered", "waiting", "granted", "committed", "finished"])
def test_unregister_frees_everything_once_in_every_phase(phase: str) -> None:
    admission = make(num_blocks=5)
    blocker = sequence(admission, "blocker", [7] * 12)
    made = sequence(admission, "a", [1] * 12, max_tokens=3)
    if phase == "waiting":
        offer(admission, blocker)
        admission.poll()
    if phase in ("waiting", "granted"):
        offer(admission, made)
        admission.poll()
    if phase in ("committed", "finished"):
        ship(admission, made)
    if phase == "finished":
        run(admission)
    for _ in range(2):
        admission.unregister("a")
        admission.withdraw("a", 0)
    admission.unregister("blocker")
    core = core_of(admission)
    core.check_integrity()
    assert core.pool.counts.used == 0
    assert not core.sequences and admission.num_waiting == 0 and not core.has_work


def test_pins_yield_to_a_grant_that_would_otherwise_wait_for_ever() -> None:
    admission = make(num_blocks=8)
    pool = core_of(admission).pool
    cached = sequence(admission, "cached", list(range(16)), max_tokens=2)
    ship(admission, cached)
    run(admission)
    blocks = [
        block_id for block_id in range(8) if pool.ref_count(block_id) == 0 and block_id in pool.published_blocks()
    ]
    pool.pin("system prompt", blocks[:4])
    large = sequence(admission, "large", [9] * 27, max_tokens=2)
    offer(admission, large)
    assert [output.seq_id for output in admission.poll() if isinstance(output, GrantMade)] == ["large"]
    assert pool.num_pinned == 0
    core_of(admission).check_integrity()


def test_pins_stay_while_others_will_give_blocks_back() -> None:
    admission = make(num_blocks=8)
    pool = core_of(admission).pool
    ship(admission, sequence(admission, "cached", list(range(8)), max_tokens=2))
    run(admission)
    pool.pin("system prompt", list(pool.published_blocks())[:2])
    offer(admission, sequence(admission, "first", [8] * 11, arrival=1, max_tokens=2))
    admission.poll()
    offer(admission, sequence(admission, "second", [9] * 15, arrival=2, max_tokens=2))
    assert admission.poll() == []
    assert pool.num_pinned == 2


def test_choices_wait_for_places_one_by_one_and_beams_for_all() -> None:
    limits = EngineLimits(max_batched_tokens=16, max_running=4)
    admission = DecodeAdmission(EngineCore(ScriptedRunner(num_blocks=64, block_size=BLOCK_SIZE), limits))
    many = sequence(admission, "many", [1] * 5)
    many.num_choices = 9
    beams = sequence(admission, "beams", [2] * 5, arrival=1)
    beams.beam = BeamParams(4)
    small = sequence(admission, "small", [3] * 5, arrival=2)
    for made in (many, beams, small):
        offer(admission, made)
    assert [output.seq_id for output in admission.poll()] == ["many", "small"]
    admission.unregister("many")
    admission.unregister("small")
    assert [output.seq_id for output in admission.poll()] == ["beams"]


def test_a_higher_tier_is_granted_before_what_waits_in_a_lower_one() -> None:
    admission = make(num_blocks=16)
    core = core_of(admission)
    low = sequence(admission, "low", [1] * 5, rank=2)
    low.num_choices = 1
    ship(admission, low)
    run_one = core.scheduler.running[0]
    core.scheduler.preempt(run_one.unit, Schedule())
    offer(admission, sequence(admission, "late", [2] * 5, rank=2, arrival=9))
    offer(admission, sequence(admission, "high", [3] * 5, rank=0, arrival=9))
    assert [output.seq_id for output in admission.poll() if isinstance(output, GrantMade)] == ["high"]


def test_a_grant_waits_for_blocks_that_are_on_their_way_for_another() -> None:
    admission = make(num_blocks=32)
    prompt = list(range(10))
    first, second = sequence(admission, "first", prompt), sequence(admission, "second", prompt, arrival=1)
    offer(admission, first)
    offer(admission, second)
    assert [output.seq_id for output in admission.poll()] == ["first"]
    fill(admission, first, admission.reservation("first"))
    assert admission.poll() == []
    admission.commit("first", tokens(reference_continuation(prompt, 1)))
    assert [output for output in admission.poll() if isinstance(output, GrantMade)] == [GrantMade("second", (2,))]


def test_a_grant_does_not_wait_for_a_lower_tier_or_when_the_other_one_is_gone() -> None:
    admission = make(num_blocks=32)
    prompt = list(range(10))
    low, high = sequence(admission, "low", prompt, rank=2), sequence(admission, "high", prompt, rank=0)
    offer(admission, low)
    assert [output.seq_id for output in admission.poll()] == ["low"]
    offer(admission, high)
    assert [output.seq_id for output in admission.poll()] == ["high"]
    other = sequence(admission, "other", prompt, rank=2, arrival=5)
    offer(admission, other)
    assert admission.poll() == []
    admission.unregister("low")
    admission.unregister("high")
    assert admission.poll() == [GrantMade("other", (0, 1, 2))]


def test_an_offer_for_a_prompt_that_is_computed_here_is_refused() -> None:
    """Found by a reviewer: such an offer was granted, and the step loop ended with an error."""
    admission = make()
    core = core_of(admission)
    made = Sequence("local/1", list(range(6)), SamplingParams(max_tokens=2), hash_root=core.hash_root())
    core.add(made)
    with pytest.raises(FailedPrecondition, match="attempt local/1 computes its prompt on this worker"):
        offer(admission, made)
    while core.has_work:
        admission.poll()
        core.step()
    core.check_integrity()


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ([SampledToken(1024)], "commit.first_token_ids: 1024, the vocabulary has 1024 tokens"),
        ([SampledToken(4_000_000_000)], "4000000000, the vocabulary has"),
        ([SampledToken.told(5, 1e30)], "commit.first_logprobs: 1e\\+30 is no logarithm"),
        ([SampledToken.told(5, float("nan"))], "nan is no logarithm"),
    ],
)
def test_a_commit_with_what_no_model_samples_is_refused(first: list[SampledToken], says: str) -> None:
    admission = make()
    made = sequence(admission, "r/1", list(range(6)))
    offer(admission, made)
    admission.poll()
    with pytest.raises(FailedPrecondition, match=says):
        admission.commit(made.seq_id, first)
    assert admission.commit(made.seq_id, tokens([5])) is CommitOutcome.COMMITTED
