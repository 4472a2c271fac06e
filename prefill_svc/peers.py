"""Channels to decode workers, opened when first needed and shared by all shipments to one address."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvferry.rpc import RpcChannel
from kvferry.telemetry import Telemetry

MAX_IDLE_CHANNELS = 32
"""Workers come and go under new addresses; channels nobody uses are kept up to this number."""


@dataclass(slots=True)
class _Peer:
    channel: RpcChannel
    num_users: int = 0


class DecodePeers:
    """Channels by address."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # least recently used first

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[RpcChannel]:
        """The channel to `address` for the length of the block."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(RpcChannel(address, tracer=self._telemetry.tracer))
        self._peers.move_to_end(address)
        peer.num_users += 1
        try:
            yield peer.channel
        finally:
            peer.num_users -= 1
            await self._close_idle()

    async def _close_idle(self) -> None:
        idle = [address for address, peer in self._peers.items() if peer.num_users == 0]
        for address in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]:
            await self._peers.pop(address).channel.close()

    async def close(self) -> None:
        """Closes every channel; shipments that still run are cancelled."""
        while self._peers:
            _, peer = self._peers.popitem()
            await peer.channel.close()
