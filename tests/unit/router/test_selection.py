"""Selection: least loaded, with room in the pool, and decode computing a prompt that no prefill pool can hold."""

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
from router.worker import Role


@dataclass(frozen=True)
class Member:
    """What selection looks at."""

    address: str
    num_blocks: int
    load: int = 0
    max_running: int = 0
    sequence_fields: frozenset[str] = frozenset()
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


def test_a_field_goes_only_to_workers_that_know_it() -> None:
    old, new = frozenset({"id", "sampling"}), frozenset({"id", "sampling", "sampling.grammar"})
    plain, constrained = Needs(True, True, fields=old), Needs(True, True, fields=new)
    mixed = selector(
        [Member("old-p", 9, sequence_fields=old)],
        [Member("old-d", 9, sequence_fields=old), Member("new-d", 9, load=7, sequence_fields=new)],
    )
    assert chosen(mixed, plain) == ("old-p", "old-d")
    assert chosen(mixed, constrained) == (None, "new-d"), "prefill would overlook the grammar"
    outdated = selector([Member("new-p", 9, sequence_fields=new)], [Member("old-d", 9, sequence_fields=old)])
    assert chosen(outdated, plain) == ("new-p", "old-d")
    with pytest.raises(Unavailable, match=r"no ready decode worker knows sampling\.grammar: they are of an older"):
        chosen(outdated, constrained)


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
