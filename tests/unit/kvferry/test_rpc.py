"""Servers and channels over a real loopback connection: errors, traces, cancellation, liveness, draining."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvferryError,
    ResourceExhausted,
    Unavailable,
)
from kvferry.rpc import HeartbeatWriter, RpcChannel, RpcServer, read_with_progress_deadline
from proto.kvferry.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

INFERENCE = "kvferry.v1.InferenceService"
DECODE = "kvferry.v1.DecodeService"

UnaryHandler = Callable[[Any, Any], Awaitable[Any]]


async def _unexpected_call(request: Any, context: Any) -> Any:
    raise AssertionError("this test does not call it")


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Handlers given by the test."""

    def __init__(self, generate: UnaryHandler, abort: UnaryHandler) -> None:
        self._generate = generate
        self._abort = abort

    async def Generate(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        return await self._generate(request, context)

    async def Abort(self, request: Any, context: Any) -> Any:
        return await self._abort(request, context)

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        return inference_pb2.GetCapabilitiesResponse()

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListWorkersResponse()

    Tokenize = Detokenize = ListWorkers


class Decode(worker_pb2_grpc.DecodeServiceServicer):
    """A two-way handler given by the test."""

    def __init__(self, decode: UnaryHandler) -> None:
        self._decode = decode

    async def Decode(self, request_iterator: Any, context: Any) -> Any:  # type: ignore[override]
        return await self._decode(request_iterator, context)


@dataclass
class Loopback:
    server: RpcServer
    channel: RpcChannel
    spans: InMemorySpanExporter
    address: str
    inference: inference_pb2_grpc.InferenceServiceAsyncStub
    decode: worker_pb2_grpc.DecodeServiceAsyncStub


@asynccontextmanager
async def loopback(
    *,
    generate: UnaryHandler = _unexpected_call,
    abort: UnaryHandler = _unexpected_call,
    decode: UnaryHandler = _unexpected_call,
    max_message_bytes: int = 4 << 20,
    background_methods: frozenset[str] = frozenset(),
) -> AsyncIterator[Loopback]:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("test")
    server = RpcServer(tracer=tracer, max_message_bytes=max_message_bytes, background_methods=background_methods)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(generate, abort), server.grpc)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(Decode(decode), server.grpc)
    address = await server.start("127.0.0.1:0", [INFERENCE, DECODE])
    async with RpcChannel(address, tracer=tracer) as channel:
        inference = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
        decode_stub = worker_pb2_grpc.DecodeServiceStub(channel.grpc)
        try:
            yield Loopback(server, channel, spans, address, inference, decode_stub)
        finally:
            await server.drain(0)


def _raises(error: BaseException) -> UnaryHandler:
    async def handler(request: Any, context: Any) -> Any:
        raise error

    return handler


def _delta(text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=inference_pb2.ChoiceDelta(text=text))


def _by_kind(spans: InMemorySpanExporter) -> dict[trace.SpanKind, ReadableSpan]:
    return {span.kind: span for span in spans.get_finished_spans()}


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "error", [InvalidArgument("prompt", "must not be empty"), ResourceExhausted("full", retry_after_s=2.0)]
)
async def test_errors_of_unary_calls_arrive_whole(error: KvferryError) -> None:
    async with loopback(abort=_raises(error)) as loop:
        with pytest.raises(type(error)) as caught:
            await loop.channel.unary(loop.inference.Abort, inference_pb2.AbortRequest())
    assert (caught.value.message, caught.value.field) == (error.message, error.field)
    assert caught.value.retry_after_s == error.retry_after_s


async def test_errors_in_mid_stream_arrive_whole_after_the_messages_before_them() -> None:
    async def generate(request: Any, context: Any) -> None:
        await context.write(_delta("a"))
        raise Unavailable("decode worker d-1 is gone")

    async with loopback(generate=generate) as loop:
        texts = []
        with pytest.raises(Unavailable, match="d-1 is gone"):
            async with loop.channel.stream(loop.inference.Generate, inference_pb2.GenerateRequest()) as call:
                async for response in call:
                    texts.append(response.delta.text)
    assert texts == ["a"]


async def test_unexpected_errors_do_not_leak_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with loopback(abort=_raises(ValueError("secret path /x"))) as loop:
        with pytest.raises(Internal) as caught:
            await loop.channel.unary(loop.inference.Abort, inference_pb2.AbortRequest())
    assert "secret" not in caught.value.message
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == ["rpc_failed"]
    assert errors[0].exc_info is not None


async def test_messages_above_the_limit_are_refused_before_the_handler() -> None:
    async with loopback(max_message_bytes=10_000) as loop:
        with pytest.raises(ResourceExhausted, match="larger than max"):
            await loop.channel.unary(loop.inference.Abort, inference_pb2.AbortRequest(request_ids=["x" * 20_000]))


async def test_port_in_use_is_a_clear_error() -> None:
    async with loopback() as loop:
        second = RpcServer()
        with pytest.raises(FailedPrecondition, match=f"cannot listen on {loop.address}: Address already in use"):
            await second.start(loop.address, [])


@pytest.mark.parametrize("listen", ["nonsense", ":", "host:", "127.0.0.1:http", "127.0.0.1:99999"])
async def test_listen_addresses_are_checked(listen: str) -> None:
    server = RpcServer()
    with pytest.raises(FailedPrecondition, match="must be host:port"):
        await server.start(listen, [])


async def test_peer_that_is_not_there_is_named() -> None:
    async with RpcChannel("127.0.0.1:1") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await channel.unary(stub.Abort, inference_pb2.AbortRequest(), timeout_s=10)


# ---------------------------------------------------------------------------------------------- health, reflection


async def test_health_and_reflection_answer() -> None:
    async with loopback() as loop:
        health = health_pb2_grpc.HealthStub(loop.channel.grpc)
        for service in ("", INFERENCE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await loop.server.set_serving(False)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(loop.channel.grpc).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
        call.cancel()
    assert {INFERENCE, DECODE} <= {service.name for service in response.list_services_response.service}


# ----------------------------------------------------------------------------------------------------------- traces


async def test_trace_goes_from_caller_through_handler_to_its_children() -> None:
    async def abort(request: Any, context: Any) -> inference_pb2.AbortResponse:
        ids = [trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)]
        return inference_pb2.AbortResponse(aborted_request_ids=ids)

    async with loopback(abort=abort) as loop:
        first = await loop.channel.unary(loop.inference.Abort, inference_pb2.AbortRequest())
        first_spans = _by_kind(loop.spans)
        loop.spans.clear()
        second = await loop.channel.unary(loop.inference.Abort, inference_pb2.AbortRequest())
    client, server = first_spans[trace.SpanKind.CLIENT], first_spans[trace.SpanKind.SERVER]
    assert client.context is not None
    assert server.parent is not None
    assert server.parent.span_id == client.context.span_id
    assert server.name == f"{INFERENCE}/Abort"
    assert first.aborted_request_ids == [trace.format_trace_id(client.context.trace_id)]
    assert second.aborted_request_ids != first.aborted_request_ids  # nothing of the first call stayed behind


@pytest.mark.parametrize("header", [None, "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_without_a_valid_header_there_is_exactly_one_trace(header: str | None) -> None:
    async def abort(request: Any, context: Any) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse()

    async with loopback(abort=abort) as loop, grpc.aio.insecure_channel(loop.address) as bare:
        metadata = grpc.aio.Metadata(("traceparent", header)) if header else grpc.aio.Metadata()
        stub = inference_pb2_grpc.InferenceServiceStub(bare)
        await stub.Abort(inference_pb2.AbortRequest(), metadata=metadata)
    (span,) = loop.spans.get_finished_spans()
    assert span.parent is None


@pytest.mark.parametrize("kind", ["refused", "cancelled", "failed"])
async def test_spans_of_calls_that_did_not_end_well_say_why(kind: str) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def generate(request: Any, context: Any) -> None:
        if kind == "refused":
            raise InvalidArgument("prompt", "must not be empty")
        if kind == "failed":
            raise ValueError("fault")
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with loopback(generate=generate) as loop:
        request = inference_pb2.GenerateRequest()
        if kind == "cancelled":
            async with loop.channel.stream(loop.inference.Generate, request):
                await started.wait()
            await ended.wait()
        else:
            with pytest.raises(KvferryError):
                async with loop.channel.stream(loop.inference.Generate, request) as call:
                    await call.read()
    reasons = {"refused": "INVALID_ARGUMENT", "cancelled": "CANCELLED", "failed": "INTERNAL"}
    server = _by_kind(loop.spans)[trace.SpanKind.SERVER]
    assert server.attributes is not None
    assert server.attributes["error.type"] == reasons[kind]


# ----------------------------------------------------------------------------------------------------- cancellation


async def test_leaving_the_block_ends_the_handler_and_all_spans_200_times(caplog: pytest.LogCaptureFixture) -> None:
    """R095, R104: the caller reads three messages and leaves; no handler stays, no span stays open, no complaints."""
    running = 0
    idle = asyncio.Event()

    async def generate(request: Any, context: Any) -> None:
        nonlocal running
        running += 1
        try:
            while True:
                await context.write(_delta("x"))
        finally:
            running -= 1
            if running == 0:
                idle.set()

    async def one(loop: Loopback) -> None:
        async with loop.channel.stream(loop.inference.Generate, inference_pb2.GenerateRequest()) as call:
            for _ in range(3):
                await call.read()

    async with loopback(generate=generate) as loop:
        for _ in range(10):
            idle.clear()
            await asyncio.gather(*(one(loop) for _ in range(20)))
            async with asyncio.timeout(5):
                await idle.wait()
    assert running == 0
    # A call cancelled before its handler was chosen has no server span; every handler that ran has one.
    kinds = [span.kind for span in loop.spans.get_finished_spans()]
    assert kinds.count(trace.SpanKind.CLIENT) == 200
    assert kinds.count(trace.SpanKind.SERVER) == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_writing_to_a_call_that_was_refused_raises_its_status() -> None:
    async def decode(request_iterator: Any, context: Any) -> None:
        raise FailedPrecondition("block_size: 16 here, 32 there")

    async with loopback(decode=decode) as loop:
        with pytest.raises(FailedPrecondition, match="block_size"):
            async with loop.channel.duplex(loop.decode.Decode) as call:
                while True:
                    await call.write(worker_pb2.DecodeRequest())


async def test_writing_to_a_call_that_ended_early_is_unavailable() -> None:
    async def decode(request_iterator: Any, context: Any) -> None:
        return None

    async with loopback(decode=decode) as loop:
        with pytest.raises(Unavailable, match="ended the stream early"):
            async with loop.channel.duplex(loop.decode.Decode) as call:
                while True:
                    await call.write(worker_pb2.DecodeRequest())


# --------------------------------------------------------------------------------------------------------- liveness


async def test_silence_is_unavailable_for_the_caller() -> None:
    async def generate(request: Any, context: Any) -> None:
        await context.write(_delta("x"))
        await asyncio.Event().wait()

    async with loopback(generate=generate) as loop:
        with pytest.raises(Unavailable, match=r"p-1 made no progress for 0\.05 s"):
            async with loop.channel.stream(loop.inference.Generate, inference_pb2.GenerateRequest()) as call:
                assert await read_with_progress_deadline(call, 0.05, "p-1") == _delta("x")
                await read_with_progress_deadline(call, 0.05, "p-1")


async def test_silence_is_unavailable_for_the_handler_and_its_status_arrives() -> None:
    async def decode(request_iterator: Any, context: Any) -> None:
        await read_with_progress_deadline(context, 0.05, "the router")

    async with loopback(decode=decode) as loop:
        with pytest.raises(Unavailable, match="the router made no progress"):
            async with loop.channel.duplex(loop.decode.Decode) as call:
                await call.read()


async def test_heartbeats_keep_a_silent_stream_alive_and_end_with_their_block() -> None:
    beat = worker_pb2.DecodeResponse(heartbeat=worker_pb2.Heartbeat())
    last = worker_pb2.DecodeResponse(committed=worker_pb2.Committed(attempt=7))
    release = asyncio.Event()

    async def decode(request_iterator: Any, context: Any) -> None:
        writer = HeartbeatWriter(context.write, lambda: beat, interval_s=0.02, stall_timeout_s=5)
        async with writer:
            await release.wait()
            await writer.write(last)

    async with loopback(decode=decode) as loop, loop.channel.duplex(loop.decode.Decode) as call:
        for _ in range(3):
            assert await read_with_progress_deadline(call, 5) == beat
        release.set()
        rest = []
        while (message := await read_with_progress_deadline(call, 5)) is not None:
            rest.append(message)
    assert rest[-1] == last


async def test_writer_notices_a_peer_that_takes_nothing() -> None:
    async def never(message: int) -> None:
        await asyncio.Event().wait()

    writer = HeartbeatWriter(never, lambda: 0, interval_s=60, stall_timeout_s=0.05, peer="d-1")
    async with writer:
        with pytest.raises(Unavailable, match=r"d-1 took nothing for 0\.05 s"):
            await writer.write(1)


# --------------------------------------------------------------------------------------------------------- draining


async def test_drain_waits_for_running_calls() -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def abort(request: Any, context: Any) -> inference_pb2.AbortResponse:
        started.set()
        await release.wait()
        return inference_pb2.AbortResponse(aborted_request_ids=["done"])

    async with loopback(abort=abort) as loop:
        call = asyncio.create_task(loop.channel.unary(loop.inference.Abort, inference_pb2.AbortRequest()))
        await started.wait()
        drain = asyncio.create_task(loop.server.drain(grace_s=30))
        health = health_pb2_grpc.HealthStub(loop.channel.grpc)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        release.set()
        assert (await call).aborted_request_ids == ["done"]
        async with asyncio.timeout(5):
            await drain


@pytest.mark.parametrize("how", ["grace", "hurry", "background"])
async def test_what_outlasts_the_drain_ends_with_a_status(how: str) -> None:
    """R093, R151: not a reset, but UNAVAILABLE with a reason; a second signal cuts the grace short."""
    started = asyncio.Event()

    async def generate(request: Any, context: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    background = frozenset({"Generate"} if how == "background" else ())
    async with loopback(generate=generate, background_methods=background) as loop:
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable, match="the server is shutting down"):
                async with loop.channel.stream(loop.inference.Generate, inference_pb2.GenerateRequest()) as call:
                    await started.wait()
                    hurry = asyncio.Event()
                    drain = asyncio.create_task(loop.server.drain(0.05 if how == "grace" else 60, hurry))
                    if how == "hurry":
                        hurry.set()
                    await call.read()
            await drain
