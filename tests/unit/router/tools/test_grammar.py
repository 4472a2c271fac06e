"""Grammars of calls take what the format's parser reads, and nothing that it would not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken

from kvferry.grammar import Grammars
from router.text.chat_template import Tool
from router.tools.call_parser import CallParser, CallPiece
from router.tools.formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, ToolFormat
from router.tools.grammar import MAX_CALLS, required_calls, sure_calls
from tests.support.tokenizers import byte_level_tokenizer

EOS = (2, 0)
PLAIN = byte_level_tokenizer()
MARKED = byte_level_tokenizer()
MARKED.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")])
NAMED_IDS = {text: MARKED.token_to_id(text) or 0 for text in ("<tool_call>", "</tool_call>")}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
TOOLS = (Tool("add", "Adds.", SCHEMA), Tool("add_all", None, {"properties": {}}), Tool("now"))
FORMS = (*FORMATS.values(), HERMES.without_markers(), MISTRAL.without_markers())
RIGHT = [("add", '{"x":1}'), ("add", '{ "x": -7 }'), ("add_all", '{"any":[1]}'), ("now", "{}")]
WRONG = [
    ("add", "{}"),
    ("add", '{"x":"1"}'),
    ("add", '{"x":1,"y":1}'),
    ("now", '{"x":1}'),
    ("ad", '{"x":1}'),
    ("add_all", "[]"),
]


@pytest_asyncio.fixture(params=["spelled", "named"])
async def grammars(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Grammars, bool]]:
    is_named = request.param == "named"
    tokenizer = MARKED if is_named else PLAIN
    one = Grammars(tokenizer.to_str, tokenizer.get_vocab_size())
    yield one, is_named
    one.close()


def written(form: ToolFormat, calls: Sequence[tuple[str, str]]) -> str:
    texts = [f'{{"name": {json.dumps(name)}, "{form.arguments_key}": {arguments}}}' for name, arguments in calls]
    return form.opening + form.joint.join(texts) + form.closing


def read(form: ToolFormat, text: str) -> list[tuple[str | None, str]]:
    parser = CallParser(form, {tool.name for tool in TOOLS})
    return [(one.name, one.arguments) for one in [*parser.push(text), *parser.finish()] if isinstance(one, CallPiece)]


async def matches(grammars: tuple[Grammars, bool], grammar: str, text: str) -> bool:
    matcher = (await grammars[0].compiled(grammar, EOS)).matcher.deep_copy()
    token_ids = (MARKED if grammars[1] else PLAIN).encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMS)
async def test_required_calls_are_right_and_nothing_else(grammars: tuple[Grammars, bool], form: ToolFormat) -> None:
    ids = NAMED_IDS if grammars[1] else {}
    grammar = required_calls(form, TOOLS, ids)
    for calls in ([RIGHT[0]], RIGHT, RIGHT[1:2] * MAX_CALLS):
        assert await matches(grammars, grammar, written(form, calls))
        assert read(form, written(form, calls)) == calls
    for call in WRONG:
        assert not await matches(grammars, grammar, written(form, [call])), call
    for text in ("", "so", written(form, RIGHT) + " ", written(form, RIGHT * MAX_CALLS)):
        assert not await matches(grammars, grammar, text)
    one = required_calls(form, TOOLS, ids, num_calls=1)
    assert await matches(grammars, one, written(form, RIGHT[:1]))
    assert not await matches(grammars, one, written(form, RIGHT[:2]))


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
async def test_sure_calls_leave_text_free(grammars: tuple[Grammars, bool], form: ToolFormat) -> None:
    ids = NAMED_IDS if grammars[1] else {}
    grammar = sure_calls(form, TOOLS, ids)
    one = sure_calls(form, TOOLS, ids, num_calls=1)
    for text in ("", "Free text, {[ <tool", written(form, RIGHT[:1])):
        assert await matches(grammars, grammar, text), text
        assert await matches(grammars, one, text), text
    assert await matches(grammars, grammar, written(form, RIGHT))
    assert not await matches(grammars, one, written(form, RIGHT))
    for call in WRONG:
        assert not await matches(grammars, grammar, written(form, [call])), call


async def test_text_may_stand_beside_marked_calls(grammars: tuple[Grammars, bool]) -> None:
    grammar = sure_calls(HERMES, TOOLS, NAMED_IDS if grammars[1] else {})
    call = written(HERMES, RIGHT[:1])
    assert await matches(grammars, grammar, f"Well: {call} and\n{call}.")
    assert not await matches(grammars, grammar, f"Well: {call} and <tool_call>.")


async def test_a_marker_that_is_a_token_is_asked_for_as_that_token() -> None:
    grammars = Grammars(MARKED.to_str, MARKED.get_vocab_size())
    compiled = await grammars.compiled(required_calls(HERMES, TOOLS, NAMED_IDS), EOS)
    assert compiled.matcher.deep_copy().consume_token(NAMED_IDS["<tool_call>"])
    assert not compiled.matcher.deep_copy().consume_token(MARKED.token_to_id("<") or 0)
    grammars.close()
