"""Spans, drop counting, buckets and log lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from kvferry.config import TelemetryConfig
from kvferry.errors import Unavailable
from kvferry.telemetry import (
    THIRD_PARTY_LEVELS,
    CountingExporter,
    Metrics,
    configure_logging,
    log_event,
    start_telemetry,
)


class BlackHole(SpanExporter):
    """Takes a batch and does not come back until released; then says it failed."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.released.set()


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in THIRD_PARTY_LEVELS}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, its_level in levels.items():
        logging.getLogger(name).setLevel(its_level)


async def test_spans_carry_service_and_parent() -> None:
    exporter = InMemorySpanExporter()
    telemetry = start_telemetry(TelemetryConfig(), "router", "r-1", exporter=exporter)
    with telemetry.span("outer", attributes={"kvferry.tier": "batch"}) as outer:
        context = trace.set_span_in_context(outer)
        with pytest.raises(Unavailable), telemetry.span("inner", parent=context):
            raise Unavailable("gone")
    await telemetry.shutdown()
    inner_span, outer_span = exporter.get_finished_spans()
    assert inner_span.parent is not None
    assert outer_span.context is not None
    assert inner_span.parent.span_id == outer_span.context.span_id
    assert inner_span.attributes == {"error.type": "UNAVAILABLE"}
    assert outer_span.attributes == {"kvferry.tier": "batch"}
    assert outer_span.resource.attributes["service.name"] == "kvferry-router"
    assert outer_span.resource.attributes["service.instance.id"] == "r-1"


def _num_dropped(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("kvferry_spans_dropped_total") or 0.0


async def test_dead_collector_neither_blocks_nor_hides_what_is_lost() -> None:
    """R110: with the collector black-holed, spans end at once and every lost one is counted."""
    exporter = BlackHole()
    telemetry = start_telemetry(TelemetryConfig(max_queued_spans=100), "router", "r", exporter=exporter)
    for _ in range(500):
        telemetry.tracer.start_span("x").end()
    assert _num_dropped(telemetry.metrics) == 400
    exporter.released.set()
    await telemetry.shutdown()
    assert _num_dropped(telemetry.metrics) == 500


async def test_unreachable_collector_does_not_hold_up_the_end() -> None:
    config = TelemetryConfig(otlp_endpoint="127.0.0.1:1")
    telemetry = start_telemetry(config, "router", "r")
    telemetry.tracer.start_span("x").end()
    async with asyncio.timeout(10):
        await telemetry.shutdown()


def test_buckets_are_those_of_the_conventions() -> None:
    metrics = Metrics()
    metrics.request_duration_s.labels("m", "batch", "").observe(0.02)
    text = generate_latest(metrics.registry).decode()
    assert 'gen_ai_server_request_duration_seconds_bucket{error_type="",' in text
    assert 'le="81.92"' in text
    assert Metrics().registry.get_sample_value("kvferry_requests_running") == 0


@pytest.mark.usefixtures("root_logger")
def test_json_events_have_fields_and_trace_id() -> None:
    stream = io.StringIO()
    configure_logging(TelemetryConfig(log_format="json"), "decode", "d-1", stream)
    span = start_telemetry(TelemetryConfig(), "decode", "d-1").tracer.start_span("x")
    token = attach(trace.set_span_in_context(span))
    try:
        log_event(logging.getLogger("some.module"), "sequence_preempted", num_blocks=3, reason="no room")
    finally:
        detach(token)
    event = json.loads(stream.getvalue())
    assert event["event"] == "sequence_preempted"
    assert (event["service"], event["instance"], event["level"]) == ("decode", "d-1", "info")
    assert (event["num_blocks"], event["reason"]) == (3, "no room")
    assert int(event["trace_id"], 16) == span.get_span_context().trace_id


@pytest.mark.usefixtures("root_logger")
def test_logfmt_is_one_line_an_event_even_with_a_traceback() -> None:
    stream = io.StringIO()
    configure_logging(TelemetryConfig(log_format="logfmt", log_level="warning"), "router", "", stream)
    logger = logging.getLogger("m")
    log_event(logger, "below_the_level")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed", extra={"fields": {"note": 'a "quoted" text', "n": 1.5, "on": True}})
    (line,) = stream.getvalue().splitlines()
    assert 'note="a \\"quoted\\" text" n=1.5 on=true exception="Traceback' in line
    assert "event=failed" in line


@pytest.mark.usefixtures("root_logger")
def test_debug_shows_our_events_and_not_those_of_libraries() -> None:
    stream = io.StringIO()
    configure_logging(TelemetryConfig(log_format="json", log_level="debug"), "router", "", stream)
    for name in ("grpc._cython.cygrpc", "asyncio", "urllib3.connectionpool", "transformers.x", "opentelemetry.sdk"):
        logging.getLogger(name).info("chatter")
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").error("Failed to export traces")
    log_event(logging.getLogger("kvferry.x"), "ours", level=logging.DEBUG)
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "ours"


class FailingExporter(SpanExporter):
    """Takes nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


@pytest.mark.usefixtures("root_logger")
def test_failing_exports_are_one_event_a_minute_with_a_count() -> None:
    stream = io.StringIO()
    configure_logging(TelemetryConfig(log_format="json"), "router", "", stream)
    now_s = 100.0
    exporter = CountingExporter(FailingExporter(), lambda number: None, lambda number: None, now_s=lambda: now_s)
    span = ReadableSpan("x")
    exporter.export([span] * 3)
    now_s += 59
    exporter.export([span] * 2)
    now_s += 1
    exporter.export([span] * 4)
    exporter.export([span])
    exporter.shutdown()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["num_spans"]) for line in lines] == [
        ("traces_not_exported", 3),
        ("traces_not_exported", 6),
        ("traces_not_exported", 1),
    ]
