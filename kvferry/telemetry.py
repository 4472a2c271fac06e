"""Traces, metrics and logs of one process: set up once by its entry point, handed down as a `Telemetry` object.

Names follow OpenTelemetry's GenAI and RPC conventions where they exist; `kvferry.` is our namespace for the rest. Spans
of calls are named after the method (`kvferry.v1.DecodeService/Decode`), at both ends; below them lie ours, `SpanNames`.
Prompts, outputs and secrets are in none of them.

Exporting never holds up a request: spans go into a bounded queue that a thread empties; what does not fit, or what the
collector does not take, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TextIO

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.config import TelemetryConfig

EXPORT_BATCH_SPANS = 256
EXPORT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 3.0
"""How long a process that ends waits for its last spans."""


EXPORT_REPORT_INTERVAL_S = 60.0
"""A collector that is away is an event at most this often."""
THIRD_PARTY_LEVELS = {
    **dict.fromkeys(("grpc", "asyncio", "urllib3", "transformers", "uvicorn"), logging.WARNING),
    "opentelemetry": logging.ERROR,  # its warnings about dropped spans: we count them
    "opentelemetry.exporter": logging.CRITICAL,  # its errors, one a try: `traces_not_exported` stands for them
}
"""Least levels of the libraries' loggers: `telemetry.log_level` is for our own events."""

logger = logging.getLogger(__name__)


class SpanNames:
    """Names of our own spans; spans of calls are called after their method."""

    PROMPT = "kvferry.prompt"
    TOKENIZE = "kvferry.tokenize"
    QUEUE = "kvferry.queue"
    PREFILL_CHUNK = "kvferry.prefill.chunk"
    GRANT = "kvferry.grant"
    SHIP = "kvferry.ship"
    RESTORE = "kvferry.restore"
    COMMIT = "kvferry.commit"
    DECODE = "kvferry.decode"


class Attributes:
    """Names of span attributes."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_SEED = "gen_ai.request.seed"
    REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
    RESPONSE_ID = "gen_ai.response.id"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    RPC_SYSTEM = "rpc.system.name"
    RPC_METHOD = "rpc.method"
    RPC_STATUS = "rpc.response.status_code"
    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    END_USER_ID = "enduser.id"
    SERVER_ADDRESS = "server.address"
    SERVER_PORT = "server.port"
    ERROR_TYPE = "error.type"
    REQUEST_ID = "kvferry.request.id"
    ATTEMPT = "kvferry.attempt"
    CHOICE = "kvferry.choice"
    MOVED_FROM = "kvferry.moved_from"
    TIER = "kvferry.tier"
    NUM_TOKENS = "kvferry.num_tokens"
    NUM_BLOCKS = "kvferry.num_blocks"
    NUM_BLOCKS_REUSED = "kvferry.num_blocks_reused"
    NUM_BYTES = "kvferry.num_bytes"
    NUM_NACKS = "kvferry.num_nacks"
    NUM_PREEMPTIONS = "kvferry.num_preemptions"
    NUM_ACCEPTED_TOKENS = "kvferry.num_accepted_tokens"
    BLOCK_INDEX = "kvferry.block_index"
    FAULT_KIND = "kvferry.fault.kind"
    TRANSPORT = "kvferry.transport"
    TIME_TO_FIRST_TOKEN_S = "kvferry.time_to_first_token_s"


# Bounds in seconds that the conventions prescribe.
REQUEST_DURATION_BUCKETS_S = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Metrics:
    """Instruments of one process, on a registry of its own; the HTTP gateway renders `registry`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        served = ("gen_ai_request_model", "kvferry_tier")
        self.request_duration_s = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Request received to the end.",
            (*served, "error_type"),
            buckets=REQUEST_DURATION_BUCKETS_S,
            registry=registry,
        )
        self.time_to_first_token_s = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Request received to first token sent.",
            served,
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.time_per_output_token_s = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per output token after the first.",
            served,
            buckets=OUTPUT_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.tokens = Counter("kvferry_tokens", "Tokens of ended requests.", ("kind", "tenant"), registry=registry)
        self.requests_running = Gauge("kvferry_requests_running", "Requests in flight.", registry=registry)
        self.retries = Counter("kvferry_retries", "Attempts after the first.", ("reason",), registry=registry)
        self.spans_dropped = Counter("kvferry_spans_dropped", "Spans that reached no collector.", registry=registry)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a process needs to be seen. Ends with `shutdown`."""

    tracer: Tracer
    metrics: Metrics
    provider: TracerProvider

    def span(
        self, name: str, *, parent: Context | None = None, attributes: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Span]:
        """A span around a piece of synchronous or asynchronous work, under the running task's span or `parent`.

        Not made current: nothing is attached to the task, so it may be left in any task and in any way.
        """
        return _SpanBlock(self.tracer.start_span(name, context=parent, attributes=attributes))

    async def shutdown(self) -> None:
        """Sends what is queued, for at most FLUSH_TIMEOUT_S; a dead collector does not keep the process."""
        thread = threading.Thread(target=self.provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_TIMEOUT_S)


def context_of(span: Span) -> Context:
    """What `parent=` takes: the context in which `span` is the parent."""
    return trace.set_span_in_context(span)


class _SpanBlock(AbstractContextManager[Span]):
    """Ends a span, and marks it with the exception that left the block."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        return self._span

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            mark_error(self._span, error)
        self._span.end()


def mark_error(span: Span, error: BaseException) -> None:
    """Status and error.type of a span that `error` ended. The message of an unexpected exception stays out of it."""
    span.set_attribute(Attributes.ERROR_TYPE, error_type(error))
    span.set_status(Status(StatusCode.ERROR, error_type(error)))


def error_type(error: BaseException) -> str:
    """The name metrics and spans give an error: its reason if it is ours, else its class."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return str(getattr(error, "reason", type(error).__name__))


def start_telemetry(
    config: TelemetryConfig, service: str, instance: str, *, exporter: SpanExporter | None = None
) -> Telemetry:
    """Telemetry of a process called `service` (`router`, `prefill`, …), `instance` being its worker id.

    `exporter` stands in for OTLP (tests, demos). Without one and without an endpoint no span is kept anywhere.
    """
    name = f"{config.service_namespace}-{service}"
    resource = Resource.create(
        {
            "service.name": name,
            "service.namespace": config.service_namespace,
            "service.instance.id": instance,
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    metrics = Metrics()
    chosen = exporter or _otlp_exporter(config)
    if chosen is not None:
        provider.add_span_processor(BoundedSpanProcessor(chosen, config.max_queued_spans, metrics.spans_dropped.inc))
    return Telemetry(provider.get_tracer("kvferry"), metrics, provider)


def _otlp_exporter(config: TelemetryConfig) -> SpanExporter | None:
    if config.otlp_endpoint is None:
        return None
    insecure = not config.otlp_endpoint.startswith("https://")
    return OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)


class BoundedSpanProcessor(SpanProcessor):
    """A batch processor that counts what it drops: spans beyond the bound and spans the exporter failed to deliver."""

    def __init__(self, exporter: SpanExporter, max_queued: int, count_dropped: Callable[[float], None]) -> None:
        self._max_queued = max_queued
        self._count_dropped = count_dropped
        self._num_queued = 0
        self._lock = threading.Lock()
        counting = CountingExporter(exporter, self._handed_over, count_dropped)
        # Room beyond our own bound, which therefore decides alone.
        room = max_queued + EXPORT_BATCH_SPANS
        self._batches = BatchSpanProcessor(
            counting, max_queue_size=room, schedule_delay_millis=500, max_export_batch_size=EXPORT_BATCH_SPANS
        )

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            has_room = self._num_queued < self._max_queued
            self._num_queued += has_room
        if has_room:
            self._batches.on_end(span)
        else:
            self._count_dropped(1)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._batches.force_flush(timeout_millis)

    def _handed_over(self, num_spans: int) -> None:
        with self._lock:
            self._num_queued -= num_spans


class CountingExporter(SpanExporter):
    """Passes batches on; tells how many left the queue and how many were lost, the latter also as an event."""

    def __init__(
        self,
        exporter: SpanExporter,
        handed_over: Callable[[int], None],
        count_dropped: Callable[[float], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exporter = exporter
        self._handed_over = handed_over
        self._count_dropped = count_dropped
        self._now_s = now_s
        self._num_unreported = 0
        self._next_report_s = now_s()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - any failure of an exporter is a failed export, and the thread must live
            result = SpanExportResult.FAILURE
        self._handed_over(len(spans))
        if result is not SpanExportResult.SUCCESS:
            self._count_dropped(len(spans))
            self._num_unreported += len(spans)
            if self._now_s() >= self._next_report_s:
                self._report()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        if self._num_unreported:
            self._report()

    def _report(self) -> None:
        log_event(logger, "traces_not_exported", level=logging.WARNING, num_spans=self._num_unreported)
        self._num_unreported = 0
        self._next_report_s = self._now_s() + EXPORT_REPORT_INTERVAL_S


def configure_logging(config: TelemetryConfig, service: str, instance: str = "", stream: TextIO | None = None) -> None:
    """Makes the root logger write one structured line an event to `stream` (standard error)."""
    target = stream or sys.stderr
    as_json = config.log_format == "json" or (config.log_format == "auto" and not target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(EventFormatter(service, instance, as_json=as_json))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    for name, level in THIRD_PARTY_LEVELS.items():
        logging.getLogger(name).setLevel(level)


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """One event. `fields` are plain values; never prompts, outputs or secrets. Trace and span id are added."""
    logger.log(level, event, extra={"fields": fields})


class EventFormatter(logging.Formatter):
    """JSON, or `key=value` for people."""

    def __init__(self, service: str, instance: str, *, as_json: bool) -> None:
        super().__init__()
        self._origin = {"service": service, **({"instance": instance} if instance else {})}
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self._origin,
            "logger": record.name,
            **_trace_fields(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return _as_json(event) if self._as_json else " ".join(f"{key}={_logfmt(event[key])}" for key in event)


def _trace_fields() -> dict[str, str]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def _as_json(event: Mapping[str, object]) -> str:
    return json.dumps(event, default=str, ensure_ascii=False)


def _logfmt(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text and all(sign.isprintable() and sign not in ' "=' for sign in text)
    return text if plain else json.dumps(text, ensure_ascii=False)
