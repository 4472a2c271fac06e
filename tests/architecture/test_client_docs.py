"""docs/client.md names every method, field and error of the Python client, as it is, and no other."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from google.protobuf.message import Message

import kvferry
from kvferry import errors
from kvferry.client import AsyncClient, Choice, Completion
from kvferry.client_chat import ChatMessage, Tool, ToolCall
from kvferry.client_options import GenerateOptions, PinOptions
from kvferry.sync_client import Client
from tests.architecture.source_tree import ROOT

CODE = re.compile(r"`([^`]+)`")
MESSAGES = [ChatMessage("user", "Hi")]
SAMPLES: dict[str, Any] = {
    "int": 1,
    "float": 0.5,
    "bool": True,
    "str": "a",
    "Sequence[int]": [1],
    "Sequence[str]": ["a"],
    "Mapping[int, float]": {1: 0.5},
    "Sequence[Tool | Mapping[str, Any]]": [Tool("f")],
}


def rows_of(heading: str) -> list[tuple[str, ...]]:
    """Cells of the table below it, without its head."""
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    (part,) = (part for part in re.split(r"^## ", text, flags=re.M) if part.startswith(heading + "\n"))
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def set_paths(message: Message) -> set[str]:
    """The fields that are set, those of messages below with theirs; lists and what has no fields are leaves."""
    found = set()
    for field, value in message.ListFields():
        below = set_paths(value) if isinstance(value, Message) and field.name != "token_ids" else set()
        found |= {f"{field.name}.{path}" for path in below} or {field.name}
    return found


CHAT_ONLY = ("tools", "template_arguments")


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "needed" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


@pytest.mark.parametrize("kind", [GenerateOptions, PinOptions])
def test_every_option_is_told_with_type_default_and_the_field_that_it_sets(kind: type[Any]) -> None:
    rows = rows_of(f"`{kind.__name__}`")
    fields = dataclasses.fields(kind)
    told = [(*CODE.findall(row[0]), row[1], row[2]) for row in rows]
    assert told == [(one.name, str(one.type).replace(" | ", " or "), default_of(one)) for one in fields]
    needed: dict[str, Any] = {"prompt": "x", **({} if kind is GenerateOptions else {"name": "n"})}
    for field, row in zip(fields, rows, strict=True):
        if field.name in needed:
            continue
        sample = SAMPLES[str(field.type).partition(" |")[0] if "Sequence" not in str(field.type) else _list(field)]
        base = {**needed, "prompt": MESSAGES if field.name in CHAT_ONLY else "x"}
        plain, request = kind(**base).to_pb(), kind(**base, **{field.name: sample}).to_pb()
        added = set_paths(request) - set_paths(plain)
        assert added == set(CODE.findall(row[3])), field.name
    (row,) = (row for row in rows if row[0] == "`prompt`")
    prompts: list[Any] = ["x", [1], MESSAGES]
    set_by_prompt = [kind(**{**needed, "prompt": prompt}).to_pb().WhichOneof("prompt") for prompt in prompts]
    assert CODE.findall(row[3]) == set_by_prompt


def _list(field: dataclasses.Field[Any]) -> str:
    kind = str(field.type).removesuffix(" | None").removeprefix("str | ")
    return kind if kind in SAMPLES else "str"


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("`ChatMessage`, `Tool`, `ToolCall`", (ChatMessage, Tool, ToolCall)),
        ("`Completion`, `Choice`", (Completion, Choice)),
    ],
)
def test_every_field_of_the_other_values_is_told(heading: str, kinds: tuple[type[Any], ...]) -> None:
    told = [(CODE.findall(row[0])[0], CODE.findall(row[1])[0]) for row in rows_of(heading)]
    assert told == [(field.name, kind.__name__) for kind in kinds for field in dataclasses.fields(kind)]


def test_every_method_is_told_with_its_arguments_and_both_clients_have_it() -> None:
    told: dict[str, list[str]] = {}
    for row in rows_of("Methods"):
        name, _, arguments = CODE.findall(row[0])[0].rstrip(")").partition("(")
        told[name] = [part for part in arguments.split(", ") if part]
    for kind in (AsyncClient, Client):
        methods = {name: member for name, member in vars(kind).items() if name[0] != "_" and callable(member)}
        assert sorted(methods) == sorted(told)
        for name, member in methods.items():
            parameters = list(inspect.signature(member).parameters.values())[1:]
            assert [_shown(one) for one in parameters] == told[name], name


def _shown(parameter: inspect.Parameter) -> str:
    match parameter.kind:
        case inspect.Parameter.VAR_KEYWORD:
            return "…"
        case inspect.Parameter.VAR_POSITIONAL:
            return f"*{parameter.name}"
    return parameter.name


def test_every_error_is_told() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvferryError)]
    assert ["KvferryError", *(CODE.findall(row[0])[0] for row in rows_of("Errors"))] == [
        kind.__name__ for kind in kinds
    ]


def test_the_package_shows_its_names_without_loading_them() -> None:
    assert set(kvferry.__all__) <= set(dir(kvferry))
