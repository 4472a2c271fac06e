"""A collector for the spans of a deployment that is being measured: OTLP over gRPC, kept in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """One ended span; times are of the machine's clock."""

    name: str
    trace_id: bytes
    start_ns: int
    end_ns: int


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what processes export to `address`; complete once they have ended."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.spans: list[RecordedSpan] = []

    async def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, _context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    times = span.start_time_unix_nano, span.end_time_unix_nano
                    self.spans.append(RecordedSpan(span.name, span.trace_id, *times))
        return trace_service_pb2.ExportTraceServiceResponse()

    def by_trace(self) -> dict[bytes, list[RecordedSpan]]:
        """Spans of each request."""
        traces: dict[bytes, list[RecordedSpan]] = {}
        for span in self.spans:
            traces.setdefault(span.trace_id, []).append(span)
        return traces


@asynccontextmanager
async def collecting_spans() -> AsyncIterator[SpanCollector]:
    """A collector that listens for the length of the block."""
    server = grpc.aio.server()
    collector = SpanCollector(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # has no annotations
    add(collector, server)
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
