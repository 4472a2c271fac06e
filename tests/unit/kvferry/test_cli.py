"""The command line, as processes, against a router with fixed answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry import __version__
from kvferry.config import load_config
from kvferry.errors import Unavailable
from proto.kvferry.v1 import inference_pb2, types_pb2
from tests.support.commands import Outcome
from tests.support.fake_router import TEXT, FakeRouter, events, start_fake_router
from tests.unit.kvferry.conftest import Kvferry, Running

pytestmark = pytest.mark.processes

COMMANDS = [
    (),
    ("up",),
    ("router",),
    ("prefill",),
    ("decode",),
    ("generate",),
    ("chat",),
    ("models",),
    ("models", "list"),
    ("models", "prepare"),
    ("workers",),
    ("drain",),
    ("cache",),
    ("cache", "stats"),
    ("cache", "flush"),
    ("cache", "pin"),
    ("cache", "unpin"),
    ("config",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_every_command_has_help_with_an_example(
    kvferry: Kvferry, environment: dict[str, str], command: tuple[str, ...]
) -> None:
    outcome = await kvferry(environment, *command, "--help")
    assert outcome.code == 0
    assert "Example: kvferry " in outcome.stdout


async def test_generate_json_is_one_object_with_the_promised_keys(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    arguments = ["--target", router.address, "--json", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    outcome = await kvferry(environment, "generate", *arguments, "--prompt-token-ids", "1,2,3")
    assert (outcome.code, outcome.stderr) == (0, "")
    response = json.loads(outcome.stdout)
    assert response["choices"][0]["token_ids"] == [5, 6, 2]
    assert response["choices"][0]["text"] == TEXT
    assert response["choices"][0]["finish_reason"] == "end_of_sequence"
    assert response["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "cached_tokens": 1}
    assert response["timings"]["num_blocks_shipped"] == 2
    assert response["seed"] == 7
    (request,) = router.fake.requests
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert request.stopping == inference_pb2.StoppingOptions(max_tokens=8, ignore_eos=True)
    assert request.sampling == inference_pb2.SamplingOptions(temperature=0.0)


async def test_generate_writes_the_text(kvferry: Kvferry, environment: dict[str, str], router: Running) -> None:
    outcome = await kvferry(environment, "generate", "--target", router.address, "-", stdin="from a pipe")
    assert outcome == Outcome(0, TEXT + "\n", "")
    assert router.fake.requests[0].text == "from a pipe"


async def test_of_several_routers_one_that_is_there_answers(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    arguments = ("generate", "--router", "127.0.0.1:1", "--router", router.address, "x")
    assert await kvferry(environment, *arguments) == Outcome(0, TEXT + "\n", "")
    outcome = await kvferry(environment, "generate", "--router", "127.0.0.1:1", "--router", "127.0.0.1:2", "x")
    assert outcome.code == 1 and "no router answers at 127.0.0.1:2 (connection refused)" in outcome.stderr


async def test_generate_shows_several_choices_one_after_the_other(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    arguments = ("generate", "--target", router.address, "--n", "3", "--best-of", "4", "x")
    outcome = await kvferry(environment, *arguments)
    text = f"--- choice 0\n{TEXT}\n--- choice 1\nnumber 1\n--- choice 2\nnumber 2\n"
    assert outcome == Outcome(0, text, "")
    assert router.fake.requests[0].sampling == inference_pb2.SamplingOptions(n=3, best_of=4)
    assert not router.fake.requests[0].HasField("beam_search")


async def test_no_header_stands_above_an_error(kvferry: Kvferry, environment: dict[str, str], router: Running) -> None:
    arguments = ("generate", "--target", router.address, "--n", "3", "--tier", "gold", "x")
    outcome = await kvferry(environment, *arguments)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr == "error: tier: there is no tier 'gold'; known tiers: standard\n"


async def test_choices_without_text_have_their_header_too(kvferry: Kvferry, environment: dict[str, str]) -> None:
    server, address = await start_fake_router(SilentRouter())
    outcome = await kvferry(environment, "generate", "--target", address, "--n", "2", "x")
    await server.drain(0)
    assert outcome == Outcome(0, "--- choice 0\n\n--- choice 1\n\n", "")


async def test_generate_asks_for_a_beam_search(kvferry: Kvferry, environment: dict[str, str], router: Running) -> None:
    beams = ("--beam-width", "4", "--length-penalty", "0.5", "--early-stopping", "--n", "2")
    outcome = await kvferry(environment, "generate", "--target", router.address, "--json", *beams, "x")
    assert [choice["cumulative_logprob"] for choice in json.loads(outcome.stdout)["choices"]] == [None, -1.0]
    expected = inference_pb2.BeamSearch(width=4, length_penalty=0.5, early_stopping=True)
    assert router.fake.requests[0].beam_search == expected


async def test_generate_asks_for_penalties_bias_and_logprobs(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    options = ("--presence-penalty", "1.5", "--frequency-penalty", "-1", "--repetition-penalty", "1.25")
    biased = ("--logit-bias", "42=-100", "--logit-bias", "7=0.5", "--bad-word", "dog", "--logprobs", "3")
    about_prompt = ("--echo", "--prompt-logprobs", "0", "--truncate-prompt-tokens", "9")
    outcome = await kvferry(
        environment, "generate", "--target", router.address, "--json", *options, *biased, *about_prompt, "x"
    )
    assert outcome.code == 0, outcome.stderr
    request = router.fake.requests[0]
    assert request.sampling == inference_pb2.SamplingOptions(
        presence_penalty=1.5,
        frequency_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={42: -100, 7: 0.5},
        bad_words=["dog"],
    )
    assert request.response.logprobs == 3
    assert request.response.echo and request.response.HasField("prompt_logprobs")
    assert request.truncate_prompt_tokens == 9
    bad = await kvferry(environment, "generate", "--target", router.address, "--logit-bias", "dog=1", "x")
    assert (bad.code, bad.stderr) == (2, "error: --logit-bias: must be ID=VALUE, such as 42=-100, got 'dog=1'\n")


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (("--json-schema", '{"type": "object"}'), "json_schema", '{"type": "object"}'),
        (("--json-schema", "FILE"), "json_schema", '{"a": 1}'),
        (("--json-object",), "json_object", True),
        (("--regex", "[0-9]+"), "regex", "[0-9]+"),
        (("--choice", "yes", "--choice", "no"), "choice", inference_pb2.Choices(choices=["yes", "no"])),
        (("--grammar", 'start: "a"'), "grammar", 'start: "a"'),
        (("--grammar", "FILE"), "grammar", '{"a": 1}'),
        (("--structural-tag", '{"triggers": []}'), "structural_tag", '{"triggers": []}'),
        (("--session-id", "s"), "session_id", "s"),
    ],
)
async def test_generate_constrains_the_output(
    kvferry: Kvferry,
    environment: dict[str, str],
    router: Running,
    tmp_path: Path,
    arguments: tuple[str, ...],
    field: str,
    value: object,
) -> None:
    file = tmp_path / "file"
    file.write_text('{"a": 1}')
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    outcome = await kvferry(environment, "generate", "--target", router.address, *given, "x")
    assert outcome == Outcome(0, TEXT + "\n", "")
    (request,) = router.fake.requests
    assert getattr(request, field) == value
    assert request.WhichOneof("constraint") == (None if field == "session_id" else field)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--json-object", "--regex", "a"), "--regex: cannot be combined with --json-object"),
        (("--choice", "a", "--grammar", "b: c"), "--grammar: cannot be combined with --choice"),
        (("--json-schema", "{nothing"), "--json-schema: is not JSON: "),
        (("--json-schema", "/nowhere/schema.json"), "--json-schema: /nowhere/schema.json cannot be read: No such file"),
        (("--json-schema", "pyproject.toml"), "--json-schema: pyproject.toml is not JSON: "),
        (("--grammar", "nowhere.lark"), "--grammar: nowhere.lark cannot be read: No such file"),
        (("--grammar", "x" * 5000), "--grammar: xxx"),
        (("--include-stop",), "--include-stop: needs --stop"),
    ],
)
async def test_generate_refuses_constraints_before_a_router_is_needed(
    kvferry: Kvferry, environment: dict[str, str], arguments: tuple[str, ...], error: str
) -> None:
    outcome = await kvferry(environment, "generate", "--target", "127.0.0.1:1", *arguments, "x")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith(f"error: {error}") and len(outcome.stderr.splitlines()) == 1


async def test_generate_keeps_the_stop_string_where_it_is_told_to(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    arguments = ("generate", "--target", router.address, "--stop", "is", "--include-stop", "x")
    assert (await kvferry(environment, *arguments)).code == 0
    expected = inference_pb2.StoppingOptions(stop=["is"], include_stop_str_in_output=True)
    assert router.fake.requests[0].stopping == expected


class BreakingRouter(FakeRouter):
    """Its first response breaks off behind the first token; a resumed one has the rest."""

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        begin, first, *rest = events(request)
        begin.started.prompt_digest = b"digest"
        await context.write(begin)
        if not request.HasField("resume"):
            await context.write(first)
            raise Unavailable("the router is gone")
        for event in rest:
            await context.write(event)


@pytest.mark.parametrize(("option", "goes_on"), [("--resume", True), ("--no-resume", False), (None, False)])
async def test_a_response_goes_on_where_it_is_told_to(
    kvferry: Kvferry, environment: dict[str, str], option: str | None, goes_on: bool
) -> None:
    fake = BreakingRouter()
    server, address = await start_fake_router(fake)
    arguments = [option] if option is not None else []
    outcome = await kvferry(environment, "generate", "--target", address, *arguments, "x")
    await server.drain(0)
    if goes_on:
        assert outcome == Outcome(0, TEXT + "\n", "")
    else:
        assert outcome == Outcome(1, TEXT[:5] + "\n", "error: the router is gone\n")


async def test_target_comes_from_the_configuration_too(
    kvferry: Kvferry, environment: dict[str, str], router: Running
) -> None:
    outcome = await kvferry({**environment, "KVFERRY_ROUTER__GRPC_LISTEN": router.address}, "generate", "x")
    assert outcome == Outcome(0, TEXT + "\n", "")


class SilentRouter(FakeRouter):
    """Sends the tokens without their text."""

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        for event in events(request):
            if event.HasField("delta"):
                event.delta.text = ""
            await context.write(event)


class StallingRouter(FakeRouter):
    """Sends one token and no more."""

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        for event in events(request)[:2]:
            await context.write(event)
        await asyncio.Event().wait()


class CutRouter(FakeRouter):
    """Its answers are cut."""

    def __init__(self, reason: types_pb2.FinishReason) -> None:
        super().__init__()
        self._reason = reason

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        for event in events(request):
            if event.HasField("started"):
                event.started.stopping.max_tokens = 3
            elif event.HasField("finish"):
                event.finish.finish.CopyFrom(types_pb2.Finish(reason=self._reason))
            await context.write(event)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (types_pb2.FINISH_REASON_LENGTH, "ended at max_tokens (3)"),
        (types_pb2.FINISH_REASON_CANCELLED, "ended by an abort"),
        (types_pb2.FINISH_REASON_DEADLINE, "ended at its time limit"),
    ],
)
async def test_an_answer_that_was_cut_is_told_beside_it(
    kvferry: Kvferry, environment: dict[str, str], reason: types_pb2.FinishReason, words: str
) -> None:
    server, address = await start_fake_router(CutRouter(reason))
    told = await kvferry(environment, "generate", "--target", address, "x")
    several = await kvferry(environment, "generate", "--target", address, "--n", "2", "x")
    as_json = await kvferry(environment, "generate", "--target", address, "--json", "--top-k", "-1", "x")
    chat = await kvferry(environment, "chat", "--target", address, stdin="x\n")
    timing = await kvferry(environment, "chat", "--target", address, "--timing", "--model", "m", stdin="x\n")
    await server.drain(0)
    assert told == Outcome(0, TEXT + "\n", words + "\n") == chat
    assert several.stderr == f"choice 0 {words}\nchoice 1 {words}\n"
    assert (as_json.code, as_json.stderr) == (0, "")
    assert timing.stderr.endswith(f"prompt tokens cached; {words}\n") and timing.stderr.count("ended") == 1


@pytest.mark.parametrize(("options", "shown"), [((), TEXT[:5] + "\n"), (("--json",), "")])
async def test_deadline_is_told_on_a_line_of_its_own(
    kvferry: Kvferry, environment: dict[str, str], options: tuple[str, ...], shown: str
) -> None:
    server, address = await start_fake_router(StallingRouter())
    outcome = await kvferry(environment, "generate", "--target", address, "--timeout", "0.5", *options, "x")
    await server.drain(0)
    assert outcome == Outcome(1, shown, "error: the deadline of 0.5 s passed after 1 token\n")


async def test_version(kvferry: Kvferry, environment: dict[str, str]) -> None:
    assert await kvferry(environment, "--version") == Outcome(0, f"kvferry {__version__}\n", "")


async def test_workers_as_json_and_as_a_table(kvferry: Kvferry, environment: dict[str, str], router: Running) -> None:
    outcome = await kvferry(environment, "workers", "--target", router.address, "--json")
    (worker,) = json.loads(outcome.stdout)
    assert {key: worker[key] for key in ("id", "role", "pid", "address")} == {
        "id": "decode-0",
        "role": "decode",
        "pid": 9,
        "address": "127.0.0.1:5",
    }
    table = await kvferry(environment, "workers", "--target", router.address)
    assert "decode-0" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("generate", "--target", "{router}", "--tier", "gold", "x"), 1, "error: tier: there is no tier 'gold'"),
        (("generate", "--target", "127.0.0.1:1", "x"), 1, "no router answers at 127.0.0.1:1 (connection refused)"),
        (("generate", "--target", "nonsense", "x"), 2, "error: --target: must be HOST:PORT"),
        (("generate", "--prompt-token-ids", "1,a"), 2, "error: --prompt-token-ids: must be numbers"),
        (("generate", "--length-penalty", "0.5", "x"), 2, "error: --length-penalty: needs --beam-width"),
        (("generate", "--early-stopping", "x"), 2, "error: --early-stopping: needs --beam-width"),
        (("generate", "--max-tokens", "-1", "x"), 1, "error: stopping.max_tokens: cannot be -1"),
        (("generate", "--timeout", "0", "x"), 2, "must be above 0, got 0"),
        (("generate", "--timeout", "-1", "x"), 2, "must be above 0, got -1"),
        (("generate", "--timeout", "nan", "x"), 2, "must be above 0, got nan"),
        (("generate", "--timeout", "inf", "x"), 2, "must be at most 1000000, got inf"),
        (("generate", "--stop-token-ids", "", "x"), 2, "error: --stop-token-ids: must be numbers"),
        (("generate", "--logprobs", "3", "x"), 2, "error: --logprobs: needs --json"),
        (("generate", "--prompt-logprobs", "0", "x"), 2, "error: --prompt-logprobs: needs --json"),
        (("generate", "--structural-tag", "/nowhere", "x"), 2, "error: --structural-tag: /nowhere cannot be read"),
        (("generate", "--top-k", "-2", "x"), 1, "error: sampling.top_k: cannot be -2"),
        (("generate",), 2, "give either PROMPT or --prompt-token-ids"),
        (("generate", "--no-such-option"), 2, "No such option"),
        (("config", "--set", "engine.block_sise=8"), 1, "error: engine.block_sise: unknown key; the nearest known"),
        (("config", "--set", "engine.block_size=0"), 1, "error: engine.block_size: "),
        (
            ("config", "--set", "telemetry.otlp_endpoint=http://h"),
            1,
            "error: telemetry.otlp_endpoint: must be",
        ),
        (("config", "--output", "/no/such/folder/x.toml"), 2, "error: --output: cannot write /no/such/folder/x.toml"),
        (("config", "--set", "x"), 2, "error: --set: must be SECTION.KEY=VALUE"),
        (("config", "--config", "nowhere.toml"), 2, "error: --config: cannot read nowhere.toml"),
        (("models", "prepare", "gpt-7"), 1, "error: model.name: there is no model 'gpt-7'; known: smollm2"),
        (("prefill", "--model", "/no/such/folder"), 1, "error: model.name: /no/such/folder does not exist"),
        (("router", "--prefill", "h:1"), 1, "error: router.decode: names no worker"),
        (("up", "--dtype", "int4"), 1, "error: model.dtype: "),
    ],
)
async def test_errors_are_one_line_without_a_traceback(
    kvferry: Kvferry, environment: dict[str, str], router: Running, arguments: tuple[str, ...], code: int, words: str
) -> None:
    outcome = await kvferry(environment, *(part.format(router=router.address) for part in arguments))
    assert outcome.code == code
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    if words.startswith("error: "):
        assert len(outcome.stderr.splitlines()) == 1


async def test_printed_configuration_is_read_back(
    kvferry: Kvferry, environment: dict[str, str], tmp_path: Path
) -> None:
    first = await kvferry(environment, "config", "--set", "engine.block_size=32", "--set", "router.prefill=a:1,b:2")
    assert 'prefill = ["a:1", "b:2"]' in first.stdout
    file = tmp_path / "effective.toml"
    file.write_text(first.stdout)
    assert await kvferry(environment, "config", "--config", str(file)) == first


async def test_configuration_can_be_written_to_the_file_it_is_read_from(
    kvferry: Kvferry, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "kvferry.toml"
    file.write_text("[engine]\nblock_size = 8\n")
    arguments = ("--config", str(file), "--output", str(file), "--set", "engine.max_running=3")
    assert await kvferry(environment, "config", *arguments) == Outcome(0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["kvferry.toml"]
    config = load_config(file)
    assert (config.engine.block_size, config.engine.max_running) == (8, 3)


async def test_api_keys_are_printed_only_when_asked_for(
    kvferry: Kvferry, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "kvferry.toml"
    file.write_text('[[tenants]]\nname = "a"\napi_keys = ["SECRET-of-tenant-a"]\n')
    hidden = await kvferry(environment, "config", "--config", str(file))
    assert hidden.code == 0 and 'name = "a"' in hidden.stdout and "SECRET" not in hidden.stdout
    refused = await kvferry(environment, "config", "--config", str(file), "--output", str(file))
    assert refused.code == 2 and refused.stderr.startswith("error: --output: the configuration holds API keys")
    assert (await kvferry(environment, "config", "--config", str(file), "--output", str(file), "--show-keys")).code == 0
    assert load_config(file).own_key == "SECRET-of-tenant-a"
    assert file.stat().st_mode & 0o777 == 0o600


async def test_models_list_shows_what_is_prepared(kvferry: Kvferry, environment: dict[str, str]) -> None:
    outcome = await kvferry(environment, "models", "list", "--json")
    (model,) = json.loads(outcome.stdout)
    assert (model["name"], model["prepared"]) == ("smollm2-135m-instruct", False)


async def test_reader_that_leaves_is_no_traceback(environment: dict[str, str]) -> None:
    process = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m kvferry.cli.app config | true", stderr=asyncio.subprocess.PIPE, env=environment
    )
    _, stderr = await process.communicate()
    assert stderr == b""
