"""Selection: least loaded, with room in the pool; decode computing what no prefill pool can hold; sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from kvferry.config import TenantConfig
from kvferry.errors import Unavailable
from router.breaker import FAULTS_TO_OPEN, Breaker
from router.model_workers import ModelWorkers
from router.selection import Needs, PairSelector
from router.session import Session
from router.worker import Role


@dataclass(frozen=True)
class Member:
    """What selection looks at."""

    address: str
    num_blocks: int
    load: int = 0
    max_running: int = 0
    breaker: Breaker = field(default_factory=Breaker)


class Members:
    """Stands in for the workers of a model."""

    missing: tuple[str, ...] = ()

    def __init__(self, prefill: Sequence[Member], decode: Sequence[Member]) -> None:
        self._members = {Role.PREFILL: prefill, Role.DECODE: decode}

    def ready(self, role: Role) -> Sequence[Member]:
        return self._members[role]


def selector(prefill: Sequence[Member], decode: Sequence[Member]) -> PairSelector:
    return PairSelector(cast(ModelWorkers, Members(prefill, decode)))


def chosen(select: PairSelector, needs: Needs, **options: object) -> tuple[str | None, str | None]:
    pair = select.choose(needs, **{"excluding": frozenset(), **options})  # type: ignore[arg-type]
    names = [None if worker is None else worker.address for worker in (pair.prefill, pair.decode)]
    return (names[0], names[1])


def test_a_request_goes_where_its_sequence_fits() -> None:
    select = selector([Member("p", 100)], [Member("small", 10), Member("big", 200, load=5)])
    for _ in range(4):
        assert chosen(select, Needs(True, True, 5, 20)) == ("p", "big")
    assert chosen(select, Needs(True, True, 5, 8)) == ("p", "small")


def test_decode_computes_what_no_prefill_pool_can_hold() -> None:
    select = selector([Member("p", 20)], [Member("d", 200)])
    assert chosen(select, Needs(True, True, 31, 40)) == (None, "d")
    assert chosen(select, Needs(True, False, 31, 40)) == (None, "d")


def test_no_decode_with_room_is_said() -> None:
    with pytest.raises(Unavailable, match="room for 300 blocks"):
        chosen(selector([Member("p", 20)], [Member("d", 200)]), Needs(True, True, 5, 300))


def test_an_excluded_worker_serves_only_where_allowed() -> None:
    select = selector([Member("p", 20)], [Member("d", 200)])
    with pytest.raises(Unavailable, match="has failed this request before"):
        chosen(select, Needs(True, True, 1, 1), excluding=frozenset({"d"}), allow_excluded=False)
    assert chosen(select, Needs(True, True, 1, 1), excluding=frozenset({"d"})) == ("p", "d")


def test_a_tenants_share_of_a_pool_must_hold_its_sequence() -> None:
    """On prefill too: else a resume is refused there in mid-answer."""
    tenants = [TenantConfig(name="search", max_used_share=0.25)]
    small, large = Member("small", 16), Member("large", 64)
    members = Members([Member("prefill", 32)], [small, large])
    select = PairSelector(cast(ModelWorkers, members), tenants)
    needs = Needs(prefill=True, decode=True, num_prefill_blocks=5, num_decode_blocks=8, tenant="search")
    for _ in range(4):
        assert chosen(select, needs) == ("prefill", "large")
    too_long = replace(needs, num_prefill_blocks=9)
    assert chosen(select, too_long) == (None, "large")
    anybody = replace(too_long, tenant="")
    assert {chosen(select, anybody) for _ in range(4)} == {("prefill", "small"), ("prefill", "large")}


def test_beams_go_where_the_batch_has_places_for_them() -> None:
    narrow, wide, unknown = Member("narrow", 64, max_running=2), Member("wide", 64, max_running=8), Member("silent", 64)
    select = selector([Member("prefill", 64)], [narrow, wide, unknown])
    needs = Needs(prefill=True, decode=True, num_seats=4)
    assert {chosen(select, needs)[1] for _ in range(6)} == {"wide", "silent"}


def test_a_worker_that_fails_again_and_again_is_left_alone_where_others_are_well() -> None:
    sick, well = Member("sick:1", 8, load=0), Member("well:1", 8, load=5)
    for _ in range(FAULTS_TO_OPEN):
        sick.breaker.on_fault(time.monotonic())
    needs = Needs(prefill=False, decode=True)
    chosen = selector([Member("p:1", 8)], [sick, well]).choose(needs, excluding=frozenset())
    assert chosen.decode is not None and chosen.decode.address == "well:1"
    alone = selector([Member("p:1", 8)], [sick]).choose(needs, excluding=frozenset())
    assert alone.decode is not None and alone.decode.address == "sick:1"


# -- sessions ---------------------------------------------------------------------------------------------------------

FLEET = [f"10.0.0.{number}:50061" for number in range(8)]
SESSIONS = [Session("", f"session-{number}") for number in range(400)]


def needs_of(session: Session) -> Needs:
    return Needs(prefill=True, decode=True, session=session)


def test_a_session_keeps_its_pair_and_sessions_spread() -> None:
    """Whatever came between; another selector, as in another router, says the same."""
    fleets = [[Member(address, 64) for address in addresses] for addresses in (FLEET, FLEET[::-1])]
    one, other = (selector(fleet, fleet) for fleet in fleets)
    pairs = [chosen(one, needs_of(session)) for session in SESSIONS]
    assert pairs == [chosen(other, needs_of(session)) for session in SESSIONS]
    counts = [sum(prefill == address for prefill, _ in pairs) for address in FLEET]
    assert min(counts) > 25 and max(counts) < 80


def test_a_worker_that_goes_moves_its_own_sessions_alone() -> None:
    before = {session: session.preferred(FLEET) for session in SESSIONS}
    for gone in FLEET:
        left = [address for address in FLEET if address != gone]
        after = {session: session.preferred(left) for session in SESSIONS}
        assert {session for session in SESSIONS if after[session] != before[session]} == {
            session for session in SESSIONS if before[session] == gone
        }


def test_sessions_of_two_tenants_have_nothing_in_common() -> None:
    """Not even where tenant and name together read the same."""
    names = [Session("a", f"b-{number}").preferred(FLEET) for number in range(50)]
    assert names != [Session("ab", f"-{number}").preferred(FLEET) for number in range(50)]
    assert names != [Session("c", f"b-{number}").preferred(FLEET) for number in range(50)]


def loaded_fleet(session: Session, *, own: int, others: int, max_running: int = 0) -> list[Member]:
    mine = session.preferred(FLEET)
    return [Member(address, 64, load=own if address == mine else others, max_running=max_running) for address in FLEET]


@pytest.mark.parametrize(
    ("own", "others", "max_running", "is_kept"),
    [(8, 0, 0, True), (9, 0, 0, False), (9, 1, 0, True), (4, 3, 4, False), (6, 4, 4, True), (3, 0, 4, True)],
)
def test_a_session_goes_elsewhere_only_while_its_worker_is_much_busier_or_full(
    own: int, others: int, max_running: int, is_kept: bool
) -> None:
    session = SESSIONS[0]
    fleet = loaded_fleet(session, own=own, others=others, max_running=max_running)
    told: list[tuple[Role, bool]] = []
    workers = cast(ModelWorkers, Members(fleet, fleet))
    select = PairSelector(workers, max_session_lead=8, count_session=lambda role, is_kept: told.append((role, is_kept)))
    pair = chosen(select, needs_of(session))
    assert [address == session.preferred(FLEET) for address in pair] == [is_kept, is_kept]
    assert told == [(Role.PREFILL, is_kept), (Role.DECODE, is_kept)]
    assert chosen(select, replace(needs_of(session), session=None)) != pair or not is_kept
    assert len(told) == 2


def test_a_session_leaves_workers_that_failed_it_are_ill_or_have_no_room() -> None:
    session = SESSIONS[1]
    fleet = [Member(address, 64) for address in FLEET]
    mine = session.preferred(FLEET)
    next_one = session.preferred([address for address in FLEET if address != mine])
    assert chosen(selector(fleet, fleet), needs_of(session), excluding=frozenset({mine})) == (next_one, next_one)
    small = [replace(member, num_blocks=4) if member.address == mine else member for member in fleet]
    needs = replace(needs_of(session), num_prefill_blocks=5, num_decode_blocks=5)
    assert chosen(selector(small, small), needs) == (next_one, next_one)
    for _ in range(FAULTS_TO_OPEN):
        fleet[FLEET.index(mine)].breaker.on_fault(time.monotonic())
    assert chosen(selector(fleet, fleet), needs_of(session)) == (next_one, next_one)
