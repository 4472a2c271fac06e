"""What a model writes becomes content and calls, however its text is cut; nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tools.call_parser import MAX_SPACE, CallParser, CallPiece
from router.tools.formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, ToolFormat

NAMES = ("f", "get_weather", 'q"x')
BARE = tuple(form.without_markers() for form in (HERMES, MISTRAL))
FORMS = (*FORMATS.values(), *BARE)
IDS = [*FORMATS, "hermes_bare", "mistral_bare"]


@dataclass
class Told:
    """All pieces of an output, joined."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    num_pieces: int = 0

    def add(self, pieces: Sequence[str | CallPiece]) -> None:
        for piece in pieces:
            self.num_pieces += 1
            if isinstance(piece, str):
                self.content += piece
                continue
            if piece.name is not None:
                assert piece.index == len(self.calls)
                self.calls.append([piece.name, ""])
            assert piece.index == len(self.calls) - 1
            self.calls[-1][1] += piece.arguments

    def as_pair(self) -> tuple[str, list[list[str]]]:
        return self.content, self.calls


def told(form: ToolFormat, texts: Sequence[str], *, is_live: bool = False) -> Told:
    parser, result = CallParser(form, NAMES, is_live=is_live), Told()
    for text in texts:
        result.add(parser.push(text))
    result.add(parser.finish())
    assert result.num_pieces < 3 * len(texts) + 3
    return result


F = ["f", '{"a": 1}']
W = ["get_weather", '{"city": "São \\"Paulo\\" {}] </tool_call>", "n": [1, {"x": null}]}']
QUOTED = ['q"x', "{}"]

CASES: list[tuple[ToolFormat, str, str, list[list[str]]]] = [
    (HERMES, "just text\n ", "just text\n ", []),
    (HERMES, "", "", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    (HERMES, 'Let me see.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n ', "Let me see.", [F]),
    (
        HERMES,
        f'\n\n<tool_call>\n{{"name": "get_weather", "arguments": {W[1]}}}\n</tool_call>\n'
        '<tool_call> {"name":"f","arguments":{"a": 1}} </tool_call> done',
        "done",
        [W, F],
    ),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}, "id": "x"}', "", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', "", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool>', "</tool>", [F]),
    (HERMES, '<tool_call>{"name": "q\\"x", "arguments": {}}</tool_call>', "", [QUOTED]),
    (HERMES, '<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}', "<tool_call>", [F]),
    (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    (LLAMA3_JSON, ' {"name": "f", "parameters": {"a": 1}}\n', "", [F]),
    (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (
        LLAMA3_JSON,
        '{"name": "f", "parameters": {"a": 1}}; {"type":"function","name":"f","parameters":{"a": 1}}',
        "",
        [F, F],
    ),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 1}};\nnext', ";\nnext", [F]),
    (LLAMA3_JSON, 'so {"name": "f", "parameters": {"a": 1}}', 'so {"name": "f", "parameters": {"a": 1}}', []),
    (LLAMA3_JSON, 'so <|python_tag|> {"name": "f", "parameters": {"a": 1}}', "so", [F]),
    (LLAMA3_JSON, "<|python", "<|python", []),
    (
        LLAMA3_JSON,
        " " * (MAX_SPACE + 1) + '{"name": "f", "parameters": {}}',
        " " * (MAX_SPACE + 1) + '{"name": "f", "parameters": {}}',
        [],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        "",
        [F, F],
    ),
    (MISTRAL, 'Hm [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}] ok', "Hmok", [F]),
    (MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    (MISTRAL, "[TOOL_CALLS] f", "[TOOL_CALLS] f", []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}', "", [F]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, x]', ", x]", [F]),
    (BARE[0], '{"name": "f", "arguments": {"a": 1}}; {"name": "f", "arguments": {"a": 1}}', "", [F, F]),
    (BARE[1], '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]', "", [F, F]),
]
"""Format, output, content, calls."""

MALFORMED = [
    "{}",
    '{"name": "f"}',
    '{"name": "unknown", "arguments": {}}',
    '{"name": ["f"], "arguments": {}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": {"a": NaN}}',
    "{'name': 'f', 'arguments': {}}",
    '{"name": "f", "arguments": {"a": 1}',
    '{"name": "f", "arguments": {"a": "\n"}}',
    '{"name": "f" "arguments": {}}',
    '{"a":' * 3000 + "1" + "}" * 3000,
    '{"name": "f", "arguments": {"a": [}]}}',
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_an_output_is_content_and_calls(form: ToolFormat, text: str, content: str, calls: list[list[str]]) -> None:
    for pieces in ([text], list(text)):
        assert told(form, pieces).as_pair() == (content, calls)


@pytest.mark.parametrize("call", MALFORMED)
@pytest.mark.parametrize("form", list(FORMATS.values()), ids=list(FORMATS))
def test_a_malformed_call_is_content_to_the_letter(form: ToolFormat, call: str) -> None:
    before = form.begin + form.open
    for text in (before + call, f"a {before} {call}b", f"{before}\n{call}{form.close}\n"):
        assert told(form, [text]).as_pair() == (text, [])
        assert told(form, list(text)).as_pair() == (text, [])


WORDS = st.sampled_from(
    [
        *(form.begin for form in FORMATS.values()),
        *("</tool_call>", "<tool_", "</tool", "[", "]", "{", "}", ", ", ";", " ", "\n", " " * 40, "x", "é", "\\", '"'),
        *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": ', '{"name": "g", "arguments": {}}'),
        json.dumps({"name": "get_weather", "arguments": {"city": "</tool_call>{[TOOL_CALLS]\\"}}),
        json.dumps({"arguments": {"a": {}}, "name": "f"}),
    ]
)
OUTPUTS = st.lists(WORDS, max_size=12).map("".join)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(OUTPUTS)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=IDS)
@settings(max_examples=150, deadline=None)
@given(cut=cuts())
def test_every_cut_gives_the_same(form: ToolFormat, is_live: bool, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    whole = told(form, [text], is_live=is_live).as_pair()
    assert told(form, pieces, is_live=is_live).as_pair() == whole
    assert told(form, list(text), is_live=is_live).as_pair() == whole


def is_part(part: str, whole: str) -> bool:
    """Whether the letters come in this order, others left out."""
    letters = iter(whole)
    return all(letter in letters for letter in part)


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@settings(max_examples=150, deadline=None)
@given(text=OUTPUTS)
def test_no_text_is_lost_but_what_calls_are_made_of(form: ToolFormat, text: str) -> None:
    content, calls = told(form, [text]).as_pair()
    assert is_part(content, text)
    if not calls:
        assert content == text
    for name, arguments in calls:
        assert name in NAMES and isinstance(json.loads(arguments), dict) and arguments in text
    made = sum(len(name) + len(arguments) for name, arguments in calls)
    frame = '{"name": "", "arguments": }' + form.begin + form.close + form.open + form.separator
    num_space = sum(letter.isspace() for letter in text)
    assert len(text) - len(content) <= made + num_space + len(calls) * len(frame) * 2


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_sure_calls_are_told_as_they_come(form: ToolFormat) -> None:
    arguments = json.dumps({"city": "x" * 50, "deep": [{"a": 1}]})
    text = form.opening + f'{{"name": "f", "{form.arguments_key}": {arguments}}}'
    parser, live = CallParser(form, NAMES, is_live=True), Told()
    for letter in text[:-20]:
        live.add(parser.push(letter))
    assert (live.calls, parser.is_in_call, parser.num_calls) == ([["f", arguments[:-19]]], True, 0)
    live.add(parser.push(text[-20:] + form.closing))
    live.add(parser.finish())
    assert (live.as_pair(), parser.is_in_call, parser.num_calls) == (("", [["f", arguments]]), False, 1)
    assert told(form, [text[:-20]], is_live=True).as_pair() == ("", [["f", arguments[:-19]]])
    assert told(form, [text[:-20]]).as_pair() == (text[:-20], [])


def test_a_long_output_costs_no_more_a_letter() -> None:
    """No state grows with what was told: 300,000 letters that look like calls again and again."""
    text: Any = '<tool_call>{"a": "<tool_call>' * 10_000 + " " * 10_000
    assert told(HERMES, [text[i : i + 7] for i in range(0, len(text), 7)]).content == text


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_white_space_is_not_held_back_for_ever(form: ToolFormat) -> None:
    for before in ("", "a", form.begin, form.begin + form.open):
        parser, result = CallParser(form, NAMES), Told()
        result.add(parser.push(before + " " * 10 * MAX_SPACE))
        assert len(result.content) >= 9 * MAX_SPACE
