"""One request is one trace, on every path; every span ends and tells why."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from kvferry.errors import InvalidArgument, Unavailable
from kvferry.telemetry import Attributes
from proto.kvferry.v1 import inference_pb2 as pb
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.conftest import Router, StartRouter, ask

OUTPUT = list(range(35, 60))
SERVER = "text_completion tiny"
PREFILL = "kvferry.v1.PrefillService/Prefill"
DECODE = "kvferry.v1.DecodeService/Decode"


async def spans_of(router: Router) -> list[ReadableSpan]:
    """All spans ended so far, oldest first."""
    await router.app.drain(1.0)
    router.telemetry.provider.force_flush()
    return sorted(router.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def parent_names(spans: list[ReadableSpan]) -> dict[str, str]:
    names = {span.context.span_id: span.name for span in spans if span.context}
    return {span.name: names.get(span.parent.span_id, "?") if span.parent else "" for span in spans}


async def test_the_tree_of_one_request(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        await router.generate(ask(max_tokens=4, label="mine"))
        spans = await spans_of(router)
        assert parent_names(spans) == {
            SERVER: "",
            "kvferry.tokenize": SERVER,
            "kvferry.attempt": SERVER,
            "kvferry.queue": "kvferry.attempt",
            PREFILL: "kvferry.attempt",
            DECODE: "kvferry.attempt",
        }
        assert len({span.context.trace_id for span in spans if span.context}) == 1
        attributes = spans[0].attributes or {}
        assert attributes[Attributes.OPERATION] == "text_completion"
        assert attributes[Attributes.PROVIDER] == "kvferry"
        assert attributes[Attributes.REQUEST_MAX_TOKENS] == 4
        assert attributes[Attributes.INPUT_TOKENS] == 3
        assert attributes[Attributes.OUTPUT_TOKENS] == 4
        assert attributes[Attributes.FINISH_REASONS] == ("length",)
        assert Attributes.REQUEST_CHOICE_COUNT not in attributes
        by_id = {f"{span.context.span_id:016x}": span.name for span in spans if span.context}
        assert [by_id[call.traceparent.split("-")[2]] for call in network.calls] == [DECODE, PREFILL]


async def test_several_choices_are_counted_and_have_a_finish_reason_each(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        await router.generate(ask(max_tokens=4, temperature=1.0, sampling=pb.SamplingOptions(n=2)))
        attributes = (await spans_of(router))[0].attributes or {}
        assert attributes[Attributes.REQUEST_CHOICE_COUNT] == 2
        assert attributes[Attributes.OUTPUT_TOKENS] == 8
        assert attributes[Attributes.FINISH_REASONS] == ("length", "length")


async def test_an_incoming_trace_is_continued_and_a_malformed_one_ignored(start_router: StartRouter) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        for value in (f"00-{trace_id}-{parent}-01", "nonsense"):
            call = router.stub.Generate(ask(max_tokens=2), metadata=(("traceparent", value),))
            assert [message async for message in call]
        spans = [span for span in await spans_of(router) if span.name == SERVER]
        assert [f"{span.context.trace_id:032x}" == trace_id for span in spans if span.context] == [True, False]
        assert spans[0].parent is not None
        assert f"{spans[0].parent.span_id:016x}" == parent
        assert spans[1].parent is None


async def test_a_retry_is_linked_to_the_first_attempt(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_prefill=2) as network, start_router(network) as router:
        network.fail(Point.PREFILL_START, Unavailable("died"))
        await router.generate(ask(max_tokens=4))
        spans = await spans_of(router)
        first, second = (span for span in spans if span.name == "kvferry.attempt")
        assert [link.context.span_id for link in second.links] == [first.context.span_id]
        assert (first.attributes or {})[Attributes.ERROR_TYPE] == "UNAVAILABLE"
        assert Attributes.ERROR_TYPE not in (second.attributes or {})
        assert [span.name for span in spans].count(PREFILL) == 2
        assert len({span.context.trace_id for span in spans if span.context}) == 1


async def test_refused_failed_and_cancelled_requests_have_a_span_with_the_reason(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        with pytest.raises(InvalidArgument):
            await router.generate(ask(temperature=-1))
        network.fail(Point.DECODE_START, Unavailable("hot"), times=3)
        with pytest.raises(Unavailable):
            await router.generate(ask())
        network.hold(Point.TOKEN, 3)
        call = router.stub.Generate(ask())
        reading = asyncio.create_task(_read(call))
        await network.reached(Point.TOKEN, 3)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await network.all_ended()
        spans = await spans_of(router)
        roots = [span for span in spans if span.parent is None]
        reasons = [(span.attributes or {}).get(Attributes.ERROR_TYPE) for span in roots]
        assert reasons == ["INVALID_ARGUMENT", "UNAVAILABLE", "CANCELLED"]
        assert all(span.end_time is not None for span in spans)


async def _read(call: object) -> None:
    async for _ in call:  # type: ignore[attr-defined]
        pass
