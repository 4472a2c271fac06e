"""The router as any gRPC client meets it: no stubs of ours, no options of ours, aborts at bad moments (R094 … R102)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.errors import ResourceExhausted
from kvferry.rpc import RpcChannel, RpcServer
from kvferry.rpc.options import KEEPALIVE_TIME_MS, server_options
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import inference_pb2_grpc
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.conftest import StartRouter, ask

OUTPUT = list(range(35, 60))
INFERENCE = "kvferry.v1.InferenceService"


class Unimplemented(inference_pb2_grpc.InferenceServiceServicer):
    """For a test to put in what it calls."""

    async def Generate(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError

    async def Abort(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Tokenize(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Detokenize(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def plain_channel(address: str, **options: int) -> AsyncIterator[grpc.aio.Channel]:
    """As grpc.aio makes it, with these channel arguments alone."""
    arguments = [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(address, options=arguments) as channel:
        yield channel


# --- without stubs ---


async def test_every_service_is_healthy_by_its_name_and_an_unknown_one_is_not_found(start_router: StartRouter) -> None:
    async with (
        FakeNetwork(OUTPUT) as network,
        start_router(network) as router,
        plain_channel(router.app.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for service in await _listed(channel):
            if service.startswith("kvferry."):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="kvferry.v1.Nothing"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_client_that_knows_only_reflection_can_generate(start_router: StartRouter) -> None:
    """What grpcurl and the like do: find the service, read its files with all they import, make the messages."""
    async with (
        FakeNetwork(OUTPUT) as network,
        start_router(network) as router,
        plain_channel(router.app.address) as channel,
    ):
        assert INFERENCE in await _listed(channel)
        pool = await _described(channel, INFERENCE)
        method = pool.FindServiceByName(INFERENCE).methods_by_name["Generate"]
        request_class, response_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        request = request_class.FromString(ask(max_tokens=5).SerializeToString())
        call = channel.unary_stream(
            f"/{INFERENCE}/Generate", request_class.SerializeToString, response_class.FromString
        )(request)
        messages: list[Any] = [message async for message in call]
        assert [token_id for message in messages for token_id in message.delta.token_ids] == OUTPUT[:5]
        assert messages[-1].WhichOneof("event") == "completed"


async def _listed(channel: grpc.aio.Channel) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = await _reflected(channel, request)
    return [service.name for service in answer.list_services_response.service]


async def _described(channel: grpc.aio.Channel, symbol: str) -> DescriptorPool:
    """The file that has the symbol and what it imports, the well-known ones included."""
    files: dict[str, FileDescriptorProto] = {}

    async def fetch(request: reflection_pb2.ServerReflectionRequest) -> None:
        answer = await _reflected(channel, request)
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(data)
            files[file.name] = file
            for name in set(file.dependency) - files.keys():
                await fetch(reflection_pb2.ServerReflectionRequest(file_by_filename=name))

    await fetch(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
    pool = DescriptorPool()

    def add(name: str) -> None:
        file = files.pop(name, None)
        if file is not None:
            for dependency in file.dependency:
                add(dependency)
            pool.Add(file)

    for name in list(files):
        add(name)
    return pool


async def _reflected(
    channel: grpc.aio.Channel, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(request)
    answer = await call.read()
    await call.done_writing()
    assert isinstance(answer, reflection_pb2.ServerReflectionResponse) and not answer.HasField("error_response")
    return answer


async def test_errors_carry_their_details_in_the_standard_messages(start_router: StartRouter) -> None:
    """google.rpc.Status in the trailers: which field, of what domain, when to come again."""
    async with (
        FakeNetwork(OUTPUT) as network,
        start_router(network, max_queue=1) as router,
        plain_channel(router.app.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        status, details = await _refusal(stub, ask(max_tokens=10_000))
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        bad = next(one for one in details if isinstance(one, error_details_pb2.BadRequest))
        assert [violation.field for violation in bad.field_violations] == ["stopping.max_tokens"]
        assert bad.field_violations[0].description
        info = next(one for one in details if isinstance(one, error_details_pb2.ErrorInfo))
        assert info.reason and info.domain
        network.hold(Point.PREFILL_START)
        waiting = [asyncio.ensure_future(_refusal(stub, ask())) for _ in range(3)]
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        status, details = next(iter(done)).result()
        assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        retry = next(one for one in details if isinstance(one, error_details_pb2.RetryInfo))
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def _refusal(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, request: pb.GenerateRequest
) -> tuple[status_pb2.Status, list[object]]:
    call = stub.Generate(request)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    finally:
        call.cancel()
    data = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(data if isinstance(data, bytes) else data.encode())
    details: list[object] = []
    for one in status.details:
        kinds = (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo)
        kind = next(kind for kind in kinds if one.Is(kind.DESCRIPTOR))
        message = kind()
        one.Unpack(message)
        details.append(message)
    return status, details


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_client_may_compress(start_router: StartRouter, compression: grpc.Compression) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        async with grpc.aio.insecure_channel(router.app.address, compression=compression) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            messages = [message async for message in stub.Generate(ask(max_tokens=4))]
        assert [token_id for message in messages for token_id in message.delta.token_ids] == OUTPUT[:4]


# --- silence ---

PING_MS = 50
"""As often as the library sends them, once a second: a strict server disconnects at the third."""
SILENCE_S = 4.0


async def _survives(channel: grpc.aio.Channel, *, is_silent: bool) -> bool:
    """Whether a call, or an idle connection, lives through the silence."""
    lost = asyncio.Event()

    async def watch() -> None:
        state = channel.get_state(try_to_connect=True)
        while True:
            await channel.wait_for_state_change(state)
            was, state = state, channel.get_state()
            if was is grpc.ChannelConnectivity.READY:
                lost.set()

    task = asyncio.ensure_future(watch())
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask()) if is_silent else None
    try:
        await asyncio.wait_for(lost.wait(), SILENCE_S)
    except TimeoutError:
        return call is None or not call.done()
    finally:
        task.cancel()
        if call is not None:
            call.cancel()
    return False


PINGING = {"keepalive_time_ms": PING_MS, "keepalive_permit_without_calls": 1, "http2.max_pings_without_data": 0}


async def test_a_client_that_pings_through_a_long_silence_is_kept(start_router: StartRouter) -> None:
    """R094: a slow prefill says nothing, an idle channel neither; a server with other allowances disconnects both."""
    strict = grpc.aio.server(options=[("grpc.http2.min_recv_ping_interval_without_data_ms", 60_000)])
    port = strict.add_insecure_port("127.0.0.1:0")
    await strict.start()
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.PREFILL_START)
        async with (
            plain_channel(router.app.address, **PINGING, use_local_subchannel_pool=1) as silent,
            plain_channel(router.app.address, **PINGING, use_local_subchannel_pool=1) as idle,
            plain_channel(f"127.0.0.1:{port}", **PINGING) as refused,
        ):
            survived = await asyncio.gather(
                _survives(silent, is_silent=True), _survives(idle, is_silent=False), _survives(refused, is_silent=False)
            )
    assert tuple(survived) == (True, True, False)
    await strict.stop(None)


def test_no_server_ends_a_connection_for_its_age() -> None:
    """A stream may last longer than any age: an operator's proxy may set one, we do not."""
    names = {name for name, _ in server_options(1 << 20)}
    assert not any("max_connection" in name for name in names)
    assert dict(server_options(1 << 20))["grpc.http2.min_recv_ping_interval_without_data_ms"] < KEEPALIVE_TIME_MS


async def test_a_stream_outlives_the_age_after_which_its_connection_takes_no_other() -> None:
    """GOAWAY, as a proxy sends it: what runs goes on, and the client's next call has a new connection."""
    release = asyncio.Event()

    class Slow(Unimplemented):
        async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
            await context.write(pb.GenerateResponse(delta=pb.ChoiceDelta(text="a")))
            await release.wait()
            await context.write(pb.GenerateResponse(delta=pb.ChoiceDelta(text="b")))

    server = grpc.aio.server(options=[("grpc.max_connection_age_ms", 100)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Slow(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first = aiter(stub.Generate(ask()))
        assert (await anext(first)).delta.text == "a"
        while channel.get_state() is grpc.ChannelConnectivity.READY:  # noqa: ASYNC110 - until GOAWAY came
            await asyncio.sleep(0.02)
        second = aiter(stub.Generate(ask()))
        assert (await anext(second)).delta.text == "a"
        release.set()
        for call in (first, second):
            assert [message.delta.text async for message in call] == ["b"]
    await server.stop(None)


# --- aborts, drops, readers ---


async def test_aborts_at_any_moment_are_of_no_effect_or_end_the_request(start_router: StartRouter) -> None:
    """R097: at the last token, behind the end, twice, of an id that never was; 200 requests."""
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:

        async def abort(*names: str) -> list[str]:
            response = await router.channel.unary(router.stub.Abort, pb.AbortRequest(request_ids=names))
            return list(response.aborted_request_ids)

        async def one(number: int) -> None:
            label, aborts = f"request-{number}", list[asyncio.Task[list[str]]]()
            ids, ends = list[int](), list[pb.ChoiceFinish]()
            async with router.channel.stream(
                router.stub.Generate, ask(max_tokens=6, label=label), timeout_s=30
            ) as call:
                async for message in call:
                    ids += message.delta.token_ids
                    ends += [message.finish] if message.HasField("finish") else []
                    if len(ids) >= number % 7 and not aborts:
                        aborts = [asyncio.create_task(abort(label, f"never-{number}")) for _ in range(2)]
            assert ids == OUTPUT[: len(ids)] and len(ends) == 1 and ends[0].num_output_tokens == len(ids)
            for task in aborts:
                assert set(await task) <= {label}
            assert await abort(label) == []

        for begin in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 20)))
        await network.all_ended()
        assert router.app.serving.num_running == 0
        assert (await router.generate(ask())).token_ids == OUTPUT[:8]


async def test_twenty_slow_readers_and_one_that_is_not(start_router: StartRouter) -> None:
    """R102: what they do not take is merged and bounded, and nobody waits for them."""
    output = [*OUTPUT, *([OUTPUT[0]] * 400)]
    async with FakeNetwork(output, max_context=8192) as network, start_router(network) as router:
        calls = [aiter(router.stub.Generate(ask(max_tokens=400))) for _ in range(20)]
        for call in calls:
            await anext(call)
        await network.reached(Point.TOKEN, 1, times=20)
        assert (await router.generate(ask(max_tokens=5))).token_ids == OUTPUT[:5]
        await network.all_ended(30)
        for call in calls:
            messages = [message async for message in call]
            assert [token_id for message in messages for token_id in message.delta.token_ids] == output[:400]


async def test_prompts_of_megabytes_work_up_to_the_limit_and_end_before_any_work_above(
    start_router: StartRouter,
) -> None:
    """R099: a limit above gRPC's default is a setting; above it RESOURCE_EXHAUSTED, and the channel serves on."""
    async with (
        FakeNetwork(OUTPUT, max_context=1 << 23, num_blocks=1 << 20) as network,
        start_router(network, max_request_bytes=8 << 20) as router,
        plain_channel(router.app.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="the " * (5 << 18), stopping=pb.StoppingOptions(max_tokens=2))
        messages = [message async for message in stub.Generate(request)]
        assert messages[-1].completed.usage.completion_tokens == 2
        num_calls = len(network.calls)
        too_long = pb.GenerateRequest(text="x" * (10 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(too_long):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(network.calls) == num_calls
        assert [message async for message in stub.Generate(ask(max_tokens=1))]


async def test_a_message_beyond_the_limit_is_refused_on_the_way_back_too() -> None:
    """Both ends bound what they receive; the channel's is its own."""
    server = RpcServer()

    class Large(Unimplemented):
        async def Abort(self, request: Any, context: Any) -> pb.AbortResponse:
            return pb.AbortResponse(aborted_request_ids=["x" * (5 << 20)])

    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Large(), server.grpc)
    address = await server.start("127.0.0.1:0", [INFERENCE])
    async with RpcChannel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
        with pytest.raises(ResourceExhausted, match="larger than max"):
            await channel.unary(stub.Abort, pb.AbortRequest())
    async with RpcChannel(address, max_message_bytes=8 << 20) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
        assert len((await channel.unary(stub.Abort, pb.AbortRequest())).aborted_request_ids[0]) == 5 << 20
    await server.drain(0.1)
