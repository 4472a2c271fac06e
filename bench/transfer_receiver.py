"""The receiving process of `bench/transfer.py`, and what both processes agree on.

Takes every offer of the product's transports, writes every block into a pool and verifies it there; beside it, on a
server of its own, bare byte streams. Prints both addresses and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np

from kvferry.block_digest import block_digest
from kvferry.config import TransferConfig
from kvferry.host_memory import keep_message_buffers
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcServer, run
from kvferry.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, server_options
from kvtransfer.frames import MAX_FRAME_BYTES
from kvtransfer.grpc_transport import ShipServicer, add_ship_service
from kvtransfer.handshake import terms_of
from kvtransfer.lane import MAX_INLINE_BYTES
from kvtransfer.messages import Offer
from kvtransfer.transport import CommitOutcome, Grant

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

EPOCH = 1
POOL_BYTES = 512 << 20
"""Much more than any last-level cache, at both ends: blocks are walked round and round."""
ALIGNMENT_BYTES = 64
BARE_SERVICE = "bench.Bare"
DROP, POOL = "Drop", "Pool"
"""What a bare stream's receiver does with a message: nothing, or a copy into its pool."""


def _layout(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int) -> KvLayout:
    return KvLayout(num_layers, num_kv_heads, head_dim, block_size, dtype="bfloat16", model_fingerprint="-")


LAYOUTS = {
    layout.block_bytes: layout
    for layout in (_layout(4, 4, 64, 16), _layout(30, 3, 64, 16), _layout(32, 8, 64, 16), _layout(32, 8, 128, 32))
}
"""By bytes of a block: 64 KiB, 360 KiB (SmolLM2-135M in bfloat16), 1 MiB, and 4 MiB, which go in frames of 1 MiB."""


class BlockPool:
    """Memory of `POOL_BYTES`, had as the engine's pool is, block by block and round again; all of it touched first."""

    def __init__(self, block_bytes: int) -> None:
        self.num_blocks = POOL_BYTES // block_bytes
        contents = np.random.default_rng(0).bytes(1 << 20)
        memory = np.zeros(self.num_blocks * block_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT_BYTES  # as engine/kv_cache.py does
        memory = memory[start : start + self.num_blocks * block_bytes]
        memory[:] = np.resize(np.frombuffer(contents, dtype=np.uint8), memory.shape)
        self._view = memoryview(memory.data)
        self.block_bytes = block_bytes

    def block(self, index: int) -> memoryview:
        begin = index % self.num_blocks * self.block_bytes
        return self._view[begin : begin + self.block_bytes]

    def messages(self) -> list[memoryview]:
        """The whole pool, in pieces as large as the messages that the product makes of such blocks."""
        frame_bytes = min(self.block_bytes, MAX_FRAME_BYTES)
        num_bytes = frame_bytes * max(1, MAX_INLINE_BYTES // frame_bytes)
        starts = range(0, len(self._view) - num_bytes + 1, num_bytes)
        return [self._view[start : start + num_bytes] for start in starts]

    def digests(self) -> list[bytes]:
        """Of every block."""
        return [block_digest(self.block(index)) for index in range(self.num_blocks)]


class _Host:
    """Room for one prompt's blocks, from block `first` of the pool on."""

    def __init__(self, pool: BlockPool, first: int) -> None:
        self._pool = pool
        self._first = first

    async def grant(self, offer: Offer) -> Grant:
        return Grant(tuple(range(offer.num_blocks)))

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        self._pool.block(self._first + block_index)[offset : offset + len(payload)] = payload

    def verify(self, block_index: int, digest: bytes, num_tokens: int) -> bool:
        return block_digest(self._pool.block(self._first + block_index)) == digest

    async def commit(self, first_token_ids: tuple[int, ...], first_logprobs: tuple[float, ...]) -> CommitOutcome:
        return CommitOutcome.COMMITTED

    def release(self) -> None:
        """The pool's blocks are overwritten by whoever comes next."""


class _Hosts:
    """A host for every offer, each with the next blocks of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._next = 0

    def open(self, offer: Offer) -> _Host:
        first = self._next
        self._next = (first + offer.num_blocks) % self._pool.num_blocks
        return _Host(self._pool, first)


class _BareStreams:
    """Byte streams without anything of ours: read to the end, then one empty answer."""

    def __init__(self, pool: BlockPool) -> None:
        self._pieces = pool.messages()
        self._next = 0

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            DROP: grpc.stream_stream_rpc_method_handler(self._stream(lambda message: None)),
            POOL: grpc.stream_stream_rpc_method_handler(self._stream(self._copy)),
        }
        return grpc.method_handlers_generic_handler(BARE_SERVICE, methods)

    def _copy(self, message: bytes) -> None:
        self._pieces[self._next % len(self._pieces)][: len(message)] = message
        self._next += 1

    def _stream(self, take: Callable[[bytes], None]) -> Callable[..., Any]:
        async def handle(_requests: object, context: ServicerContext[Any, bytes]) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                take(message)
            await context.write(b"")

        return handle


async def _serve(block_bytes: int) -> None:
    pool = BlockPool(block_bytes)
    server = RpcServer(background_methods=frozenset({"Link"}))
    terms = terms_of(TransferConfig(), LAYOUTS[block_bytes])
    add_ship_service(ShipServicer(terms=terms, epoch=EPOCH, open_host=_Hosts(pool).open), server.grpc)
    bare = grpc.aio.server(options=server_options(DEFAULT_MAX_MESSAGE_BYTES))
    bare.add_generic_rpc_handlers([_BareStreams(pool).handlers])
    bare_port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    print(await server.start("127.0.0.1:0", ("kvferry.v1.ShipService",)), f"127.0.0.1:{bare_port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await bare.stop(None)
    await server.drain(0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.transfer_receiver", description="Started by bench transfer.")
    parser.add_argument("block_bytes", type=int, choices=LAYOUTS)
    keep_message_buffers()
    run(_serve(parser.parse_args().block_bytes))
