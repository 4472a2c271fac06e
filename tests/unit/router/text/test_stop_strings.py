"""No part of a stop string is ever shown, and nothing else is held back (R071, R073)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopMatcher, StopStrings

SMALL_TEXT = st.text(alphabet="ab", max_size=4)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def shown_and_stop(
    stops: list[str], pieces: list[str], *, include: bool = False, num_early: int = 0
) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopStrings(stops), include_stop=include)
    shown = []
    for index, piece in enumerate(pieces):
        scan = matcher.push(piece, may_match=index >= num_early)
        shown.append(scan.text)
        if scan.match is not None:
            return shown, scan.match.stop_string
    return [*shown, matcher.flush()], None


def expected(stops: list[str], pieces: list[str], include: bool, num_early: int) -> tuple[str, str | None]:
    """By hand: all occurrences that complete in each piece, the first start, then the first end."""
    text = ""
    for index, piece in enumerate(pieces):
        before, text = len(text), text + piece
        ends = range(before + 1, len(text) + 1) if index >= num_early else ()
        found = sorted((end - len(stop), end, stop) for end in ends for stop in stops if text[:end].endswith(stop))
        if found:
            start, end, stop = found[0]
            return text[: end if include else start], stop
    return text, None


@settings(max_examples=1500, deadline=None)
@given(stops=STOPS, pieces=st.lists(SMALL_TEXT, max_size=12), include=st.booleans(), num_early=st.integers(0, 6))
def test_result_is_that_of_searching_the_whole_text(
    stops: list[str], pieces: list[str], include: bool, num_early: int
) -> None:
    shown, stop = shown_and_stop(stops, pieces, include=include, num_early=num_early)
    assert ("".join(shown), stop) == expected(stops, pieces, include, num_early)


@settings(max_examples=800, deadline=None)
@given(stops=STOPS, pieces=st.lists(SMALL_TEXT, max_size=12))
def test_exactly_the_longest_beginning_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    text = shown = ""
    for piece in pieces:
        text += piece
        scan = matcher.push(piece)
        shown += scan.text
        if scan.match is not None:
            return
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((beginning for beginning in beginnings if text.endswith(beginning)), key=len)
        assert shown + held == text


@pytest.mark.parametrize(
    "pieces",
    [
        ["go ", "on##", "#later"],
        ["go ", "on#", "#", "#later"],
        ["go ", "on", "#", "#", "#", "later"],
        ["go on###later"],
    ],
)
def test_a_stop_string_over_several_tokens_is_cut_whole(pieces: list[str]) -> None:
    shown, stop = shown_and_stop(["###"], pieces)
    assert stop == "###"
    assert "".join(shown) == "go on"


def test_a_false_beginning_is_released_at_once() -> None:
    assert shown_and_stop(["User:"], ["Us", "e ", "it"]) == (["", "Use ", "it", ""], None)


def test_the_one_that_starts_first_wins_within_a_token() -> None:
    assert shown_and_stop(["b", "abc"], ["xabc"]) == (["x"], "abc")
    assert shown_and_stop(["b", "abc"], ["xab", "c"]) == (["xa"], "b")


def test_the_shorter_of_two_that_start_together_wins() -> None:
    assert shown_and_stop(["abc", "ab"], ["xabc"], include=True) == (["xab"], "ab")


def test_an_early_occurrence_is_shown_and_never_matches_later() -> None:
    assert shown_and_stop(["END"], ["END", " more", "END"], num_early=2) == (["END", " more", ""], "END")


def test_many_and_long_stop_strings() -> None:
    stops = [f"stop{number}!" for number in range(1000)] + ["a" * 10_000 + "b"]
    shown, stop = shown_and_stop(stops, ["a"] * 9_999 + ["c", "stop99", "9!"])
    assert ("".join(shown), stop) == ("a" * 9_999 + "c", "stop999!")


def test_equal_stop_strings_are_one() -> None:
    assert shown_and_stop(["x", "x"], ["axb"]) == (["a"], "x")
