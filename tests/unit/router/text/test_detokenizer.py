"""Streamed text is the text: whole characters, nothing lost, never an error, flat cost (R069, R070, R146)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from kvferry.errors import FailedPrecondition
from router.text.detokenizer import Detokenizer, decode
from router.text.token_bytes import TokenBytes
from tests.support.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
METASPACE = metaspace_tokenizer()
TEXTS = [
    "hello world",
    "👩‍👩‍👧 family",
    "🇩🇪🇫🇷",
    "日本語のテキスト",
    "שלום עולם",
    "naïve café",
    "a\0b\r\n\t",
    "  two  spaces  ",
]

PROPERTY = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def stream(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(TokenBytes.of(tokenizer), skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of the vocabulary, special and added ones often, and a few beyond it."""
    size = tokenizer.get_vocab_size()
    special = sorted(tokenizer.get_added_tokens_decoder())
    return st.lists(st.integers(0, size + 3) | st.sampled_from(special), max_size=40)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def smollm2_table(smollm2: Tokenizer) -> TokenBytes:
    return TokenBytes.of(smollm2)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_joined_stream_is_the_text_without_replacement_marks(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer, ids_of(tokenizer, text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_character_left_unfinished_gives_one_mark_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = ids_of(tokenizer, "hi 𝄞")[:-1]
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == "hi \ufffd"
    assert pieces[-1] == "\ufffd"


@PROPERTY
@given(ids=token_ids(BYTE_LEVEL), skip=st.booleans())
def test_byte_level_stream_is_the_full_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=skip)) == expected


@PROPERTY
@given(ids=token_ids(METASPACE), skip=st.booleans())
def test_metaspace_stream_is_the_full_decode_of_any_ids(ids: list[int], skip: bool) -> None:
    expected = METASPACE.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(METASPACE, ids, skip_special_tokens=skip)) == expected


@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_smollm2_stream_is_the_full_decode_of_any_ids(
    smollm2: Tokenizer, smollm2_table: TokenBytes, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(token_ids(smollm2))
    detokenizer = Detokenizer(smollm2_table, skip_special_tokens=skip)
    joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert joined == smollm2.decode(ids, skip_special_tokens=skip)


def byte_ids(text: str) -> list[int]:
    """The `<0x..>` tokens of a text's bytes: ids 3 to 258."""
    return [3 + byte for byte in text.encode()]


@PROPERTY
@given(
    parts=st.lists(
        st.integers(0, 2).map(lambda i: [i])
        | st.integers(259, 380).map(lambda i: [i])
        | st.text(max_size=3).map(byte_ids)
    ),
    skip=st.booleans(),
)
def test_byte_fallback_stream_is_the_full_decode_where_runs_are_characters(parts: list[list[int]], skip: bool) -> None:
    ids = [token_id for part in parts for token_id in part]
    expected = BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_FALLBACK, ids, skip_special_tokens=skip)) == expected


@PROPERTY
@given(ids=token_ids(BYTE_FALLBACK))
def test_byte_fallback_stream_keeps_whole_characters_of_broken_runs(ids: list[int]) -> None:
    # By hand: names become bytes, marks spaces, all joined and decoded at once, one first space dropped.
    data = b""
    for token_id in ids:
        name = BYTE_FALLBACK.id_to_token(token_id)
        if name is None or token_id < 3:
            continue
        data += bytes([token_id - 3]) if token_id < 259 else name.replace("▁", " ").encode()
    expected = data.decode(errors="replace")
    assert "".join(stream(BYTE_FALLBACK, ids)) == expected.removeprefix(" ")


@pytest.mark.parametrize("token_id", [-1, -(2**70), 10**6, 2**32, 2**70])
def test_ids_outside_the_vocabulary_add_no_text(token_id: int) -> None:
    hello = ids_of(BYTE_LEVEL, "hello 日")
    assert "".join(stream(BYTE_LEVEL, [token_id, *hello[:-1], token_id, hello[-1], token_id])) == "hello 日"


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    ids = ids_of(BYTE_LEVEL, "<|im_start|>hi<think><|im_end|>")
    assert "".join(stream(BYTE_LEVEL, ids)) == "hi<think>"
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=False)) == "<|im_start|>hi<think><|im_end|>"


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, metaspace_tokenizer])
def test_a_first_space_is_dropped_except_when_a_text_is_continued(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = ids_of(tokenizer, "the dog")
    table = TokenBytes.of(tokenizer)
    detokenizer = Detokenizer(table, continues_text=True)
    assert decode(table, ids) == "the dog"
    assert "".join(map(detokenizer.push, ids)) == " the dog"


WHOLE_CHARACTERS = st.lists(
    st.sampled_from(["the", " dog", "日本", "é", " ", "  ", "<s>", "👩‍👩‍👧", "</s>", "x"]).map(
        lambda text: BYTE_FALLBACK.encode(text, add_special_tokens=False).ids
    ),
    max_size=5,
).map(lambda parts: [token_id for part in parts for token_id in part])


@PROPERTY
@given(
    tokenizer=st.sampled_from([BYTE_FALLBACK, METASPACE]),
    prompt=WHOLE_CHARACTERS,
    output=WHOLE_CHARACTERS,
    skip=st.booleans(),
)
def test_behind_a_prompt_the_text_is_the_decode_of_the_whole_without_the_prompts(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool
) -> None:
    """The first space of an output is no beginning of a text, whatever kind of prompt it follows."""
    detokenizer = Detokenizer.behind(TokenBytes.of(tokenizer), prompt, skip_special_tokens=skip)
    text = "".join(map(detokenizer.push, output)) + detokenizer.flush()
    before, whole = (tokenizer.decode(ids, skip_special_tokens=skip) for ids in (prompt, [*prompt, *output]))
    assert before + text == whole


@PROPERTY
@given(prompt=token_ids(BYTE_FALLBACK), output=token_ids(BYTE_FALLBACK), skip=st.booleans())
def test_behind_any_ids_it_goes_on_where_they_end(prompt: list[int], output: list[int], skip: bool) -> None:
    table = TokenBytes.of(BYTE_FALLBACK)
    through = Detokenizer(table, skip_special_tokens=skip)
    for token_id in prompt:
        through.push(token_id)
    behind = Detokenizer.behind(table, prompt, skip_special_tokens=skip, marks_half=True)
    for token_id in output:
        assert behind.push(token_id) == through.push(token_id)
    assert behind.flush() == through.flush()


def test_half_a_character_of_a_prompt_is_completed_or_not_the_outputs_affair() -> None:
    table, half = TokenBytes.of(BYTE_FALLBACK), byte_ids("a日")[:-1]
    for output, text in ((byte_ids("日")[-1:], "日"), (byte_ids("x日"), "x日"), ([1, *byte_ids("{}")], "{}"), ([], "")):
        detokenizer = Detokenizer.behind(table, half)
        assert "".join(map(detokenizer.push, output)) + detokenizer.flush() == text
    shown = Detokenizer.behind(table, half, marks_half=True)
    assert shown.push(byte_ids("x")[0]) + shown.flush() == "\ufffdx"


def test_transformers_gives_the_first_space_of_an_output_to_the_output() -> None:
    """As vLLM does, whose decoder begins with the prompt's ids: `decode` of an output alone drops it."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=BYTE_FALLBACK)  # type: ignore[no-untyped-call]
    prompt, output = ids_of(BYTE_FALLBACK, "the fox [/INST]"), ids_of(BYTE_FALLBACK, "hello world")
    assert theirs.decode(output) == "hello world"
    added = str(theirs.decode([*prompt, *output])).removeprefix(str(theirs.decode(prompt)))
    detokenizer = Detokenizer.behind(TokenBytes.of(BYTE_FALLBACK), prompt)
    assert "".join(map(detokenizer.push, output)) == added == " hello world"


def test_decoders_that_do_not_work_token_by_token_are_refused() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(FailedPrecondition, match="WordPiece"):
        TokenBytes.of(tokenizer)


def test_chosen_special_tokens_stay() -> None:
    ids = [0, *BYTE_LEVEL.encode("hello").ids, 1, 2, 1]
    table = TokenBytes.of(BYTE_LEVEL)
    detokenizer = Detokenizer(table, kept_special_ids=frozenset({1, 99_999}))
    assert "".join(map(detokenizer.push, ids)) == "hello<|im_start|><|im_start|>"
    shows_all = Detokenizer(table, skip_special_tokens=False, kept_special_ids=frozenset({1}))
    assert "".join(map(shows_all.push, ids)) == "<|endoftext|>hello<|im_start|><|im_end|><|im_start|>"
