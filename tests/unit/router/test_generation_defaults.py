"""Defaults that a model's folder brings, over both interfaces; what it says wrongly is told at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.config import ModelConfig
from kvferry.errors import FailedPrecondition, InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.app import _generation_defaults
from router.generation_defaults import NO_DEFAULTS, GenerationDefaults, read_generation_defaults
from router.validation import fit, validate
from tests.support.fake_workers import FakeNetwork
from tests.support.tokenizers import write_chatml_folder
from tests.unit.router.conftest import StartRouter
from tests.unit.router.test_validation import LIMITS

FILE: dict[str, Any] = {
    "eos_token_id": [2, 0],
    "do_sample": False,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "max_new_tokens": 7,
    "num_beams": 4,
    "length_penalty": None,
}
OWN = GenerationDefaults(0.5, 0.75, 20, 0.25, repetition_penalty=1.5, max_tokens=7)


def write(folder: Path, content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Of the routers here."""
    return write(write_chatml_folder(tmp_path / "own"), FILE)


def test_the_file_is_read_as_vllm_does(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == NO_DEFAULTS
    assert read_generation_defaults(write(tmp_path, {"eos_token_id": 2, "do_sample": False})) == NO_DEFAULTS
    assert read_generation_defaults(write(tmp_path, {"temperature": None, "top_k": -1})) == NO_DEFAULTS
    assert read_generation_defaults(write(tmp_path, FILE)) == OWN
    assert read_generation_defaults(write(tmp_path, {"top_p": 0.1})).top_p == pb.SamplingOptions(top_p=0.1).top_p
    config = ModelConfig(name="m", path=str(write(tmp_path, FILE)))
    assert _generation_defaults(config) == OWN
    assert _generation_defaults(config.model_copy(update={"generation_config": "none"})) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 1e39),
        ("top_p", 0),
        ("top_p", 1e-60),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 1 << 32),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", [1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_name_of_the_file(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(FailedPrecondition, match=rf"generation_config\.json: {name} is .*, expected a"):
        read_generation_defaults(write(tmp_path, {name: value}))


def test_only_fields_that_are_unset_have_defaults() -> None:
    limits = replace(LIMITS, defaults=OWN)
    request = validate(pb.GenerateRequest(text="a"), limits, lambda: 7)
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.5, 20, 0.75, 0.25)
    assert (request.rules.repetition_penalty, fit(request, 5, limits)) == (1.5, 7)
    assert fit(request, 60, limits) == 4  # a default is cut to what fits
    said = pb.SamplingOptions(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    message = pb.GenerateRequest(text="a", sampling=said, stopping=pb.StoppingOptions(max_tokens=20))
    assert validate(message, limits, lambda: 7) == validate(message, LIMITS, lambda: 7)
    assert fit(validate(message, limits, lambda: 7), 5, limits) == 20
    with pytest.raises(InvalidArgument, match=r"stopping\.min_tokens: 8 is above max_tokens, 7"):
        fit(validate(pb.GenerateRequest(text="a", stopping=pb.StoppingOptions(min_tokens=8)), limits, int), 5, limits)


def test_greedy_by_default_is_one_choice_and_beams_are_not_sampled() -> None:
    limits = replace(LIMITS, defaults=replace(OWN, temperature=0.0))
    several = pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(n=2))
    with pytest.raises(InvalidArgument, match=r"sampling\.n: n > 1 with temperature 0"):
        validate(several, limits, lambda: 7)
    several.sampling.temperature = 1
    assert validate(several, limits, lambda: 7).n == 2
    beams = pb.GenerateRequest(text="a", beam_search=pb.BeamSearch(width=2), sampling=pb.SamplingOptions(n=2))
    assert validate(beams, limits, lambda: 7) == validate(beams, LIMITS, lambda: 7)


async def test_both_interfaces_have_them_and_tell_them(start_router: StartRouter) -> None:
    async with FakeNetwork([35] * 30) as network, start_router(network) as router, httpx.AsyncClient() as http:
        answer = await router.generate(pb.GenerateRequest(text="AB"))
        started = answer.started
        told = {name: getattr(started.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        assert told == {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25}
        assert started.sampling.repetition_penalty == 1.5 and started.stopping.max_tokens == 7
        assert len(answer.token_ids) == 7
        body = {"messages": [{"role": "user", "content": "hi"}]}
        chat = await http.post(f"{router.app.http_url}/v1/chat/completions", json=body)
        assert chat.json()["usage"]["completion_tokens"] == 7
        for call in network.calls[0], network.calls[-1]:
            assert (call.spec.sampling.temperature, call.spec.sampling.top_k) == (0.5, 20)
            assert call.spec.sampling.rules.repetition_penalty == 1.5
        said = {**body, "temperature": 1, "top_k": -1, "max_tokens": 3}
        other = await http.post(f"{router.app.http_url}/v1/chat/completions", json=said)
        assert other.json()["usage"]["completion_tokens"] == 3
        sampling = network.calls[-1].spec.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 0.75)
        capabilities = await router.stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert capabilities.default_max_tokens == 7
        assert capabilities.default_sampling.temperature == 0.5 and capabilities.default_sampling.top_p == 0.75
