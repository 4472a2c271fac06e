"""Constraints are compiled in a process that may be lost: it is replaced, and one request pays (R086, R087)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.constraint import OutputConstraint, constraint_of
from router.grammar_checker import GrammarChecker
from tests.support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
ENDLESS = {"type": "integer", "exclusiveMinimum": -1, "maximum": 9007199254740991, "multipleOf": 2147483648}
"""The library compiles it for hours."""


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    one = GrammarChecker(TOKENIZER.to_str, TOKENIZER.get_vocab_size(), eos_token_ids=(2,), named_ids={}, cpu_s=2)
    yield one
    one.close()


def schema(value: object) -> OutputConstraint:
    constraint = constraint_of(pb.GenerateRequest(json_schema=json.dumps(value)))
    assert constraint is not None
    return constraint


async def test_what_can_be_kept_becomes_a_grammar_and_is_kept(checker: GrammarChecker) -> None:
    first = await checker.checked(schema({"type": "integer"}))
    assert '"type": "integer"' in first
    child = checker._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)  # nobody is asked again
    assert await checker.checked(schema({"type": "integer"})) == first
    assert await checker.checked(None) == ""


async def test_what_is_refused_is_refused_by_its_field_and_reason(checker: GrammarChecker) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="no output can match") as caught:
            await checker.checked(OutputConstraint("regex", "[^\\x00-\\U0010ffff]"))
        assert caught.value.field == "regex"
        assert caught.value.message.count("regex: ") == 1


async def test_endless_work_ends_and_costs_that_request_alone(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidArgument, match="too much work"):
        await checker.checked(schema(ENDLESS))
    assert "boolean" in await checker.checked(schema({"type": "boolean"}))
    with pytest.raises(InvalidArgument, match="too much work"):  # told without another try
        await asyncio.wait_for(checker.checked(schema(ENDLESS)), timeout=1.0)


@pytest.mark.parametrize("kill", [signal.SIGSEGV, signal.SIGKILL])
async def test_a_child_that_was_lost_is_replaced(checker: GrammarChecker, kill: signal.Signals) -> None:
    await checker.checked(schema({"type": "boolean"}))
    assert checker._child is not None
    checker._child.send_signal(kill)
    assert "null" in await checker.checked(schema({"type": "null"}))


async def test_a_crash_of_the_library_is_no_crash_of_ours(checker: GrammarChecker) -> None:
    """As it came in, past the checks of numbers."""
    with pytest.raises(InvalidArgument, match="the library that compiles it fails"):
        await checker.checked(OutputConstraint("json_schema", '{"type":"integer","minimum":-1e20,"maximum":-1e19}'))
    assert "null" in await checker.checked(schema({"type": "null"}))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "integer", "minimum": -1e20, "maximum": -1e19},
        {"const": 9007199254740993},
        {"enum": [1, {"a": [2**60]}]},
        {"properties": {"id": {"maximum": 18446744073709551616}}},
    ],
)
def test_numbers_that_would_be_rounded_are_refused(value: object) -> None:
    for message in (
        pb.GenerateRequest(json_schema=json.dumps(value)),
        pb.GenerateRequest(grammar=f"start: %json {json.dumps(value)}"),
        pb.GenerateRequest(
            structural_tag=json.dumps(
                {"structures": [{"begin": "<a>", "schema": value, "end": "</a>"}], "triggers": ["<a>"]}
            )
        ),
    ):
        with pytest.raises(InvalidArgument, match="cannot be kept exactly"):
            constraint_of(message)


def test_numbers_that_constrain_nothing_may_be_large() -> None:
    constraint_of(pb.GenerateRequest(json_schema=json.dumps({"type": "integer", "default": 2**60, "maximum": 2**53})))
