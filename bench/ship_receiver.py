"""The receiving process of `bench/ship.py`: takes every offer, writes and verifies every block. Prints its address."""

from __future__ import annotations

import asyncio

from bench.ship import EPOCH, LAYOUT
from kvferry.block_digest import block_digest
from kvferry.rpc import RpcServer, run
from kvtransfer.grpc_transport import ShipServicer
from kvtransfer.messages import Offer
from kvtransfer.transport import CommitOutcome, Grant
from proto.kvferry.v1 import ship_pb2_grpc


class _Host:
    """A pool of one prompt's blocks."""

    def __init__(self, offer: Offer) -> None:
        self._blocks = [bytearray(LAYOUT.block_bytes) for _ in range(offer.num_blocks)]

    async def grant(self, offer: Offer) -> Grant:
        return Grant(tuple(range(offer.num_blocks)))

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        self._blocks[block_index][offset : offset + len(payload)] = payload

    def verify(self, block_index: int, digest: bytes, num_tokens: int) -> bool:
        return block_digest(self._blocks[block_index]) == digest

    async def commit(self, first_token_ids: tuple[int, ...]) -> CommitOutcome:
        return CommitOutcome.COMMITTED

    def release(self) -> None:
        self._blocks = []


async def _serve() -> None:
    server = RpcServer()
    servicer = ShipServicer(layout=LAYOUT, epoch=EPOCH, open_host=_Host)
    ship_pb2_grpc.add_ShipServiceServicer_to_server(servicer, server.grpc)
    print(await server.start("127.0.0.1:0", ("kvferry.v1.ShipService",)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve())
