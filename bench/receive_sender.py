"""The sending process of `bench/receive.py`: to a decode worker it is a prefill worker that ships at a set rate.

Registers attempts with the worker, ships every granted block through the product's transport, and ends each attempt
without a commit, so that nothing is decoded for it. Ships between the lines `start` and `stop` on its standard input,
answers each with `done`, and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.transfer import opened_transports
from bench.transfer_receiver import BlockPool
from kvferry.block_hash import hash_blocks, hash_root
from kvferry.errors import Cancelled
from kvferry.host_memory import keep_message_buffers
from kvferry.kv_layout import KvLayout
from kvferry.rpc import HeartbeatWriter, RpcChannel, run
from kvferry.sampling import SamplingParams
from kvferry.spec import AttemptId, SequenceSpec
from kvferry.supervisor import WORKER_NICENESS
from kvferry.wire import layout_from_pb, spec_to_pb
from kvtransfer.messages import Offer
from kvtransfer.sender import ShipSender
from kvtransfer.transport import CancelShipment, ShipEvent, ShipTransport, TokensComputed
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc

NUM_AT_ONCE = 4
"""Attempts under way: while some wait for their grant, which is made between two steps, others ship."""
BLOCKS_PER_ATTEMPT = 96
PROGRESS_TIMEOUT_S = 30.0
LAST_BLOCK_S = 0.1
"""From the reading of an attempt's last block to its end: time to arrive."""
MAX_LAG_S = 0.5
"""What could not be sent in time is caught up with, but no more than this."""


async def heard_from(channel: RpcChannel) -> worker_pb2.WatchResponse:
    """A worker's status now."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel.grpc)
    request = worker_pb2.WatchRequest(progress_timeout_s=PROGRESS_TIMEOUT_S)
    async with channel.stream(stub.Watch, request) as call:
        async for status in call:
            return status
    raise AssertionError("a watch begins with a status")


@asynccontextmanager
async def decoding(channel: RpcChannel, spec: SequenceSpec, *, local_prefill: bool) -> AsyncIterator[Any]:
    """A Decode call, begun and kept alive; leaving the block ends the attempt."""
    stub = worker_pb2_grpc.DecodeServiceStub(channel.grpc)
    start = worker_pb2.DecodeStart(
        sequence=spec_to_pb(spec), local_prefill=local_prefill, progress_timeout_s=PROGRESS_TIMEOUT_S
    )
    async with (
        channel.duplex(stub.Decode) as call,
        HeartbeatWriter(
            call.write,
            lambda: worker_pb2.DecodeRequest(heartbeat=worker_pb2.Heartbeat()),
            interval_s=PROGRESS_TIMEOUT_S / 4,
            stall_timeout_s=PROGRESS_TIMEOUT_S,
        ) as writer,
    ):
        await writer.write(worker_pb2.DecodeRequest(start=start))
        yield call


class _Pacer:
    """Turns at a set rate, shared by all shipments."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_s = max(self._next_s + self._interval_s, loop.time() - MAX_LAG_S)
        if (wait_s := self._next_s - loop.time()) > 0:
            await asyncio.sleep(wait_s)


class _Source:
    """The blocks of one prompt, from block `first` of the pool on (`kvtransfer.transport.BlockSource`)."""

    def __init__(self, pool: BlockPool, first: int, digests: list[bytes]) -> None:
        self._pool = pool
        self._first = first
        self._digests = digests
        self._num_read = 0
        self.all_read = asyncio.Event()

    async def secure(self) -> None:
        """The blocks stay."""

    def read(self, block_index: int, num_tokens: int) -> memoryview:
        self._num_read += 1
        if self._num_read >= BLOCKS_PER_ATTEMPT:
            self.all_read.set()
        return self._pool.block(self._first + block_index)

    def digest(self, block_index: int) -> bytes:
        return self._digests[(self._first + block_index) % self._pool.num_blocks]


class _Sender:
    """Shipments to one worker, for as long as it is entered."""

    def __init__(
        self, channel: RpcChannel, transport: ShipTransport, layout: KvLayout, bytes_per_s: float, chunk_blocks: int
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._layout = layout
        self._chunk_blocks = chunk_blocks
        self._pacer = _Pacer(chunk_blocks * layout.block_bytes / bytes_per_s)
        self._pool = BlockPool(layout.block_bytes)
        self._digests = self._pool.digests()
        self._numbers = itertools.count()
        self._generator = random.Random(1)

    async def ship_for_ever(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(self._ship_one_by_one())

    async def _ship_one_by_one(self) -> None:
        while True:
            await self._ship(next(self._numbers))

    async def _ship(self, number: int) -> None:
        """One attempt, from its registration to its end."""
        block_size = self._layout.block_size
        tokens = tuple(self._generator.randrange(1_000, 40_000) for _ in range(BLOCKS_PER_ATTEMPT * block_size))
        spec = SequenceSpec(
            AttemptId(f"arriving{number}", 1), tokens, len(tokens), SamplingParams(max_tokens=2, ignore_eos=True)
        )
        async with decoding(self._channel, spec, local_prefill=False) as call:
            while not (response := await call.read()).HasField("registered"):
                pass
            hashes = tuple(hash_blocks(hash_root(self._layout), tokens, block_size))
            epoch = response.registered.epoch
            offer = Offer(spec.id, epoch, self._layout, hashes, len(tokens), progress_timeout_s=PROGRESS_TIMEOUT_S)
            events: asyncio.Queue[ShipEvent] = asyncio.Queue()
            source = _Source(self._pool, number * BLOCKS_PER_ATTEMPT, self._digests)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._compute(events, source))
                group.create_task(self._ship_until_cancelled(offer, source, events))

    async def _compute(self, events: asyncio.Queue[ShipEvent], source: _Source) -> None:
        """What the engine would say, a chunk at a time."""
        for num_blocks in range(0, BLOCKS_PER_ATTEMPT, self._chunk_blocks):
            await self._pacer.turn()
            num_computed = min(num_blocks + self._chunk_blocks, BLOCKS_PER_ATTEMPT)
            events.put_nowait(TokensComputed(num_computed * self._layout.block_size))
        await source.all_read.wait()
        await asyncio.sleep(LAST_BLOCK_S)
        events.put_nowait(CancelShipment())

    async def _ship_until_cancelled(self, offer: Offer, source: _Source, events: asyncio.Queue[ShipEvent]) -> None:
        try:
            await self._transport.ship(ShipSender(offer), source, events)
        except Cancelled:
            return


async def _serve(address: str, transport: str, mb_per_s: float, chunk_blocks: int) -> None:
    async with RpcChannel(address) as channel:
        layout = layout_from_pb((await heard_from(channel)).capabilities.layout)
        async with opened_transports([transport], address, layout) as transports:
            sender = _Sender(channel, transports[transport], layout, mb_per_s * 1e6, chunk_blocks)
            print("done", flush=True)
            shipping: asyncio.Task[None] | None = None
            while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
                if line == "start":
                    shipping = asyncio.create_task(sender.ship_for_ever())
                elif shipping is not None:
                    shipping.cancel()
                    await asyncio.wait([shipping])
                    if not shipping.cancelled():
                        shipping.result()
                print("done", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.receive_sender", description="Started by bench receive.")
    parser.add_argument("address")
    parser.add_argument("transport")
    parser.add_argument("mb_per_s", type=float)
    parser.add_argument("chunk_blocks", type=int)
    options = parser.parse_args()
    os.nice(WORKER_NICENESS)  # as prefill workers are
    keep_message_buffers()
    run(_serve(options.address, options.transport, options.mb_per_s, options.chunk_blocks))
