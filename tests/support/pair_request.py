"""One request at a pair of workers whose two calls, each on a channel of its own, a test may end apart."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import grpc.aio

from kvferry.errors import KvferryError
from kvferry.rpc import HeartbeatWriter, RpcChannel
from kvferry.spec import SequenceSpec
from kvferry.wire import spec_to_pb
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from tests.support.workers import PairCaller, PairResult, until


class Ending(enum.Enum):
    """Who ends a request, and how."""

    PREFILL = "the prefill call is cancelled"
    DECODE = "the decode call is cancelled"
    BOTH = "both calls are cancelled"
    CHANNELS = "both channels are closed"


class PairRequest:
    """A request under way, from its construction on.

    Attributes:
        result: what came so far.
        registered: decode's answer, once it is there.
        decode: the Decode call; done when the request finished, failed or was ended.
        prefill: the Prefill call, which begins when decode has answered.
    """

    def __init__(
        self,
        prefill_address: str,
        decode_address: str,
        spec: SequenceSpec,
        *,
        timeout_s: float = 5.0,
        local_prefill: bool = False,
    ) -> None:
        self.spec = spec
        self.result = PairResult()
        self.registered: asyncio.Future[worker_pb2.Registered] = asyncio.get_running_loop().create_future()
        self._local_prefill = local_prefill
        self._timeout_s = timeout_s
        # Decode's first token is the one after prefill's; with local prefill it is the first of all.
        self._next_index = len(spec.token_ids) - spec.num_prompt_tokens + (not local_prefill)
        self._channels = RpcChannel(prefill_address), RpcChannel(decode_address)
        self.decode = asyncio.ensure_future(self._decode())
        self.prefill = asyncio.ensure_future(self._prefill())
        for call in (self.decode, self.prefill):
            call.add_done_callback(_retrieve)  # the test may not ask

    async def finished(self, timeout_s: float = 30.0) -> PairResult:
        """The whole result; raises what the request failed with, and TimeoutError where it hangs."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(self.decode, self.prefill)
        finally:
            await self.end(Ending.CHANNELS)
        return self.result

    async def has_tokens(self, num_tokens: int) -> None:
        """Returns when so many have come."""
        await until(lambda: len(self.result.token_ids) >= num_tokens)

    async def end(self, ending: Ending) -> None:
        """Ends the calls in this way and waits for those it ends; without effect on calls that are over."""
        if ending is Ending.CHANNELS:
            await asyncio.gather(*(channel.close() for channel in self._channels))
        chosen = {Ending.PREFILL: [self.prefill], Ending.DECODE: [self.decode]}.get(ending, [self.prefill, self.decode])
        for call in chosen:
            call.cancel()
        await asyncio.gather(*chosen, return_exceptions=True)

    async def _decode(self) -> None:
        try:
            await self._talk_to_decode()
        except asyncio.CancelledError:
            if self.result.finish is None:
                raise
        finally:
            self.registered.cancel()  # of no effect once it is answered; else nobody will

    async def _talk_to_decode(self) -> None:
        stub = worker_pb2_grpc.DecodeServiceStub(self._channels[1].grpc)
        async with self._channels[1].duplex(stub.Decode) as call:
            writer = HeartbeatWriter(
                call.write, _heartbeat, interval_s=self._timeout_s / 4, stall_timeout_s=self._timeout_s
            )
            async with writer:
                await writer.write(worker_pb2.DecodeRequest(start=self._start()))
                while self.result.finish is None:
                    message: Any = await call.read()
                    assert message is not grpc.aio.EOF, "decode ended the stream before its finish"
                    self._take(message)

    def _start(self) -> worker_pb2.DecodeStart:
        return worker_pb2.DecodeStart(
            sequence=spec_to_pb(self.spec), local_prefill=self._local_prefill, progress_timeout_s=self._timeout_s
        )

    def _take(self, message: worker_pb2.DecodeResponse) -> None:
        match message.WhichOneof("event"):
            case "registered":
                self.registered.set_result(message.registered)
            case "committed":
                self.result.committed = message.committed
            case "tokens":
                assert message.tokens.token_index == self._next_index, "a token is lost, doubled or out of order"
                self._next_index += len(message.tokens.token_ids)
                self.result.take_tokens(message.tokens)

    async def _prefill(self) -> None:
        if self._local_prefill:
            return
        registered = await asyncio.shield(self.registered)
        caller = PairCaller(*self._channels, timeout_s=self._timeout_s)
        await caller.prefill(self.spec, registered, self.result)
        if self.result.committed is None and self.result.finish is not None:  # the first token was the last
            self.decode.cancel()


def _retrieve(call: asyncio.Future[None]) -> None:
    if not call.cancelled():
        call.exception()


def _heartbeat() -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(heartbeat=worker_pb2.Heartbeat())


async def failure_of(call: asyncio.Future[None], timeout_s: float = 10.0) -> KvferryError:
    """What a call that must fail by itself failed with."""
    async with asyncio.timeout(timeout_s):
        await asyncio.wait([call])
    error = call.exception()
    assert isinstance(error, KvferryError), error
    return error
