"""Structured output from the client to the workers and back (R086 … R090).

The tiny model has random weights: all that keeps its output in shape is the grammar.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import AsyncClient, Choice, GenerateOptions
from kvferry.config import Config
from kvferry.errors import FailedPrecondition, InvalidArgument
from kvferry.sampling import FinishKind
from kvferry.telemetry import start_telemetry
from router.app import RouterApp
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.models import EOS_TOKEN_ID, save_tiny_model
from tests.support.worker_processes import worker_process

TIMEOUT_S = 90.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 4},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = r"\+[0-9]{2} [0-9]{3,5}-(work|home|[a-z]{3})"
TEXTS = ("yes", "yesterday", "no", "日本語", "I cannot say.")
TAG = {"structures": [{"begin": "a", "schema": SCHEMA, "end": "."}], "triggers": ["a"]}
TAGGED: dict[str, Any] = {"json_schema": None, "regex": None, "choice": None, "structural_tag": json.dumps(TAG)}
TAGGED |= {"logit_bias": {ord("a") - ord("!"): 9.0}, "max_tokens": 90}
KINDS: tuple[dict[str, Any], ...] = ({"json_schema": json.dumps(SCHEMA)}, {"regex": PATTERN}, {"choice": TEXTS})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def config(folder: Path) -> Config:
    return deployment_config(folder, timeout_s=30.0, block_size=16, num_blocks=1024)


def satisfies(schema: dict[str, Any], value: Any) -> bool:
    """The keywords of `SCHEMA`, as their definition says."""
    if "enum" in schema:
        return any(value is one or (type(value) is type(one) and value == one) for one in schema["enum"])
    match schema["type"]:
        case "object":
            named = schema["properties"]
            keys_fit = isinstance(value, dict) and set(schema.get("required", ())) <= set(value) <= set(named)
            return keys_fit and all(satisfies(named[key], one) for key, one in value.items())
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(satisfies(schema["items"], one) for one in value)
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return isinstance(value, bool)


def is_right(kind: dict[str, Any], text: str) -> bool:
    if "json_schema" in kind:
        return satisfies(SCHEMA, json.loads(text))
    return re.fullmatch(PATTERN, text) is not None if "regex" in kind else text in TEXTS


def options(number: int, **changed: Any) -> GenerateOptions:
    kind = KINDS[number % 3]
    prompt = [(7 * number + 3 * place) % 250 for place in range(5 + 4 * number % 40)]
    values: dict[str, Any] = {"max_tokens": 600, "seed": number, "prompt": prompt, **kind, **changed}
    return GenerateOptions(**values)


async def choices_of(client: AsyncClient, numbers: range, **changed: Any) -> list[list[Choice]]:
    at_once = asyncio.Semaphore(16)

    async def one(number: int) -> list[Choice]:
        async with at_once:
            return (await client.complete(options(number, **changed), timeout_s=TIMEOUT_S)).choices

    return await asyncio.gather(*map(one, numbers))


def ids(answers: list[list[Choice]]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in choices] for choices in answers]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_requests", [45, pytest.param(100, marks=pytest.mark.sweep)])
async def test_every_output_is_right_and_the_same_split_and_in_one_process(config: Config, num_requests: int) -> None:
    answers = []
    for num_prefill in (1, 0):
        async with running_deployment(config, num_prefill=num_prefill) as deployment:
            answers.append(await choices_of(deployment.client, range(num_requests)))
            await deployment.assert_idle()
    for number, (choice,) in enumerate(answers[0]):
        assert choice.finish is not None and choice.finish.kind is FinishKind.END_OF_SEQUENCE
        assert is_right(KINDS[number % 3], choice.text), choice.text
    assert ids(answers[0]) == ids(answers[1])
    assert {choice.text for ((choice),) in answers[0][2::3]} == set(TEXTS)


async def test_each_of_three_choices_follows_its_own_output(config: Config) -> None:
    async with running_deployment(config) as deployment:
        answers = await choices_of(deployment.client, range(9), n=3)
        best = await choices_of(deployment.client, range(3), best_of=4)
        await deployment.assert_idle()
    for number, choices in enumerate([*answers, *best]):
        assert all(is_right(KINDS[number % 3], choice.text) for choice in choices)
    assert len({choice.text for choice in answers[0]}) == 3


async def test_greedy_and_cut_outputs_begin_rightly_and_are_no_error(config: Config) -> None:
    """What is complete exactly at max_tokens ends by length or by its end, and a token before by length (R090)."""
    async with running_deployment(config) as deployment:
        (whole,) = (await deployment.client.complete(options(1, temperature=0.0), timeout_s=TIMEOUT_S)).choices
        assert whole.token_ids[-1] == EOS_TOKEN_ID and is_right(KINDS[1], whole.text)
        for max_tokens in (1, 2, len(whole.token_ids) - 1, len(whole.token_ids)):
            wanted = options(1, temperature=0.0, max_tokens=max_tokens)
            (cut,) = (await deployment.client.complete(wanted, timeout_s=TIMEOUT_S)).choices
            assert cut.token_ids == whole.token_ids[:max_tokens]
            is_whole = max_tokens == len(whole.token_ids)
            assert cut.finish is not None
            assert cut.finish.kind is (FinishKind.END_OF_SEQUENCE if is_whole else FinishKind.LENGTH)


async def test_preempted_sequences_go_on_in_their_grammar(config: Config) -> None:
    quiet, small = config, config.replace("engine", num_blocks=24)
    answers = []
    for one in (quiet, small):
        async with running_deployment(one, num_prefill=0) as deployment:
            answers.append(await choices_of(deployment.client, range(0, 36, 3), max_tokens=300))
            (decode,) = deployment.decode
            num_preempted = decode.role.load().num_recompute_preemptions + decode.role.load().num_swap_preemptions
    assert num_preempted > 0
    assert ids(answers[0]) == ids(answers[1])


@pytest.mark.processes
@pytest.mark.timeout(400)
async def test_a_killed_decode_worker_changes_no_output(tmp_path: Path, config: Config) -> None:
    async with running_deployment(config) as deployment:
        quiet = await choices_of(deployment.client, range(6)) + await choices_of(deployment.client, range(2), **TAGGED)
    assert all("a{" in choice.text for (choice,) in quiet[6:])
    mortal = config.replace("faults", allow_faults=True, kill_decode_at_step=20)
    async with AsyncExitStack() as stack:
        prefill, killed, decode = [
            await stack.enter_async_context(worker_process(tmp_path, one, f"{role}_svc"))
            for role, one in (("prefill", config), ("decode", mortal), ("decode", config))
        ]
        addresses = {"prefill": [prefill.address], "decode": [killed.address, decode.address]}
        telemetry = start_telemetry(config.telemetry, "router", "router")
        stack.push_async_callback(telemetry.shutdown)
        router = await stack.enter_async_context(RouterApp(config.replace("router", **addresses), telemetry))
        assert await router.wait_ready(30.0), router.why_not_ready()
        client = await stack.enter_async_context(AsyncClient(router.address))
        answers, tagged = await asyncio.gather(choices_of(client, range(6)), choices_of(client, range(2), **TAGGED))
        assert await killed.exit_code() == -9
    assert ids(answers + tagged) == ids(quiet)


def nested(levels: int, key: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {key: [schema, {"type": "null"}]} if key == "anyOf" else {"type": "array", key: schema}
    return schema


def doubling(levels: int, combine: str) -> dict[str, Any]:
    defs = {str(level): {combine: [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(levels)}
    return {"$defs": {**defs, str(levels): {"type": "string", "maxLength": 3}}, "$ref": "#/$defs/0"}


def chained(levels: int) -> dict[str, Any]:
    defs = {str(level): {"items": {"$ref": f"#/$defs/{level + 1}"}} for level in range(levels)}
    return {"$defs": {**defs, str(levels): {"type": "null"}}, "$ref": "#/$defs/0"}


def hostile() -> list[dict[str, Any]]:
    """Schemas, patterns and grammars made to cost as much as they can."""
    schemas: list[dict[str, Any]] = [
        *(nested(levels) for levels in (20, 100, 120, 300)),
        *(nested(levels, "anyOf") for levels in (30, 60)),
        *(doubling(30, combine) for combine in ("anyOf", "allOf", "oneOf")),
        chained(1_500),
        {"allOf": [{"anyOf": [{"minLength": 9 * i + j, "type": "string"} for j in range(9)]} for i in range(9)]},
        {"$ref": "#"},
        {"type": "object", "properties": {str(number): {} for number in range(5_000)}},
        {"type": "object", "patternProperties": {f"^(.*{letter}){{9}}$": {} for letter in "abcdefgh"}},
        {"enum": [f"value {number}" for number in range(4_000)]},
        *({"type": "string", "pattern": pattern} for pattern in ("^(a|aa){1,900}b*c{500}$", "(x+x+)+y", "(.*a){60}")),
        {"allOf": [{"type": "string", "pattern": f"^(.*{letter}){{20}}"} for letter in "abc"]},
        *({"type": "array", name: 10**9, "items": {"type": "integer"}} for name in ("minItems", "maxItems")),
        *({"type": "string", name: 10**9} for name in ("minLength", "maxLength")),
        {"type": "integer", "multipleOf": 982_451_653},
        {"type": "number", "multipleOf": 1e-300},
        {"$ref": "file:///etc/passwd"},
    ]
    patterns = ["(a{1,1000}){1,1000}", "a{100000}", "a{1000000000}", "(.*a){60}", ".*a.{300}x", "(a|aa)*b", "(a*)*b"]
    patterns += ["(" * 4_000 + "a" + ")" * 4_000, "(" * 20 + "a" + "){1,10}" * 20, "a?" * 9_000 + "a" * 9_000]
    patterns += ["|".join(f"w{number}" for number in range(8_000)), r"[\p{L}\p{N}]{1,900}[^\p{Lu}]{5,900}", "(?=a)b"]
    grammars = [
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4_000)) + '\nr4000: "a"',
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"',
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"',
        'start: start start | start start start | "a" | ""',
        "start: " + "a? " * 9_000 + '\na: "x"',
        "start: "
        + " ".join(f"(a{i}|b)*" for i in range(900))
        + "\n"
        + "\n".join(f'a{i}:"x"b' for i in range(900))
        + '\nb: "x"',
        'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"',
        "start: T\nT: " + " & ".join(f"/(.*{letter}){{10}}/" for letter in "abcdefghijklmnop"),
        "start: T\nT: ~/(.*a){30}/",
        "root ::= " + "(" * 9_000,
    ]
    return [
        *({"json_schema": json.dumps(schema)} for schema in schemas),
        {"json_schema": '{"items":' * 5_000 + "{}" + "}" * 5_000},
        *({"regex": pattern} for pattern in patterns),
        *({"grammar": grammar} for grammar in grammars),
    ]


async def attacked(config: Config, fields: Sequence[dict[str, Any]]) -> Counter[str]:
    """Sends each by itself, in company of requests whose output must not change; how often each end came."""
    ends = Counter[str]()

    async def attack(client: AsyncClient) -> None:
        for number, one in enumerate(fields):
            changed = {"json_schema": None, "regex": None, "choice": None, "max_tokens": 20, **one}
            try:
                await client.complete(options(number, **changed), timeout_s=TIMEOUT_S)
                ends["served"] += 1
            except (InvalidArgument, FailedPrecondition) as error:
                ends[type(error).__name__] += 1

    async with running_deployment(config) as deployment:
        quiet = await choices_of(deployment.client, range(9))
        attacking = asyncio.create_task(attack(deployment.client))
        while not attacking.done():
            assert ids(await choices_of(deployment.client, range(9))) == ids(quiet)
        await attacking
        await deployment.assert_idle()
    return ends


async def test_a_sample_of_hostile_constraints_fails_or_serves_and_leaves_others_alone(config: Config) -> None:
    """Of each kind one that is cheap: the bounds are the same (R086)."""
    fields = hostile()
    sample = [fields[number] for number in range(2, len(fields), 9)]
    sample += [{"regex": pattern} for pattern in ("a{100000}", "(.*a){60}", "(?=a)b")]
    ends = await attacked(config, sample)
    assert ends["served"] >= 2 and ends["InvalidArgument"] >= 2


@pytest.mark.sweep
@pytest.mark.timeout(900)
async def test_hostile_constraints_fail_or_serve_and_leave_others_alone(config: Config) -> None:
    fields = hostile()
    assert len(fields) >= 50
    ends = await attacked(config, fields)
    assert ends["served"] >= 10 and ends["InvalidArgument"] >= 10


async def test_each_constraint_is_judged_on_its_own(config: Config) -> None:
    """Bad behind good, good behind bad, twenty times, of all kinds; a megabyte of schema (R086, R087)."""
    bad: list[dict[str, Any]] = [
        {"json_schema": '{"type": "strin'},
        {"json_schema": '{"type": "nothing"}'},
        {"json_schema": '{"not": {"type": "string"}}'},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "root ::= ("},
        {"grammar": "start: missing"},
        {"choice": ("",) * 2_000},
        {"json_schema": json.dumps({"enum": ["x" * (1 << 20)]})},
    ]
    free = {"json_schema": None, "regex": None, "choice": None}
    async with running_deployment(config) as deployment:
        quiet = await choices_of(deployment.client, range(3))
        for number in range(20):
            wrong = bad[number % len(bad)]
            (field,) = wrong
            with pytest.raises(InvalidArgument) as caught:
                await deployment.client.complete(options(number, **{**free, **wrong}), timeout_s=TIMEOUT_S)
            assert str(caught.value.field).startswith(field)
            good = number % 3
            assert ids(await choices_of(deployment.client, range(good, good + 1))) == ids(quiet[good : good + 1])
        await deployment.assert_idle()


UNBOUNDED: dict[str, dict[str, Any]] = {
    "empty": {"json_schema": "{}"},
    "true": {"json_schema": "true"},
    "number": {"json_schema": '{"type": "number"}'},
    "array": {"json_schema": '{"type": "array", "items": {"type": "integer"}}'},
    "object": {"json_object": True},
}


@pytest.mark.parametrize("name", UNBOUNDED)
async def test_what_nothing_bounds_ends_at_max_tokens(config: Config, name: str) -> None:
    """By itself or by length, never by an error; a text that ended by itself is whole (R088)."""
    free = {"json_schema": None, "regex": None, "choice": None}
    async with running_deployment(config) as deployment:
        for number in range(12):
            wanted = options(number, **{**free, **UNBOUNDED[name], "max_tokens": 1 + 3 * number})
            (choice,) = (await deployment.client.complete(wanted, timeout_s=TIMEOUT_S)).choices
            assert choice.finish is not None
            if choice.finish.kind is FinishKind.END_OF_SEQUENCE:
                json.loads(choice.text)
            else:
                assert choice.finish.kind is FinishKind.LENGTH and len(choice.token_ids) == 1 + 3 * number
        await deployment.assert_idle()


async def test_the_first_token_of_json_mode_comes_from_prefill_and_opens_an_object(config: Config) -> None:
    """A hundred prompts over two workers; whatever ends by itself is an object (R089)."""
    free = {"json_schema": None, "regex": None, "choice": None}
    async with running_deployment(config) as deployment:
        at_once = asyncio.Semaphore(16)

        async def one(number: int) -> Choice:
            async with at_once:
                wanted = options(number, **{**free, "json_object": True, "max_tokens": 1 + number % 40})
                return (await deployment.client.complete(wanted, timeout_s=TIMEOUT_S)).choices[0]

        choices = await asyncio.gather(*map(one, range(100)))
        await deployment.assert_idle()
    assert {choice.text[:1] for choice in choices} == {"{"}
    ended = [choice for choice in choices if choice.finish and choice.finish.kind is FinishKind.END_OF_SEQUENCE]
    assert ended and all(isinstance(json.loads(choice.text), dict) for choice in ended)


@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_a_document_may_end_with_either_of_two_ends(folder: Path, tmp_path: Path, num_prefill: int) -> None:
    """And exactly at max_tokens, which is a good end, too (R090, R074)."""
    both = (EOS_TOKEN_ID, EOS_TOKEN_ID - 1)
    model = shutil.copytree(folder, tmp_path / "two ends")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    config = deployment_config(model, timeout_s=30.0, block_size=16, num_blocks=1024)
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for end in both:
            choice_of = {"choice": None, "regex": "yes+", "json_schema": None, "logit_bias": {end: 90.0}}
            (whole,) = (await deployment.client.complete(options(2, **choice_of), timeout_s=TIMEOUT_S)).choices
            assert (whole.text, whole.token_ids[-1]) == ("yes", end)
            assert whole.finish is not None and whole.finish.kind is FinishKind.END_OF_SEQUENCE
            exact = options(2, **choice_of, max_tokens=len(whole.token_ids) - 1)
            (cut,) = (await deployment.client.complete(exact, timeout_s=TIMEOUT_S)).choices
            assert cut.text == "yes" and cut.finish is not None and cut.finish.kind is FinishKind.LENGTH
        await deployment.assert_idle()


@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_neither_of_two_ends_comes_before_min_tokens(folder: Path, tmp_path: Path, num_prefill: int) -> None:
    """R074, also where the model wants nothing else."""
    both = (EOS_TOKEN_ID, 65)
    model = shutil.copytree(folder, tmp_path / "two ends")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    config = deployment_config(model, timeout_s=30.0, block_size=16, num_blocks=1024)
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for end in both:
            for min_tokens in (0, 10):
                wanted = GenerateOptions(
                    prompt=[5, 6], max_tokens=30, min_tokens=min_tokens, logit_bias={end: 90.0}, seed=min_tokens
                )
                (choice,) = (await deployment.client.complete(wanted, timeout_s=TIMEOUT_S)).choices
                assert choice.token_ids[-1] == end and not set(choice.token_ids[:min_tokens]) & set(both)
                assert len(choice.token_ids) == min_tokens + 1
                assert choice.finish is not None and choice.finish.kind is FinishKind.END_OF_SEQUENCE
        await deployment.assert_idle()


async def test_an_output_that_cannot_go_on_fails_its_request_alone(config: Config) -> None:
    async with running_deployment(config) as deployment:
        others = asyncio.create_task(choices_of(deployment.client, range(6)))
        with pytest.raises(FailedPrecondition, match="every token is banned"):
            stuck = options(1, allowed_token_ids=[9])
            await deployment.client.complete(stuck, timeout_s=TIMEOUT_S)
        assert all(is_right(KINDS[number % 3], choice.text) for number, (choice,) in enumerate(await others))
        await deployment.assert_idle()


async def test_a_scripted_model_refuses_a_grammar(tmp_path: Path) -> None:
    async with running_deployment(deployment_config(chat_folder(tmp_path / "model"))) as deployment:
        await _refused(deployment)
        assert (await deployment.client.complete(GenerateOptions(prompt=[5], max_tokens=2))).choices
        await deployment.assert_idle()


async def _refused(deployment: Deployment) -> None:
    with pytest.raises(FailedPrecondition, match="no grammar"):
        await deployment.client.complete(GenerateOptions(prompt=[5], max_tokens=2, regex="a"), timeout_s=TIMEOUT_S)
