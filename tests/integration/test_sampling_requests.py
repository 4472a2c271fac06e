"""Sampling options at their edges through a whole deployment, over gRPC and HTTP (R035, R079 … R085).

A tiny model with random weights. What is refused is refused before it is queued, and its neighbours never feel it.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.forward_batch import SampleRequest
from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import InvalidArgument
from kvferry.sampling import FinishKind, LogitRules, SamplingParams
from proto.kvferry.v1 import types_pb2
from tests.support.deployment import Deployment, deployment_config, running_deployment
from tests.support.models import EOS_TOKEN_ID, MAX_CONTEXT, VOCAB_SIZE, save_tiny_model
from tests.support.sampling_truth import ruled
from tests.support.workers import core_of

PROMPT = list(range(40, 62))
NUM_TOKENS = 8
TIMEOUT_S = 60.0
WHITE_SPACE = [220, 197, 198]
"""Ids of a space, a tab and a line break."""
MODES = pytest.mark.parametrize("num_prefill", [1, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def config(folder: Path) -> Config:
    return deployment_config(folder, timeout_s=30.0, block_size=16, num_blocks=512)


class Asker:
    """One request over either interface, and its answer in plain values."""

    def __init__(self, deployment: Deployment) -> None:
        self._client: AsyncClient = deployment.client
        self._url = f"{deployment.router.http_url}/v1/completions"

    async def grpc(self, prompt: Sequence[int] = PROMPT, **fields: Any) -> Completion:
        values = {"max_tokens": NUM_TOKENS, "temperature": 0.0, **fields}
        return await self._client.complete(GenerateOptions(prompt=prompt, **values), timeout_s=TIMEOUT_S)

    async def ids(self, prompt: Sequence[int] = PROMPT, **fields: Any) -> list[int]:
        """Over gRPC, and the same over HTTP."""
        fields = {"ignore_eos": True, **fields}
        (choice,) = (await self.grpc(prompt, **fields)).choices
        (other,) = (await self.http(prompt, return_token_ids=True, **fields)).json()["choices"]
        assert other["token_ids"] == choice.token_ids
        return choice.token_ids

    async def http(self, prompt: Sequence[int] = PROMPT, **fields: Any) -> httpx.Response:
        values = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "prompt": list(prompt), **fields}
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await client.post(self._url, json=values)

    async def refused(self, words: str, **fields: Any) -> None:
        """Over gRPC: by the client where the message could not hold it, else by the router."""
        with pytest.raises(InvalidArgument, match=words):
            await self.grpc(**fields)

    async def refused_by_http(self, words: str, **fields: Any) -> None:
        answer = await self.http(**fields)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]


@asynccontextmanager
async def asking(config: Config, num_prefill: int = 1) -> AsyncIterator[Asker]:
    """Neighbours are served all the while, the same tokens each time."""
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        asker, is_over = Asker(deployment), asyncio.Event()
        neighbours: list[dict[str, Any]] = [
            {"seed": 5, "temperature": 1.0},
            {"presence_penalty": 1.0},
            {"min_tokens": 5},
        ]

        async def ask_neighbours() -> list[list[int]]:
            jobs = (asker.ids(PROMPT[number:], **fields) for number, fields in enumerate(neighbours))
            return list(await asyncio.gather(*jobs))

        quiet = await ask_neighbours()

        async def repeat() -> None:
            while not is_over.is_set():
                assert await ask_neighbours() == quiet
                await asyncio.sleep(0.05)  # the machine is for the others, too

        async with asyncio.TaskGroup() as group:
            group.create_task(repeat())
            yield asker
            is_over.set()
        await deployment.assert_idle()


@MODES
async def test_extreme_numbers_are_greedy_or_served(config: Config, num_prefill: int) -> None:
    """R079; in float32 the smallest are 0 and the largest no number."""
    async with asking(config, num_prefill) as asker:
        greedy = await asker.ids()
        for temperature in (1e-4, 1e-8, 1e-30, 1e-300):
            assert await asker.ids(temperature=temperature, seed=1) == greedy
            assert await asker.ids(temperature=temperature, seed=1, top_k=VOCAB_SIZE + 1, top_p=1e-6) == greedy
        for fields in ({"top_p": 1e-6}, {"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}):
            assert await asker.ids(temperature=1.0, seed=2, **fields) == greedy
        free = await asker.ids(temperature=1.0, seed=3)
        for top_k in (VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**32 - 1):
            assert await asker.ids(temperature=1.0, seed=3, top_k=top_k) == free
        for temperature in (1e4, 1e38):
            hot = await asker.ids(temperature=temperature, seed=4)
            assert len(hot) == NUM_TOKENS and hot != greedy
        for fields, words in (({"temperature": 1e39}, "sampling.temperature"), ({"top_p": 1e-60}, "sampling.top_p")):
            await asker.refused(words, **fields)
            await asker.refused_by_http(words.removeprefix("sampling."), **fields)


@MODES
async def test_log_probabilities_are_finite_over_both_interfaces(config: Config, num_prefill: int) -> None:
    """R080: what is banned by a filter, a bias or a grammar has the model's own log-probability."""
    async with asking(config, num_prefill) as asker:
        first = (await asker.ids())[0]
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"top_k": 1, "temperature": 1.0},) * 2,
            ({"allowed_token_ids": [50, 51]},) * 2,
            ({"logit_bias": {first: -100.0}}, {"logit_bias": {str(first): -100.0}}),
            ({"regex": "[0-9]{4}"}, {"structured_outputs": {"regex": "[0-9]{4}"}}),
        ]
        for fields, http_fields in cases:
            (choice,) = (await asker.grpc(logprobs=5, **fields)).choices
            assert choice.logprobs and all(map(math.isfinite, values(choice.logprobs)))
            answer = await asker.http(logprobs=5, **http_fields)
            assert answer.status_code == 200, answer.text
            (other,) = json.loads(answer.text, parse_constant=no_number)["choices"]
            wanted = [one.logprob for one in choice.logprobs]
            assert other["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-4)


def values(logprobs: Sequence[types_pb2.TokenLogprob]) -> Iterator[float]:
    for one in logprobs:
        yield one.logprob
        yield from (other.logprob for other in one.top)


def no_number(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


async def test_ids_outside_the_vocabulary_are_refused(config: Config) -> None:
    """R081, R082."""
    async with asking(config) as asker:
        for token_id in (-1, VOCAB_SIZE, 2**31, 2**32, 2**70):
            await asker.refused("logit_bias", logit_bias={token_id: 1.0})
            await asker.refused_by_http("logit_bias", logit_bias={str(token_id): 1.0})
            for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
                fields = {name: [5, token_id], "min_tokens": 3}
                await asker.refused(name, **fields)
                await asker.refused_by_http(name, **fields)
        for key in ("AI", "", "1.5", "0x1", "∞"):
            await asker.refused_by_http("logit_bias", logit_bias={key: 1.0})
        for bias in (math.nan, math.inf, 100.1, -1e39):
            await asker.refused("logit_bias", logit_bias={5: bias})
        await asker.refused("stop_token_ids", stop_token_ids=[VOCAB_SIZE + 7], min_tokens=5)
        await asker.refused_by_http("stop_token_ids", stop_token_ids=[VOCAB_SIZE + 7], min_tokens=5)


async def test_more_choices_than_seats_run_in_waves(config: Config) -> None:
    """R083."""
    found: list[list[list[int]]] = []
    for seats in (4, 64):
        async with asking(config.replace("engine", max_running=seats)) as asker:
            for n in (5, 64):
                answer = await asker.grpc(n=n, seed=6, temperature=1.0, ignore_eos=True)
                found.append([choice.token_ids for choice in answer.choices])
                assert len({tuple(token_ids) for token_ids in found[-1]}) == n
            for n in (0, 65, 512):
                await asker.refused("sampling.n: .* 64", n=n, temperature=1.0)
                await asker.refused_by_http("between 1 and 64", n=n, temperature=1.0)
                await asker.refused("sampling.(best_of|n): .* 64", best_of=n or 65, temperature=1.0)
    assert found[:2] == found[2:]
    assert found[0] == found[1][:5]


async def test_log_probabilities_of_a_whole_vocabulary_are_refused(config: Config) -> None:
    """R084, and what is allowed is given for a prompt as long as there can be."""
    long = [number % VOCAB_SIZE for number in range(MAX_CONTEXT - 1)]
    async with asking(config) as asker:
        for number in (-1, 21, VOCAB_SIZE, 2**32 - 1, 2**32):
            await asker.refused("logprobs", prompt=long, logprobs=number)
            await asker.refused("prompt_logprobs", prompt=long, prompt_logprobs=number)
            await asker.refused_by_http("logprobs", prompt=long, logprobs=number)
            await asker.refused_by_http("logprobs", prompt=long, logprobs=number, echo=True)
        await asker.refused("logprob_token_ids", logprob_token_ids=list(range(129)))
        await asker.refused_by_http("prompt_logprobs", prompt_logprobs=-1)
        answer = await asker.grpc(long, prompt_logprobs=20, logprobs=20, max_tokens=1)
        assert len(answer.prompt_logprobs) == len(long) - 1
        assert all(len(one.top) == 20 for one in [*answer.prompt_logprobs, *answer.choices[0].logprobs])


@MODES
async def test_penalties_count_what_they_say_from_the_first_token_on(
    config: Config, folder: Path, num_prefill: int
) -> None:
    """R085: repetition looks at prompt and output, presence and frequency at the output alone."""
    favourite = 77
    prompt, bias = [favourite] * 20, {favourite: 12.0}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    async with asking(config, num_prefill) as asker:
        plain = await asker.ids(prompt, logit_bias=bias)
        assert plain[:2] == [favourite, favourite], "it is what the model goes on with"
        for name, value in (
            ("presence_penalty", 2.0),
            ("frequency_penalty", 2.0),
            ("presence_penalty", -2.0),
            ("repetition_penalty", 3.0),
            ("repetition_penalty", 0.5),
        ):
            found = await asker.ids(prompt, logit_bias=bias, **{name: value})
            assert found == expected(model, prompt, LogitRules(bias=tuple(bias.items()), **{name: value}))  # type: ignore[arg-type]
            assert (found[0] == favourite) == (name != "repetition_penalty" or value < 1.0)


@torch.inference_mode()
def expected(model: torch.nn.Module, prompt: list[int], rules: LogitRules) -> list[int]:
    """Greedy, by transformers' logits and the plain truth of the rules."""
    token_ids, sampling = list(prompt), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, rules=rules)
    for number in range(NUM_TOKENS):
        logits = model(torch.tensor([token_ids])).logits[0, -1].tolist()
        row = ruled(logits, SampleRequest(sampling, len(token_ids), number, token_ids=token_ids))
        token_ids.append(row.index(max(row)))
    return token_ids[len(prompt) :]


@MODES
async def test_a_first_token_that_ends_is_all_there_is(config: Config, num_prefill: int) -> None:
    """R035."""
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        asker = Asker(deployment)
        for last, stops in ((EOS_TOKEN_ID, []), (9, [9])):
            answer = await asker.grpc(logprobs=1, logit_bias={last: 100.0}, stop_token_ids=stops)
            (choice,) = answer.choices
            assert choice.finish is not None and len(choice.logprobs) == len(choice.token_ids) == 1
            assert choice.token_ids == [last]
            assert choice.finish.kind is (FinishKind.STOP_TOKEN if stops else FinishKind.END_OF_SEQUENCE)
            assert choice.text == "" and answer.usage.completion_tokens == 1
            told = (await asker.http(logit_bias={str(last): 100.0}, stop_token_ids=stops)).json()
            assert (told["choices"][0]["text"], told["choices"][0]["finish_reason"]) == ("", "stop")
            assert told["usage"]["completion_tokens"] == 1
        assert num_prefill == 0 or core_of(deployment.decode[0]).num_steps == 0
        await deployment.assert_idle()


@MODES
async def test_the_best_candidates_and_beams_over_both_interfaces(config: Config, num_prefill: int) -> None:
    """Those of n = best_of with the highest log-probability a token; beams under their names in vLLM."""
    async with asking(config, num_prefill) as asker:
        seeded: dict[str, Any] = {"seed": 3, "temperature": 1.0, "ignore_eos": True}
        every = await asker.grpc(n=5, logprobs=0, **seeded)
        ranked = sorted(every.choices, key=lambda one: -sum(told.logprob for told in one.logprobs))
        best = await asker.grpc(n=2, best_of=5, **seeded)
        assert [one.token_ids for one in best.choices] == [one.token_ids for one in ranked[:2]]
        beams = await asker.grpc(beam_width=4, n=2, length_penalty=0.8, temperature=None)
        assert len({tuple(one.token_ids) for one in beams.choices}) == 2
        searched = {"use_beam_search": True, "length_penalty": 0.8, "temperature": None}
        for wanted, fields in ((best, {"best_of": 5, **seeded}), (beams, {"best_of": 4, **searched})):
            answer = await asker.http(n=2, return_token_ids=True, **fields)
            assert answer.status_code == 200, answer.text
            found = [one["token_ids"] for one in answer.json()["choices"]]
            assert found == [one.token_ids for one in wanted.choices]


async def test_json_has_little_white_space_however_much_the_model_likes_it(config: Config) -> None:
    """R088: over both interfaces; by default, as the request says, and as the configuration says."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 4, "maxItems": 4}
    text_of: dict[str, Any] = {"max_tokens": 150}
    bias = {token_id: 90.0 for token_id in WHITE_SPACE}
    kinds: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({}, {}, 12),
        ({"compact_json": True}, {"structured_outputs": {"disable_any_whitespace": True}}, 0),
        ({"compact_json": False}, {"structured_outputs": {"disable_any_whitespace": False}}, 12),
    ]
    for is_compact in (False, True):
        asked = config.replace("model", compact_json=is_compact)
        async with running_deployment(asked) as deployment:
            asker = Asker(deployment)
            for fields, http_fields, most in kinds:
                most = 0 if is_compact and not fields else most
                whole = await asker.grpc(json_schema=json.dumps(schema), logit_bias=bias, **text_of, **fields)
                formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
                http_bias = {str(token_id): value for token_id, value in bias.items()}
                answer = await asker.http(response_format=formats, logit_bias=http_bias, **text_of, **http_fields)
                (choice,) = answer.json()["choices"]
                assert choice["text"] == whole.choices[0].text and choice["finish_reason"] == "stop"
                assert len(json.loads(choice["text"])) == 4
                gaps = [len(gap) for gap in re.findall(r"\s+", choice["text"])]
                assert max(gaps, default=0) <= most and (len(gaps) >= 4) == (most > 0)
            await asker.refused("compact_json: is only for", regex="a", compact_json=True)
            await asker.refused_by_http(
                "structured_outputs.disable_any_whitespace", structured_outputs={"disable_any_whitespace": True}
            )
