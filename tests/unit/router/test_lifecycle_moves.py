"""What a draining decode worker let go of: from there with its blocks, or computed again, event by event."""

from __future__ import annotations

import pytest

from kvferry.errors import (
    FailedPrecondition,
    KvferryError,
    ResourceExhausted,
    TargetUnavailable,
    Unavailable,
    WorkerDraining,
)
from router.events import (
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    Committed,
    DecodeFailed,
    FirstToken,
    MoveSource,
    OpenDecode,
    OpenPrefill,
    PrefillDone,
    PrefillFailed,
    Registered,
    ShipTo,
    SplitChoices,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import RequestLifecycle

PROMPT = (7, 8, 9)
DRAINS = WorkerDraining("d0 drains")
FROM_D0 = MoveSource("d0", epoch=5)
MIN_MOVED_TOKENS = 4


def decoding(
    num_tokens: int, *, keeps_blocks: bool = True, max_tokens: int = 8, min_moved_tokens: int = MIN_MOVED_TOKENS
) -> RequestLifecycle:
    """A request with so many output tokens: 50, 51 …"""
    life = RequestLifecycle(PROMPT, max_tokens, min_moved_tokens=min_moved_tokens)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, epoch=5, ship_address="d0:9", keeps_blocks=keeps_blocks))
    life.handle(FirstToken(1, 0, 50))
    life.handle(PrefillDone(1))
    life.handle(Committed(1))
    life.handle(Tokens(1, 1, tuple(range(51, 50 + num_tokens))))
    return life


def moving(num_tokens: int = MIN_MOVED_TOKENS) -> RequestLifecycle:
    """Its move under way."""
    life = decoding(num_tokens)
    life.handle(DecodeFailed(1, DRAINS))
    life.handle(WorkersChosen("d0", "d1"))
    life.handle(Registered(2, epoch=6, ship_address="d1:9", keeps_blocks=True))
    return life


def choose(attempt: int, *excluding: str, source: MoveSource | None = None) -> ChooseWorkers:
    return ChooseWorkers(attempt, needs_prefill=True, needs_decode=True, excluding=frozenset(excluding), source=source)


def test_the_draining_worker_takes_the_place_of_prefill() -> None:
    life, known = decoding(4), (*PROMPT, 50, 51, 52, 53)
    assert life.handle(DecodeFailed(1, DRAINS)) == [choose(2, "d0", source=FROM_D0)]
    assert life.handle(WorkersChosen("d0", "d1")) == [OpenDecode(2, "d1", known, local_prefill=False)]
    assert life.handle(Registered(2, 6, "d1:9")) == [OpenPrefill(2, "d0", known, ShipTo("d1:9", 6))]


@pytest.mark.parametrize(
    "life",
    [
        pytest.param(decoding(3), id="too few tokens"),
        pytest.param(decoding(7), id="one token left"),
        pytest.param(decoding(4, keeps_blocks=False), id="nothing is kept"),
        pytest.param(decoding(4, min_moved_tokens=0), id="switched off"),
    ],
)
def test_the_ordinary_way(life: RequestLifecycle) -> None:
    (action,) = life.handle(DecodeFailed(1, DRAINS))
    assert isinstance(action, ChooseWorkers)
    assert action.source is None


def test_a_worker_that_is_gone_keeps_nothing() -> None:
    assert decoding(4).handle(DecodeFailed(1, Unavailable("gone"))) == [choose(2, "d0")]


def test_a_prefill_worker_that_drains_keeps_nothing() -> None:
    life = RequestLifecycle(PROMPT, 8, min_moved_tokens=MIN_MOVED_TOKENS)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, epoch=5, ship_address="d0:9", keeps_blocks=True))
    life.handle(Committed(1))
    life.handle(Tokens(1, 1, (51, 52, 53, 54, 55)))  # prefill's own is still to come
    *_, action = life.handle(PrefillFailed(1, WorkerDraining("p0 drains")))
    assert isinstance(action, ChooseWorkers)
    assert action.source is None


def test_a_pair_without_the_source_is_an_ordinary_attempt() -> None:
    """It may be gone by the time there is another decode worker."""
    life = decoding(4)
    life.handle(DecodeFailed(1, DRAINS))
    life.handle(WorkersChosen("p0", "d1"))
    life.handle(Registered(2, 6, "d1:9"))
    *_, action = life.handle(PrefillFailed(2, FailedPrecondition("p0 cannot")))
    assert not isinstance(action, ChooseWorkers)


@pytest.mark.parametrize(
    "error", [Unavailable("gone"), FailedPrecondition("kept no more"), ResourceExhausted("never fits"), DRAINS]
)
def test_a_move_that_fails_is_followed_by_an_ordinary_attempt(error: KvferryError) -> None:
    """Whatever the error says of the draining worker, it says nothing of the request."""
    assert moving().handle(PrefillFailed(2, error)) == [CancelDecode(2), choose(3, "d0")]


def test_a_target_that_fails_is_avoided() -> None:
    assert moving().handle(PrefillFailed(2, TargetUnavailable("d1 refused"))) == [
        CancelDecode(2),
        choose(3, "d0", "d1"),
    ]
    assert moving().handle(DecodeFailed(2, Unavailable("d1 is gone"))) == [CancelPrefill(2), choose(3, "d0", "d1")]


def test_moves_that_fail_are_no_failures_of_the_request() -> None:
    """With one attempt without progress allowed, a move that fails does not take it."""
    life = RequestLifecycle(PROMPT, 8, min_moved_tokens=1, max_attempts=1)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, epoch=5, ship_address="d0:9", keeps_blocks=True))
    life.handle(FirstToken(1, 0, 50))
    life.handle(Committed(1))
    life.handle(DecodeFailed(1, DRAINS))
    life.handle(WorkersChosen("d0", "d1"))
    life.handle(Registered(2, 6, "d1:9"))
    *_, action = life.handle(PrefillFailed(2, Unavailable("gone")))
    assert isinstance(action, ChooseWorkers)


def test_what_moved_moves_again() -> None:
    life = moving()
    life.handle(FirstToken(2, 4, 54))
    life.handle(PrefillDone(2))
    life.handle(Committed(2))
    life.handle(Tokens(2, 5, (55,)))
    assert life.handle(DecodeFailed(2, WorkerDraining("d1 drains"))) == [
        choose(3, "d1", source=MoveSource("d1", epoch=6))
    ]


def test_every_choice_that_has_enough_moves_by_itself() -> None:
    life = RequestLifecycle(PROMPT, 8, num_choices=3, min_moved_tokens=MIN_MOVED_TOKENS)
    life.start()
    life.handle(WorkersChosen("p0", "d0"))
    life.handle(Registered(1, epoch=5, ship_address="d0:9", keeps_blocks=True))
    for choice in range(3):
        life.handle(FirstToken(1, 0, 50, choice=choice))
    life.handle(PrefillDone(1))
    life.handle(Committed(1))
    life.handle(Tokens(1, 1, (51, 52, 53), choice=0))
    life.handle(Tokens(1, 1, (61,), choice=1))
    life.handle(Tokens(1, 1, (71, 72, 73, 74), choice=2))
    (split,) = life.handle(DecodeFailed(1, DRAINS))
    assert isinstance(split, SplitChoices)
    assert [part.source for part in split.choices] == [FROM_D0, None, FROM_D0]
    part = RequestLifecycle(PROMPT, 8, num_choices=3, resumes=split.choices[2], min_moved_tokens=MIN_MOVED_TOKENS)
    (action,) = part.start()
    assert isinstance(action, ChooseWorkers)
    assert action.source == FROM_D0
