"""Masks of grammars against a plain truth, and the other rules beside them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine.constraint import Constraint, Constraints, OutputRefused
from engine.forward_batch import SampleRequest
from engine.sampler import sample_rows
from engine.sequence import Sequence
from kvferry.grammar import Grammars
from kvferry.sampling import LogitRules, SamplingParams
from tests.support.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, write_model_folder

TOKENIZER = byte_level_tokenizer()


def id_of(text: str) -> int:
    token_id = TOKENIZER.token_to_id(text)
    assert token_id is not None
    return token_id


VOCAB = TOKENIZER.get_vocab_size() + 30
"""The model's; the last ids have no text."""
EOS = (2, 0)
TEXTS = [TOKENIZER.decode([token_id]) for token_id in range(TOKENIZER.get_vocab_size())]
PROMPT = [5, 6, 7]


def constraint(grammar: str) -> Constraint:
    async def open_constraint() -> Constraint:
        grammars = Grammars(TOKENIZER.to_str, VOCAB)
        try:
            return Constraint(await grammars.compiled(grammar, EOS))
        finally:
            grammars.close()

    return asyncio.run(open_constraint())


def words(*texts: str) -> Constraint:
    return constraint("start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in texts))


def request(
    one: Constraint, output: list[int], *, rules: LogitRules | None = None, num_choices: int = 1, **sampling: object
) -> SampleRequest:
    values = {"max_tokens": 500, "temperature": 1.0, "eos_token_ids": EOS, "rules": rules or LogitRules(), **sampling}
    params = SamplingParams(**values)  # type: ignore[arg-type]
    token_ids = [*PROMPT, *output]
    return SampleRequest(
        params, len(token_ids), len(output), num_choices=num_choices, token_ids=token_ids, constraint=one
    )


def walk(one: Constraint, seed: int, **options: object) -> list[int]:
    """Tokens of a model that likes all equally, up to the end."""
    output: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while not output or output[-1] not in EOS:
        (sampled,) = sample_rows(torch.randn(1, VOCAB, generator=generator), [request(one, output, **options)])  # type: ignore[arg-type]
        assert sampled.token_id is not None, sampled.error
        output.append(sampled.token_id)
    return output


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("ab the", min_size=1, max_size=7), min_size=1, max_size=6), st.integers(0, 1000))
def test_a_closed_set_allows_its_beginnings_and_ends_at_its_members(texts: list[str], seed: int) -> None:
    one, output, rng = words(*texts), list[int](), random.Random(seed)
    for _ in range(10):
        so_far = TOKENIZER.decode(output)
        allowed = np.flatnonzero(one.allowed(output, VOCAB)).tolist()
        going_on = [token_id for token_id in allowed if token_id not in EOS]
        assert all(
            TEXTS[token_id] and any(text.startswith(so_far + TEXTS[token_id]) for text in texts)
            for token_id in going_on
        )
        assert one.is_complete == (so_far in texts)
        assert bool(going_on) == any(text.startswith(so_far) and text != so_far for text in texts)
        if not going_on:
            break
        output.append(rng.choice(going_on))
    assert TOKENIZER.decode(output) in texts


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-c]{1,5}(x|yz)?",
        r"(\+49 )?[0-9]{3,6}",
        r"(yes|no), (the|hello) [a-z]{2,9}!",
        r"(ab|a)*c?",
        r"\{\"[a-z]+\": -?[1-9][0-9]{0,4}\}",
        "[日本語שלום]{1,6}",
    ],
)
def test_every_output_matches_the_whole_pattern(pattern: str) -> None:
    one = constraint(LLMatcher.grammar_from_regex(pattern))
    for seed in range(8):
        output = walk(one.fork(), seed)
        assert output[-1] in EOS
        assert re.fullmatch(pattern, TOKENIZER.decode(output[:-1])), output


def test_byte_fallback_tokens_make_whole_characters() -> None:
    tokenizer = byte_fallback_tokenizer(legacy=False)
    grammars = Grammars(tokenizer.to_str, tokenizer.get_vocab_size())
    grammar = LLMatcher.grammar_from_regex("日 ?本")
    one = Constraint(asyncio.run(grammars.compiled(grammar, (2,))))
    grammars.close()
    output: list[int] = []
    while not one.is_complete:
        output.append(int(np.flatnonzero(one.allowed(output, tokenizer.get_vocab_size()))[-1]))
        one.allowed(output, tokenizer.get_vocab_size())
    assert tokenizer.decode(output) in ("日本", "日 本")
    assert "<0xE6>" in [tokenizer.id_to_token(token_id) for token_id in output]


def test_text_of_a_special_token_is_text_and_never_the_token() -> None:
    one = words("<|im_start|>x", "<|im_end|>")
    for seed in range(8):
        output = walk(one.fork(), seed)
        assert TOKENIZER.decode(output[:-1], skip_special_tokens=True) in ("<|im_start|>x", "<|im_end|>")


def test_forks_go_their_own_ways_and_a_new_constraint_catches_up() -> None:
    one = constraint(LLMatcher.grammar_from_regex("[ab]{6}"))
    a, b = id_of("a"), id_of("b")
    one.allowed([a], VOCAB)
    other = one.fork()
    assert one.allowed([a, b, b], VOCAB)[a] and other.allowed([a, a], VOCAB)[b]
    late = constraint(LLMatcher.grammar_from_regex("[ab]{6}"))
    assert (late.allowed([a, a, b], VOCAB) == other.allowed([a, a, b], VOCAB)).all()
    with pytest.raises(OutputRefused, match="the output so far does not match it"):
        late.allowed([a, a, b, id_of("c")], VOCAB)


def test_a_forked_sequence_has_a_constraint_of_its_own() -> None:
    first = Sequence("s", PROMPT, SamplingParams(max_tokens=9), constraint=words("aa", "ab"))
    second = first.fork("s#1", 1)
    assert first.constraint is not None and second.constraint is not None
    a, b = id_of("a"), id_of("b")
    first.constraint.allowed([a, b], VOCAB)
    second.constraint.allowed([a, a], VOCAB)
    assert first.constraint.is_complete and second.constraint.is_complete


def test_several_choices_share_the_first_mask() -> None:
    rows = torch.zeros(1, VOCAB)
    (sampled,) = sample_rows(rows, [request(words("a", "b"), [], num_choices=30)])
    tokens = {sampled.token_id, *(one.token_id for one in sampled.others)}
    assert tokens == {id_of("a"), id_of("b")}


def test_ending_ids_come_where_the_output_is_complete_and_nowhere_else() -> None:
    a = id_of("a")
    one, row = constraint(LLMatcher.grammar_from_regex("a{2,3}")), torch.zeros(1, VOCAB)
    row[0, list(EOS)] = 50.0  # the model wants to end at once
    tokens: list[int] = []
    for _ in range(3):
        (sampled,) = sample_rows(row, [request(one, tokens, temperature=0.0, stop_token_ids=(a + 1,))])
        assert sampled.token_id is not None
        tokens.append(sampled.token_id)
    assert tokens == [a, a, 0]


def test_min_tokens_puts_off_an_end_but_not_the_only_one() -> None:
    a = id_of("a")
    row = torch.zeros(1, VOCAB)
    row[0, list(EOS)] = 50.0
    for output, wanted in (([a], a), ([a, a], a), ([a, a, a], 0)):
        one = constraint(LLMatcher.grammar_from_regex("a{1,3}"))
        (sampled,) = sample_rows(row, [request(one, output, temperature=0.0, min_tokens=10)])
        assert sampled.token_id == wanted


def test_other_rules_apply_within_the_grammar_and_a_complete_output_ends_all_the_same() -> None:
    a, b = id_of("a"), id_of("b")
    rules = LogitRules(allowed_token_ids=(b, 9), bias=((a, 90.0), (0, -100.0), (2, -100.0)), bad_words=((0,),))
    rows = torch.zeros(1, VOCAB)
    (first,) = sample_rows(rows, [request(words("a", "b"), [], rules=rules)])
    assert first.token_id == b
    (last,) = sample_rows(rows, [request(words("a", "b"), [b], rules=rules)])
    assert last.token_id in EOS


def test_a_row_without_a_token_or_with_a_foreign_output_fails_alone_and_for_good() -> None:
    free = SampleRequest(SamplingParams(max_tokens=5, temperature=0.0), 3, 0)
    stuck = request(words("a", "b"), [], rules=LogitRules(allowed_token_ids=(9,)))
    foreign = request(words("a", "b"), [id_of("x")])
    results = sample_rows(torch.zeros(3, VOCAB), [free, stuck, foreign])
    assert results[0].token_id == 0
    assert (results[1].error, results[1].is_final) == ("every token is banned at position 3", True)
    assert results[2].is_final and "the output so far does not match it" in (results[2].error or "")


async def test_a_worker_is_ready_for_grammars_before_it_serves(tmp_path: Path) -> None:
    """Its tokenizer was read and its table built for the ends that its router will name."""
    for ids, names in (([2, 0], ("generation_config.json", "config.json")), (2, ("config.json",))):
        folder = write_model_folder(tmp_path / str(ids), TOKENIZER, config={"eos_token_id": 1})
        for name in names:
            (folder / name).write_text(json.dumps({"eos_token_id": ids if name == names[0] else 1}))
        constraints = Constraints(folder, VOCAB)
        (folder / "tokenizer.json").unlink()
        ends = tuple(ids) if isinstance(ids, list) else (ids,)
        assert await constraints.open(SamplingParams(5, eos_token_ids=ends, grammar='start: "a"')) is not None
        constraints.close()
