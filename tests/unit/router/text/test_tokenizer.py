"""Prompts become ids: exactly one BOS, a status for every text, not on the event loop for long (R129, R135, R145)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvferry.cli.cache import EXAMPLE_SYSTEM
from kvferry.errors import FailedPrecondition, InvalidArgument
from router.text.chat_template import ChatMessage
from router.text.text_length import LengthBound
from router.text.tokenizer import PromptLimits, TextTokenizer
from tests.support.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
    write_chatml_folder,
    write_llama_folder,
    write_model_folder,
)

WIDE = PromptLimits(max_tokens=10**9, max_bytes=10**9)


@pytest.fixture
def chatml(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.load(write_chatml_folder(tmp_path))


@pytest.fixture
def llama(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.load(write_llama_folder(tmp_path))


def test_what_the_folder_says(chatml: TextTokenizer) -> None:
    assert chatml.vocab_size == byte_level_tokenizer().get_vocab_size()
    assert (chatml.bos_token_id, chatml.eos_token_ids) == (None, (2, 0))
    assert chatml.special_token_ids == {0, 1, 2}


def test_smollm2_is_understood(smollm2_folder: Path) -> None:
    tokenizer = TextTokenizer.load(smollm2_folder)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    reference = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    for text in ("", "hello world", "日本語 👩‍👩‍👧", "12345 + x"):
        assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.length_bound.dropped_chars == "\x04\x06\x13\x14\x16\x1d"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_chatml_folder(tmp_path) / name).unlink()
    with pytest.raises(FailedPrecondition, match=f"{name} is missing"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("contents", [b"{", b"\xff", b"[]", b""])
def test_a_broken_file_is_named(tmp_path: Path, name: str, contents: bytes) -> None:
    (write_chatml_folder(tmp_path) / name).write_bytes(contents)
    with pytest.raises(FailedPrecondition, match=name):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("config.json", {"vocab_size": 0}), ("config.json", {}), ("generation_config.json", {"eos_token_id": "x"})],
)
def test_a_wrong_value_is_named(tmp_path: Path, name: str, value: dict[str, object]) -> None:
    (write_chatml_folder(tmp_path) / name).write_text(json.dumps(value))
    with pytest.raises(FailedPrecondition, match=name):
        TextTokenizer.load(tmp_path)


def test_optional_files_may_be_absent(tmp_path: Path) -> None:
    folder = write_llama_folder(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = TextTokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, (2,))
    assert tokenizer.encode("a")[0] == 1


def test_settings_of_training_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    saved = byte_level_tokenizer()
    saved.enable_truncation(2)
    saved.enable_padding(length=64)
    tokenizer = TextTokenizer.load(write_model_folder(tmp_path, saved))
    assert tokenizer.encode("hello world, again") == byte_level_tokenizer().encode("hello world, again").ids


def test_exactly_one_bos(llama: TextTokenizer) -> None:
    bos = 1
    once = llama.encode("hello")
    assert once.count(bos) == 1
    assert llama.encode("<s>hello").count(bos) == 1
    assert llama.encode("<s>hello") == once
    assert llama.encode("") == [bos]
    assert bos not in llama.encode("hello", add_special_tokens=False)
    chat = llama.encode_chat([ChatMessage("user", "hello")])
    assert (chat[0], chat.count(bos)) == (bos, 1)


@pytest.mark.parametrize(("add", "num_bos"), [(True, 1), (False, 0)])
def test_tokenizer_config_decides_about_bos(tmp_path: Path, add: bool, num_bos: int) -> None:
    config: dict[str, object] = {"bos_token": "<|im_start|>", "add_bos_token": add}
    tokenizer = TextTokenizer.load(write_model_folder(tmp_path, byte_level_tokenizer(), tokenizer_config=config))
    assert tokenizer.encode("hello").count(1) == num_bos


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "1/2/3/4" * 500,
        "a" * 200_000,
        "👩‍👩‍👧" * 500,
        "\u200d" * 1000,
        "\ufffe\ufdd0",
        " " * 5000,
        "\U0010ffff",
    ],
)
def test_every_text_has_a_result(chatml: TextTokenizer, llama: TextTokenizer, text: str) -> None:
    for tokenizer in (chatml, llama):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud800", "a" * 5000 + "\udfff"])
async def test_text_that_is_no_unicode_is_refused(chatml: TextTokenizer, text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt\.text: "):
        chatml.encode(text)
    with pytest.raises(InvalidArgument, match=r"^prompt\.text: "):
        await chatml.encode_async(text, limits=WIDE)
    with pytest.raises(InvalidArgument, match=r"^prompt\.chat: "):
        await chatml.encode_chat_async([ChatMessage("user", text)], limits=WIDE)


def test_a_system_prompt_alone_is_the_beginning_of_every_chat_with_it(
    chatml: TextTokenizer, smollm2_folder: Path
) -> None:
    """What `kvferry cache pin --system` relies on."""
    for tokenizer in (chatml, TextTokenizer.load(smollm2_folder)):
        for text in (EXAMPLE_SYSTEM, "hello world\n", "<|im_end|> naïve 👩‍👩‍👧", " ends in spaces  "):
            system = ChatMessage("system", text)
            prefix = tokenizer.encode_chat([system], add_generation_prompt=False)
            for user in ("hello", "\n", "<|im_end|>"):
                chat = tokenizer.encode_chat([system, ChatMessage("user", user)])
                assert chat[: len(prefix)] == prefix and len(chat) > len(prefix)
        assert len(tokenizer.encode_chat([ChatMessage("system", EXAMPLE_SYSTEM)], add_generation_prompt=False)) > 16


def test_an_id_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    saved = byte_level_tokenizer()
    folder = write_model_folder(tmp_path, saved, config={"vocab_size": saved.get_vocab_size() - 1})
    with pytest.raises(InvalidArgument, match="gives token id"):
        TextTokenizer.load(folder).encode("a <think>")


async def test_both_ways_give_the_same_ids(llama: TextTokenizer) -> None:
    long = "hello world " * 1000
    assert await llama.encode_async(long, limits=WIDE) == llama.encode(long)
    messages = [ChatMessage("user", long)]
    assert await llama.encode_chat_async(messages, limits=WIDE) == llama.encode_chat(messages)


async def test_limits_are_kept_before_encoding(chatml: TextTokenizer) -> None:
    with pytest.raises(InvalidArgument, match="is 9 bytes long, at most 8"):
        await chatml.encode_async("日本語", limits=PromptLimits(max_tokens=100, max_bytes=8))
    chars_per_token = chatml.length_bound.chars_per_token
    assert chars_per_token is not None
    limits = PromptLimits(max_tokens=10, max_bytes=10**6)
    assert await chatml.encode_async("a" * 10 * chars_per_token, limits=limits)  # perhaps too long: the caller counts
    with pytest.raises(InvalidArgument, match="gives 11 tokens or more, at most 10"):
        await chatml.encode_async("a" * (10 * chars_per_token + 1), limits=limits)
    with pytest.raises(InvalidArgument, match=r"prompt\.chat: gives"):
        await chatml.encode_chat_async([ChatMessage("user", "a" * 1000)], limits=limits)


@pytest.mark.parametrize(
    "tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer(), byte_fallback_tokenizer(legacy=False)]
)
@pytest.mark.parametrize("text", ["a" * 999, "the quick brown fox " * 40, "日本語" * 99, " " * 500, "\x04" * 50])
def test_the_length_bound_never_exceeds_the_truth(tokenizer: Tokenizer, text: str) -> None:
    bound = LengthBound.of(tokenizer)
    assert bound.chars_per_token is not None
    assert 0 < bound.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_characters_that_a_vocabulary_lacks_do_not_count(smollm2_folder: Path) -> None:
    bound = TextTokenizer.load(smollm2_folder).length_bound
    assert bound.min_tokens("\x04" * 10**6) == 0


def test_no_length_bound_where_text_may_be_swallowed() -> None:
    assert LengthBound.of(metaspace_tokenizer()).chars_per_token is not None
    swallowing = json.loads(byte_level_tokenizer().to_str())
    swallowing["added_tokens"][0]["rstrip"] = True
    assert LengthBound.of(Tokenizer.from_str(json.dumps(swallowing))).chars_per_token is None


async def test_the_event_loop_goes_on_while_a_long_prompt_is_encoded(smollm2_folder: Path) -> None:
    tokenizer = TextTokenizer.load(smollm2_folder)
    encoding = asyncio.create_task(tokenizer.encode_async("The quick brown fox. " * 100_000, limits=WIDE))
    gaps_s: list[float] = []
    while not encoding.done():
        begin = time.perf_counter()
        await asyncio.sleep(0)
        gaps_s.append(time.perf_counter() - begin)
    assert len(await encoding) >= 500_000
    gaps_s.sort()
    assert gaps_s[len(gaps_s) * 99 // 100] < 0.1
    assert sum(gap_s for gap_s in gaps_s if gap_s > 0.1) < 0.3  # encoding on the loop would be one gap of a second
    tokenizer.close()
