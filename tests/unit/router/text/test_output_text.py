"""Ids and text of a choice keep their relation for every way to end (R040, R069, R071-R073, R076)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.sampling import Finish, FinishKind
from router.text.output_text import ChoiceText, TextDelta
from router.text.stop_strings import StopStrings
from router.text.token_bytes import TokenBytes
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
        TABLE,
        stops=StopStrings(stops),
        include_stop=include_stop,
        min_tokens=min_tokens,
        ending_token_ids=frozenset(ending),
        skip_special_tokens=skip,
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
