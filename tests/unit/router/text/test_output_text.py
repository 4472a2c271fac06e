"""Ids and text of a choice keep their relation for every way to end (R040, R069, R071-R073, R076)."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.sampling import Finish, FinishKind
from router.text.detokenizer import Detokenizer
from router.text.output_text import ChoiceText, TextDelta
from router.text.stop_strings import StopStrings
from router.text.token_bytes import StartRule, TokenBytes
from tests.support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TABLE = TokenBytes.of(TOKENIZER)
EOS = 2


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def letters(text: str) -> list[int]:
    """One token a byte, whatever was merged in training."""
    return [TOKENIZER.encode(char).ids[0] for char in text]


def choice(
    *stops: str, include_stop: bool = False, min_tokens: int = 0, ending: Sequence[int] = (EOS,), skip: bool = True
) -> ChoiceText:
    return ChoiceText(
        Detokenizer(TABLE, skip_special_tokens=skip),
        stops=StopStrings(stops),
        include_stop=include_stop,
        min_tokens=min_tokens,
        ending_token_ids=frozenset(ending),
    )


def test_text_and_ids_of_a_choice_that_ends_by_itself() -> None:
    state = choice()
    ids = [*ids_of("hello world"), EOS]
    assert state.push(ids) == TextDelta("hello world", tuple(ids))
    assert state.finish() == TextDelta("")
    assert state.num_output_tokens == len(ids)


@pytest.mark.parametrize("skip", [True, False])
def test_text_of_an_ending_token_is_never_shown(skip: bool) -> None:
    word = letters("w")[0]
    state = choice(ending=[EOS, word], skip=skip)
    assert state.push([*letters("ab"), word]) == TextDelta("ab", (*letters("ab"), word))
    state = choice(skip=skip)
    assert state.push([*letters("ab"), EOS]).text == "ab"


@pytest.mark.parametrize(("include", "text"), [(False, "go on"), (True, "go on###")])
def test_a_stop_string_ends_the_choice_and_the_rest_is_overshoot(include: bool, text: str) -> None:
    state = choice("###", include_stop=include)
    ids = letters("go on###more")
    delta = state.push(ids)
    stop = Finish(FinishKind.STOP_STRING, stop_string="###")
    assert delta == TextDelta(text, tuple(ids[:8]), stop, num_overshoot=4)
    assert state.push(letters("xy")) == TextDelta("", (), None, num_overshoot=2)
    assert state.finish() == TextDelta("")
    assert (state.stop, state.num_output_tokens, state.num_overshoot) == (stop, 8, 6)


def test_what_was_held_back_is_given_at_the_end() -> None:
    state = choice("###")
    assert state.push(letters("a##")).text == "a"
    assert state.finish() == TextDelta("##")
    assert state.finish() == TextDelta("")
    assert state.push(letters("b")) == TextDelta("", (), None, num_overshoot=1)


def test_an_unfinished_character_gives_one_mark_behind_what_was_held() -> None:
    state = choice("###")
    state.push(letters("a#") + ids_of("𝄞")[:-1])
    assert state.finish().text == "#\ufffd"


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "ab"), (4, "ab"), (5, "abEND c"), (8, "abEND c"), (9, "abEND c"), (10, "abEND cEND")]
)
def test_no_stop_string_ends_within_min_tokens(min_tokens: int, text: str) -> None:
    state = choice("END", min_tokens=min_tokens)
    assert state.push(letters("abEND cEND")).text + state.finish().text == text


def test_a_stop_string_that_begins_within_min_tokens_and_completes_later_matches() -> None:
    state = choice("END", min_tokens=4)
    assert state.push(letters("abEND")).text == "ab"


def test_stop_strings_in_special_tokens_count_only_when_these_are_shown() -> None:
    start = 1
    assert choice("<|im_start|>").push([start]).stop is None
    assert choice("<|im_start|>", skip=False).push([start]).stop is not None


STOP_TEXTS = ["👩‍👩‍👧", "END", "日", "a", "\ufffd"]


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(
        st.sampled_from([*letters("aEND "), EOS, 10**6]) | st.sampled_from(ids_of("👩‍👩‍👧 日本 END")), max_size=30
    ),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stops=st.lists(st.sampled_from(STOP_TEXTS), max_size=2),
    min_tokens=st.integers(0, 8),
)
def test_grouping_and_replay_change_nothing(ids: list[int], cuts: list[int], stops: list[str], min_tokens: int) -> None:
    whole, parted = (choice(*stops, min_tokens=min_tokens) for _ in range(2))
    first = whole.push(ids)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    deltas = [parted.push(ids[begin:end]) for begin, end in pairwise(bounds)]
    assert "".join(delta.text for delta in deltas) == first.text
    assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == first.token_ids
    assert whole.finish() == parted.finish()
    assert (whole.stop, whole.num_overshoot) == (parted.stop, parted.num_overshoot)


def whole_characters(data: bytes) -> str:
    """Text of bytes that go on: up to a character that is not finished."""
    for length in range(min(3, len(data)), 0, -1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-length].decode(errors="replace")
    return data.decode(errors="replace")


@dataclass(frozen=True)
class Truth:
    """What an output has to give: text, number of ids, stop string; and the text that is known behind each id."""

    text: str
    num_ids: int
    stop: str | None
    known: list[str]


def truth(tokens: list[bytes], stops: list[str], include: bool, min_tokens: int) -> Truth:
    """By searching the text of all bytes so far, after every token and at the end."""
    known, text = list[str](), ""
    steps = [*range(1, len(tokens) + 1), len(tokens)]
    for step, num_ids in enumerate(steps):
        data = b"".join(tokens[:num_ids])
        before, text = len(text), data.decode(errors="replace") if step == len(tokens) else whole_characters(data)
        matches = [
            (end - len(stop), end, stop)
            for end in range(before + 1, len(text) + 1)
            for stop in stops
            if text[:end].endswith(stop)
        ]
        if matches and num_ids > min_tokens:
            start, end, stop = min(matches)
            return Truth(text[: end if include else start], num_ids, stop, known)
        known.append(text)
    return Truth(text, len(tokens), None, known)


PIECES_OF_TEXT = st.sampled_from(["a", "b", "ab", "é", "日本", "👩‍👩‍👧", "🇩🇪", "שלום", "END"]).map(
    str.encode
) | st.binary(min_size=1, max_size=3)


@settings(max_examples=800, deadline=None)
@given(
    data=st.lists(PIECES_OF_TEXT, max_size=12).map(b"".join),
    cuts=st.sets(st.integers(1, 60)),
    stops=st.lists(st.text("abéEN日\u200d👩\ufffd", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_any_split_of_any_text_gives_what_a_search_of_the_whole_gives(
    data: bytes, cuts: set[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    """Nothing of a stop string is shown, nothing else is held back, overshoot is not counted."""
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [data[begin:end] for begin, end in pairwise(bounds)]
    right = truth(tokens, stops, include, min_tokens)
    table = TokenBytes(by_id=tokens, special_ids=frozenset(), start=StartRule())
    state = ChoiceText(Detokenizer(table), stops=StopStrings(stops), include_stop=include, min_tokens=min_tokens)
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
    shown = ""
    for token_id in range(len(tokens)):
        shown += state.push([token_id]).text
        if state.stop is None:
            known = right.known[token_id]
            held = max((beginning for beginning in beginnings if known.endswith(beginning)), key=len)
            assert shown + held == known
    shown += state.finish().text
    stop = None if state.stop is None else state.stop.stop_string
    assert (shown, state.num_output_tokens, stop) == (right.text, right.num_ids, right.stop)
    assert state.num_output_tokens + state.num_overshoot == len(tokens)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_a_stop_string_that_begins_inside_a_token_and_spans_several(num_tokens: int) -> None:
    """R071, beside candidates that overlap it and one that never completes."""
    pieces = [b"so xS", b"T", b"O", b"P", b"!y"]
    pieces = [b"".join(pieces)] if num_tokens == 1 else [*pieces[: num_tokens - 1], b"".join(pieces[num_tokens - 1 :])]
    table = TokenBytes(by_id=pieces, special_ids=frozenset(), start=StartRule())
    state = ChoiceText(Detokenizer(table), stops=StopStrings(["STOP!", "TOPS", "xSTOP?", "OPQ"]))
    shown = [state.push([token_id]).text for token_id in range(len(pieces))]
    assert "".join(shown) == "so x" and state.stop is not None and state.stop.stop_string == "STOP!"
    assert state.num_output_tokens == len(pieces)


def test_a_character_and_a_stop_string_over_the_border_between_workers() -> None:
    ids = ids_of("see 👩‍👩‍👧") + letters("END")
    whole = choice("END").push(ids)
    for border in range(len(ids) + 1):
        before = choice("END").push(ids[:border])
        resumed = choice("END")
        assert resumed.push(ids[:border]) == before
        after = resumed.push(ids[border:])
        assert before.text + after.text == whole.text == "see 👩‍👩‍👧"
        assert (after.stop or before.stop) == whole.stop


def num_calls(job: Callable[[], object]) -> int:
    """Functions called, Python's own included."""
    calls: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        job()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in calls)


def test_a_token_costs_the_same_whatever_came_before_it() -> None:
    """R146: the same calls at token 100 and at token 4000, and nothing is kept that could make them longer."""
    ids = ids_of("the quick brown fox 👩‍👩‍👧 日本語, EN ")
    state = choice("END", "fox jumps", min_tokens=3)

    def pushes() -> None:
        for token_id in ids:
            state.push([token_id])

    counts, sizes = list[int](), list[int]()
    tracemalloc.start()
    try:
        while state.num_output_tokens < 4_400:
            counts.append(num_calls(pushes))
            for _ in range(20):
                pushes()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(counts) >= 4 and set(counts[1:]) == {counts[1]}
    assert sizes[-1] - sizes[1] < 200 * len(sizes)  # what the test itself keeps; a round's text has 700 bytes
