"""What a draining worker keeps, and when it is worth it."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import FailedPrecondition
from kvferry.moves import MovedSequences, is_worth_moving
from kvferry.tasks import Changes


@pytest.mark.parametrize(
    ("num_output_tokens", "min_moved_tokens", "expected"),
    [(15, 16, False), (16, 16, True), (98, 16, True), (99, 16, False), (100, 16, False), (50, 0, False), (0, 0, False)],
)
def test_enough_made_and_more_than_one_to_make(
    num_output_tokens: int, min_moved_tokens: int, *, expected: bool
) -> None:
    assert is_worth_moving(num_output_tokens, 100, min_moved_tokens) is expected


async def test_a_choice_is_claimed_once() -> None:
    moves = MovedSequences(Changes())
    moves.keep("r", 0, timeout_s=600.0)
    moves.keep("r", 2, timeout_s=600.0)
    for request_id, choice in (("r", 1), ("s", 0)):
        with pytest.raises(FailedPrecondition, match=f"choice {choice} of request {request_id}"):
            moves.claim(request_id, choice)
    moves.claim("r", 2)
    with pytest.raises(FailedPrecondition):
        moves.claim("r", 2)
    assert moves.num_kept == 1


async def test_what_nobody_comes_for_is_forgotten_and_everybody_told() -> None:
    changes = Changes()
    moves = MovedSequences(changes)
    moves.keep("r", 0, timeout_s=600.0)
    moves.keep("r", 0, timeout_s=0.0)  # the later word counts
    number = changes.number
    await asyncio.wait_for(changes.wait_beyond(number), 10.0)
    assert moves.num_kept == 0
