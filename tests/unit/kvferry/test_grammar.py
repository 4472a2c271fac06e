"""Compiled grammars: kept within bounds, refused with a reason, and no text takes the process along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from kvferry import grammar as module
from kvferry.errors import FailedPrecondition, ResourceExhausted
from kvferry.grammar import GrammarRefused, Grammars
from tests.support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def id_of(text: str) -> int:
    token_id = TOKENIZER.token_to_id(text)
    assert token_id is not None
    return token_id


EOS = (2, 0)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    one = Grammars(TOKENIZER.to_str, TOKENIZER.get_vocab_size())
    yield one
    one.close()


def chain(num_bytes: int) -> str:
    """Rules that lead to one another, as many as fit."""
    lines, size, number = ["start:a0"], 9, 0
    while size < num_bytes - 20:
        lines.append(f"a{number}:a{number + 1}")
        size, number = size + len(lines[-1]) + 1, number + 1
    return "\n".join([*lines, f'a{number}:"x"'])


async def test_the_tokenizers_table_is_built_before_the_first_request() -> None:
    """Building it keeps every thread from Python: streams and heartbeats would wait for it."""
    reads: list[str] = []

    def read() -> str:
        reads.append("tokenizer.json")
        return TOKENIZER.to_str()

    grammars = Grammars(read, TOKENIZER.get_vocab_size())
    grammars.prepare(EOS)
    assert len(reads) == 1
    for number in range(3):
        await grammars.compiled(f'start: "{number}"', EOS)
    assert len(reads) == 1
    grammars.close()


async def test_a_tokenizer_that_cannot_be_read_is_said_at_the_first_grammar() -> None:
    def missing() -> str:
        raise FailedPrecondition("tokenizer.json is missing")

    grammars = Grammars(missing, 400)
    grammars.prepare(EOS)
    with pytest.raises(FailedPrecondition, match="is missing"):
        await grammars.compiled('start: "a"', EOS)
    grammars.close()


async def test_each_is_compiled_once_and_the_oldest_leaves(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    first = await grammars.compiled('start: "a"', EOS)
    second = await grammars.compiled('start: "b"', EOS)
    assert await grammars.compiled('start: "a"', EOS) is first
    await grammars.compiled('start: "c"', EOS)
    assert await grammars.compiled('start: "a"', EOS) is first
    assert await grammars.compiled('start: "b"', EOS) is not second


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: (", "1"),
        (LLMatcher.grammar_from_regex(r"[^\s\S]"), "no output can match it"),
        (LLMatcher.grammar_from_regex("(?=a)b"), "look-ahead"),
        (LLMatcher.grammar_from_json_schema('{"enum":[]}'), "Unsatisfiable"),
        (LLMatcher.grammar_from_json_schema('{"not":{}}'), "Unimplemented"),
        ("start: start", "no output can match it"),
        ('start: "' + "x" * (64 << 10) + '"', "at most 65536"),
        ("start: <|im_end|>", "im_end"),
    ],
)
async def test_what_cannot_be_kept_is_refused_with_the_reason(grammars: Grammars, text: str, reason: str) -> None:
    """And a good one before or after it is none the worse (R087)."""
    for _ in range(2):
        with pytest.raises(GrammarRefused, match=reason):
            await grammars.compiled(text, EOS)
        await grammars.compiled('start: "a"', EOS)


async def test_the_longest_chain_of_rules_does_not_exhaust_the_stack(grammars: Grammars) -> None:
    text = chain(module.MAX_GRAMMAR_BYTES)
    assert len(text) > module.MAX_GRAMMAR_BYTES - 30
    compiled = await grammars.compiled(text, EOS)
    matcher = compiled.matcher.deep_copy()
    assert matcher.consume_token(id_of("x")) and matcher.is_accepting()


async def test_text_that_looks_like_an_added_token_is_spelled() -> None:
    """The library takes `<tool_call>` for no text: it must neither offer that token for the text nor fail over it."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    token_id = tokenizer.token_to_id("<tool_call>") or 0
    own = Grammars(tokenizer.to_str, tokenizer.get_vocab_size())
    spelled = byte_level_tokenizer().encode("<tool_call>x").ids
    for grammar in ('start: "<tool_call>x"', "start: /[^ ]*/"):
        matcher = (await own.compiled(grammar, EOS)).matcher.deep_copy()
        assert not is_allowed(matcher.compute_bitmask(), token_id)
        for one in spelled:
            assert is_allowed(matcher.compute_bitmask(), one)
            assert matcher.consume_token(one)
        assert matcher.is_accepting()
    matcher = (await own.compiled(f'start: <[{token_id}]> "x"', EOS)).matcher.deep_copy()
    assert is_allowed(matcher.compute_bitmask(), token_id) and matcher.consume_token(token_id)
    own.close()


def is_allowed(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


async def test_one_job_too_many_is_refused_at_once(grammars: Grammars) -> None:
    go = threading.Event()
    jobs = [asyncio.create_task(grammars.run(lambda: go.wait(30))) for _ in range(module.MAX_JOBS)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await grammars.compiled('start: "a"', EOS)
    go.set()
    assert all(await asyncio.gather(*jobs))
    await grammars.compiled('start: "a"', EOS)


async def test_threads_started_later_have_an_ordinary_stack(grammars: Grammars) -> None:
    await grammars.compiled('start: "a"', EOS)
    assert threading.stack_size() == 0
