"""From the constraint of a request to the grammar of its workers, or to a refusal with field and reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tokenizers import AddedToken

from kvferry.errors import InvalidArgument
from kvferry.grammar import Grammars
from proto.kvferry.v1 import inference_pb2 as pb
from router.constraint import checked_grammar, constraint_of
from tests.support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = (2, 0)
PERSON = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}},"required":["b"]}'


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[Grammars]:
    one = Grammars(TOKENIZER.to_str, TOKENIZER.get_vocab_size())
    yield one
    one.close()


TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": json.loads(PERSON), "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "integer"}, "end": " "},
            {"begin": "[f]", "schema": True, "end": "z"},
        ],
        "triggers": ["<f=", "[f]"],
    }
)


def tag(**changed: object) -> dict[str, object]:
    """A structural tag with something changed."""
    one = {"begin": "a", "schema": {}, "end": "b"}
    return {"structural_tag": json.dumps({"structures": [one], "triggers": ["a"], **changed})}


async def matches(grammars: Grammars, message: pb.GenerateRequest, text: str) -> bool:
    """Whether an output of exactly this text would be taken."""
    grammar = await checked_grammar(constraint_of(message), grammars, EOS)
    matcher = (await grammars.compiled(grammar, EOS)).matcher.deep_copy()
    token_ids = TOKENIZER.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"json_schema": PERSON},
            ['{"b":"x"}', '{ "b" : "x",\n  "a": -7 }', '{"b": "\\n é"}'],
            [
                "{}",
                '{"a":1,"b":"x"}',
                '{"b":1}',
                ' {"b":"x"}',
                '{"b":"x"} ',
                '{  "b":"x"}',
                '{\n\n\n"b":"x"}',
                "{\n" + 9 * " " + '"b":"x"}',
            ],
        ),
        ({"json_schema": "{}"}, ["1", "[]", '{"a":[null,true]}'], ["", "tru"]),
        ({"json_schema": "true"}, ['"x"'], ["x"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": "c"}]}'], ["[]", "1", '{"a"}']),
        ({"regex": "a/b|c\\nd"}, ["a/b", "c\nd"], ["a", "xa/b", "a/bx"]),
        (
            {"choice": {"choices": ["yes", 'a"\\b\n', "日本 👩‍👩‍👧", "", "/x/", "\u0000"]}},
            ["yes", 'a"\\b\n', "日本 👩‍👩‍👧", "", "/x/", "\u0000"],
            ["ye", "x", "yesyes", "no"],
        ),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a", "bb"]),
        ({"grammar": 'root ::= "a" root | [0-9]+'}, ["a12", "7"], ["a", "x"]),
        (
            {"structural_tag": TAG},
            ["", "a é <f", '<f=a>{"b":"x"}</f>', 'x <f=a>{ "b": "x" }</f> y <f=b>1 <f=b>2 <g', "[f]truez[f]0z"],
            ["<f=", "<f=c>", '<f=a>{"b":1}</f>', '<f=a>{"b":"x"}</f', "x <f=b>[] ", "[f]z", "[f] 0z"],
        ),
    ],
)
async def test_every_kind_means_what_it_says(
    grammars: Grammars, fields: dict[str, object], right: list[str], wrong: list[str]
) -> None:
    message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    for text in right:
        assert await matches(grammars, message, text), text
    for text in wrong:
        assert not await matches(grammars, message, text), text


@pytest.mark.parametrize("indent", [None, 0, 2, 4, "\t", 16, " \n"])
async def test_json_may_be_written_as_models_do_or_in_one_way_alone(
    grammars: Grammars, indent: int | str | None
) -> None:
    """White space between two parts is a space or an indented line: no model can spend its tokens on more."""
    value = {"b": "x y", "a": 1, "c": [1, {"d": [True, "  "]}]}
    text = json.dumps(value, indent=indent)
    is_right = indent not in (4, 16, " \n")  # of 4 the third level is indented too far
    kinds: tuple[tuple[dict[str, object], tuple[str, str]], ...] = (
        ({"json_schema": "{}"}, ("", "")),
        (tag(), ("a", "b")),
    )
    for fields, (begin, end) in kinds:
        whole = begin + text + end
        compact = begin + json.dumps(value, separators=(",", ":")) + end
        message = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
        assert await matches(grammars, message, whole) is is_right
        assert await matches(grammars, message, compact)
        message.compact_json = True
        assert not await matches(grammars, message, whole)
        assert await matches(grammars, message, compact)


async def test_the_default_of_compact_json_yields_to_the_request(grammars: Grammars) -> None:
    message = pb.GenerateRequest(json_schema=PERSON)
    unset = constraint_of(message, compact_json=True)
    message.compact_json = False
    said = constraint_of(message, compact_json=True)
    assert unset is not None and said is not None and (unset.is_compact, said.is_compact) == (True, False)
    for fields in (
        {},
        {"regex": "a"},
        {"choice": {"choices": ["a"]}},
        {"grammar": 'start: "a"'},
        {"json_object": False},
    ):
        message = pb.GenerateRequest(compact_json=True, **fields)
        with pytest.raises(InvalidArgument, match="compact_json: is only for json_schema, json_object, structural_tag"):
            constraint_of(message)
        message.compact_json = False
        constraint = constraint_of(message, compact_json=True)
        assert constraint is None or not constraint.is_compact


BAD: list[tuple[dict[str, object], str]] = [
    ({"json_schema": ""}, "json_schema: is empty"),
    ({"json_schema": "{"}, "json_schema: is not JSON"),
    ({"json_schema": '{"a":' * 5000}, "json_schema: is not JSON"),
    ({"json_schema": '{"maximum":1e999}'}, "json_schema: is not JSON"),
    ({"json_schema": "[1]"}, "json_schema: must be an object, got a list"),
    ({"json_schema": "false"}, "json_schema: is false"),
    ({"json_schema": '{"x-guidance":{"lenient":true}}'}, "json_schema: has x-guidance"),
    ({"json_schema": '{"not":{"type":"string"}}'}, "json_schema: Unimplemented keys"),
    ({"json_schema": '{"oneOf":[{"type":"string"},{"maxLength":3}]}'}, "json_schema: oneOf"),
    ({"json_schema": '{"minimum":5,"maximum":3,"type":"integer"}'}, "json_schema: Unsatisfiable schema"),
    ({"json_schema": '{"$ref":"http://127.0.0.1:1/x"}'}, "json_schema: Resource"),
    ({"json_schema": '{"enum":["\\ud800"]}'}, "json_schema: "),
    ({"json_schema": json.dumps({"const": "x" * (64 << 10)})}, "json_schema: has 65549 bytes; at most 65536"),
    ({"regex": ""}, "regex: is empty"),
    ({"regex": "("}, "regex: .*unclosed group"),
    ({"regex": r"[^\s\S]"}, "regex: no output can match it"),
    ({"regex": '"' * (60 << 10)}, "regex: has .* bytes as a grammar; at most 65536"),
    ({"choice": {}}, "choice: has no strings"),
    ({"choice": {"choices": [str(number) for number in range(1025)]}}, "choice: has 1025 strings; at most 1024"),
    ({"structural_tag": ""}, "structural_tag: is empty"),
    ({"structural_tag": "{"}, "structural_tag: is not JSON"),
    ({"structural_tag": "[]"}, "structural_tag: must be an object, got a list"),
    ({"structural_tag": '{"type":"structural_tag","format":{}}'}, "structural_tag.format: not supported"),
    (tag(type="x"), "structural_tag.type: must be structural_tag"),
    (tag(triggers=[]), "structural_tag.triggers: must be a list of 1 to 128 texts"),
    (tag(triggers=["a", ""]), "structural_tag.triggers: must be a list of 1 to 128 texts"),
    (tag(structures=[]), "structural_tag.structures: must be a list of 1 to 128"),
    (tag(structures=[{"begin": "a", "end": "b"}]), r"structural_tag.structures\[0\]: must be an object with begin"),
    (tag(triggers=["x"]), r"structural_tag.structures\[0\].begin: must be a text that starts with one of the triggers"),
    (tag(structures=[{"begin": "a", "schema": {}, "end": 1}]), r"structural_tag.structures\[0\].end: must be a text"),
    (
        tag(structures=[{"begin": "a", "schema": 1, "end": ""}]),
        r"structural_tag.structures\[0\].schema: must be an obj",
    ),
    (
        tag(structures=[{"begin": "a", "schema": {"x-guidance": {}}, "end": ""}]),
        r"structural_tag.structures\[0\].schema: has x-guidance",
    ),
    (tag(structures=[{"begin": "a", "schema": {"not": {}}, "end": ""}]), "structural_tag: .*Unimplemented keys"),
    (tag(structures=[{"begin": "a" * (65 << 10), "schema": {}, "end": ""}]), "structural_tag: has .* bytes"),
    ({"grammar": "nonsense"}, "grammar: Failed to convert"),
    ({"grammar": "root ::= " + "(" * 5000}, "grammar: Failed to convert"),
    ({"grammar": "start: start"}, "grammar: no output can match it"),
    ({"grammar": 'start: "a" <|im_end|>'}, "grammar: .*im_end"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD)
async def test_what_cannot_be_kept_is_refused_by_field_and_reason(
    grammars: Grammars, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){reason}"):
        await checked_grammar(constraint_of(pb.GenerateRequest(**fields)), grammars, EOS)  # type: ignore[arg-type]


async def test_a_trigger_that_is_a_token_may_be_that_token() -> None:
    """Added tokens that look like `<f>` are no text to the library, so free text is without them (R136)."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<f>", special=False, normalized=False)])
    token_id = tokenizer.token_to_id("<f>") or 0
    grammars = Grammars(tokenizer.to_str, tokenizer.get_vocab_size())
    wanted = tag(structures=[{"begin": "<f>[", "schema": {"type": "integer"}, "end": "]<f>"}], triggers=["<f>"])
    constraint = constraint_of(pb.GenerateRequest(**wanted))  # type: ignore[arg-type]
    grammar = await checked_grammar(constraint, grammars, EOS, {"<f>": token_id})
    matcher = (await grammars.compiled(grammar, EOS)).matcher
    before, after, spelled = (TOKENIZER.encode(text).ids for text in ("a ", "[7]", "<f>[7]"))
    for ids in ([*before, token_id, *after, token_id, *before], [*before, *spelled, token_id]):
        reader = matcher.deep_copy()
        assert reader.try_consume_tokens(ids) == len(ids) and reader.is_accepting()
    for ids in ([token_id, *before], [token_id, token_id]):
        assert matcher.deep_copy().try_consume_tokens(ids) == 1
    grammars.close()


async def test_a_model_without_an_end_cannot_keep_one(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match=r"regex: .*no end-of-sequence id"):
        await checked_grammar(constraint_of(pb.GenerateRequest(regex="a")), grammars, ())
    assert await checked_grammar(constraint_of(pb.GenerateRequest()), grammars, ()) == ""
