"""How fast KV blocks travel between two processes over gRPC, digests made and compared, and what the bounds are.

block_mb_per_s       block contents sent and verified a second, one shipment at a time
copy_mb_per_s        memcpy of the same blocks: the physical bound of one copy
digest_mb_per_s      xxh3-128 over the same blocks
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from kvferry.block_digest import block_digest
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel, run
from kvferry.spec import AttemptId
from kvtransfer.grpc_transport import GrpcShipment
from kvtransfer.messages import Offer
from kvtransfer.sender import ShipSender
from kvtransfer.transport import FirstToken, ShipEvent, TokensComputed

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16", model_fingerprint="-")
"""A block of SmolLM2-135M in bfloat16: 360 KB."""
EPOCH = 1
NUM_BLOCKS = 32
NUM_SHIPMENTS = 20


class _Source:
    """The same bytes for every block."""

    def __init__(self) -> None:
        self._contents = bytes(range(256)) * (LAYOUT.block_bytes // 256)

    def read(self, block_index: int, num_tokens: int) -> bytes:
        return self._contents

    def digest(self, block_index: int) -> None:
        return None


def run_ship() -> dict[str, object]:
    """Ships `NUM_SHIPMENTS` prompts of `NUM_BLOCKS` blocks each to a process of its own."""
    receiver = subprocess.Popen([sys.executable, "-m", "bench.ship_receiver"], stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        seconds = run(_ship_all(address))
    finally:
        receiver.terminate()
        receiver.wait(timeout=10)
    total_mb = NUM_SHIPMENTS * NUM_BLOCKS * LAYOUT.block_bytes / 1e6
    return {
        "block_bytes": LAYOUT.block_bytes,
        "block_mb_per_s": round(total_mb / seconds, 1),
        "copy_mb_per_s": round(_rate_mb_per_s(lambda contents: bytearray(contents)), 1),
        "digest_mb_per_s": round(_rate_mb_per_s(block_digest), 1),
    }


async def _ship_all(address: str) -> float:
    async with RpcChannel(address) as channel:
        await _ship_one(channel, 0)  # opens the connection
        start_s = time.perf_counter()
        for number in range(NUM_SHIPMENTS):
            await _ship_one(channel, number + 1)
        return time.perf_counter() - start_s


async def _ship_one(channel: RpcChannel, number: int) -> None:
    num_tokens = NUM_BLOCKS * LAYOUT.block_size
    hashes = tuple(bytes([index]) * 32 for index in range(NUM_BLOCKS))
    offer = Offer(AttemptId(f"bench{number}", 1), EPOCH, LAYOUT, hashes, num_tokens, progress_timeout_s=10.0)
    events: asyncio.Queue[ShipEvent] = asyncio.Queue()
    events.put_nowait(TokensComputed(num_tokens))
    events.put_nowait(FirstToken((1,)))
    summary = await GrpcShipment(channel).ship(ShipSender(offer), _Source(), events)
    assert summary.num_blocks_shipped == NUM_BLOCKS


def _rate_mb_per_s(work: object, seconds: float = 0.5) -> float:
    assert callable(work)
    contents = _Source().read(0, 0)
    num_bytes, start_s = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - start_s) < seconds:
        work(contents)
        num_bytes += len(contents)
    return num_bytes / spent_s / 1e6
