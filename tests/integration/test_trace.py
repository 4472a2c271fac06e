"""One trace a request: the whole tree of spans over client, router, prefill and decode, and on the ways it can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from kvferry.client import GenerateOptions
from kvferry.config import Config
from kvferry.errors import InvalidArgument
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment

EXPECTED = """\
kvferry.v1.InferenceService/Generate @ router
  text_completion model @ router
    kvferry.attempt @ router
      kvferry.queue @ router
      kvferry.v1.DecodeService/Decode @ router
        kvferry.v1.DecodeService/Decode @ decode
          kvferry.decode @ decode
      kvferry.v1.PrefillService/Prefill @ router
        kvferry.v1.PrefillService/Prefill @ prefill
          kvferry.prefill.chunk @ prefill
          kvferry.prefill.chunk @ prefill
          kvferry.prefill.chunk @ prefill
          kvferry.queue @ prefill
          kvferry.ship @ prefill
            kvferry.v1.ShipService/Ship @ prefill
              kvferry.v1.ShipService/Ship @ decode
                kvferry.commit @ decode
                kvferry.grant @ decode
    kvferry.tokenize @ router
"""
"""Siblings in order of name. The client's span shares the router's exporter here."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return deployment_config(chat_folder(tmp_path / "model"), max_chunk_tokens=8)


async def spans_of(deployment: Deployment) -> Sequence[ReadableSpan]:
    """Every span that has ended, once all processors have handed theirs over."""
    await deployment.assert_idle()
    providers = [deployment.telemetry.provider]
    providers += [worker.context.telemetry.provider for worker in (*deployment.prefill, *deployment.decode)]
    for provider in providers:
        assert await asyncio.to_thread(provider.force_flush, 5_000)
    return deployment.exporter.get_finished_spans()


def tree_of(span: ReadableSpan, spans: Sequence[ReadableSpan], depth: int = 0) -> str:
    """A line for the span, and below it, indented, those for the spans whose parent it is."""
    assert span.context is not None
    service = str(span.resource.attributes["service.name"]).removeprefix("kvferry-")
    below = [one for one in spans if one.parent is not None and one.parent.span_id == span.context.span_id]
    lines = sorted(tree_of(one, spans, depth + 1) for one in below)
    return f"{'  ' * depth}{span.name} @ {service}\n" + "".join(lines)


def roots(spans: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.parent is None]


async def ask(deployment: Deployment, num_prompt_tokens: int = 20, max_tokens: int = 5) -> None:
    prompt = list(range(num_prompt_tokens))
    options = GenerateOptions(prompt=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    await deployment.client.complete(options, timeout_s=30.0)


async def test_the_whole_tree_of_one_request(config: Config) -> None:
    async with running_deployment(config, client_tracing=True) as deployment:
        await ask(deployment)
        spans = await spans_of(deployment)
    (root,) = roots(spans)
    assert tree_of(root, spans) == EXPECTED
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 1
    assert all(span.status.status_code is not StatusCode.ERROR for span in spans)
    ship = next(span for span in spans if span.name == "kvferry.ship")
    assert ship.attributes is not None
    assert (ship.attributes["kvferry.num_blocks"], ship.attributes["kvferry.num_bytes"]) == (5, 5 * 32)


async def test_without_a_callers_trace_there_is_exactly_one(config: Config) -> None:
    async with running_deployment(config) as deployment:
        await ask(deployment)
        spans = await spans_of(deployment)
    (root,) = roots(spans)
    assert root.name == "text_completion model"
    assert tree_of(root, spans, depth=1) == EXPECTED.partition("\n")[2]


async def test_no_text_and_no_token_is_in_any_span(config: Config) -> None:
    async with running_deployment(config) as deployment:
        secret = "the launch code is swordfish"
        await deployment.client.complete(GenerateOptions(prompt=secret, max_tokens=3, ignore_eos=True), timeout_s=30.0)
        spans = await spans_of(deployment)
    assert "swordfish" not in "".join(str(dict(span.attributes or {})) for span in spans)


async def test_refused_and_cancelled_requests_have_their_span_with_the_reason(tmp_path: Path) -> None:
    config = deployment_config(chat_folder(tmp_path / "model", step_delay_s=0.005))
    async with running_deployment(config) as deployment:
        with pytest.raises(InvalidArgument):
            await deployment.client.complete(GenerateOptions(prompt=[1], temperature=-1.0))
        options = GenerateOptions(prompt=[1, 2, 3], max_tokens=100, temperature=0.0, ignore_eos=True)
        async with deployment.client.generate(options) as events:
            while (await anext(events)).delta.token_index < 3:  # well into decode
                pass
        spans = await spans_of(deployment)
    reasons = sorted(str((span.attributes or {}).get("error.type")) for span in roots(spans))
    assert reasons == ["CANCELLED", "INVALID_ARGUMENT"]
    cancelled = next(span for span in roots(spans) if (span.attributes or {}).get("error.type") == "CANCELLED")
    below = tree_of(cancelled, spans)
    assert "@ prefill" in below and "kvferry.decode @ decode" in below
