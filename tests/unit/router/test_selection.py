"""Selection: least loaded, with room in the pool, and decode computing a prompt that no prefill pool can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from kvferry.errors import Unavailable
from router.membership import Membership
from router.selection import Needs, PairSelector
from router.worker import Role


@dataclass(frozen=True)
class Member:
    """What selection looks at."""

    address: str
    num_blocks: int
    load: int = 0


class Members:
    """Stands in for a membership."""

    missing: tuple[str, ...] = ()

    def __init__(self, prefill: Sequence[Member], decode: Sequence[Member]) -> None:
        self._members = {Role.PREFILL: prefill, Role.DECODE: decode}

    def ready(self, role: Role) -> Sequence[Member]:
        return self._members[role]


def selector(prefill: Sequence[Member], decode: Sequence[Member]) -> PairSelector:
    return PairSelector(cast(Membership, Members(prefill, decode)))


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
    with pytest.raises(Unavailable, match="pool of 300 blocks"):
        chosen(selector([Member("p", 20)], [Member("d", 200)]), Needs(True, True, 5, 300))


def test_an_excluded_worker_serves_only_where_allowed() -> None:
    select = selector([Member("p", 20)], [Member("d", 200)])
    with pytest.raises(Unavailable, match="has failed this request before"):
        chosen(select, Needs(True, True, 1, 1), excluding=frozenset({"d"}), allow_excluded=False)
    assert chosen(select, Needs(True, True, 1, 1), excluding=frozenset({"d"})) == ("p", "d")
