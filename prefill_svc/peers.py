"""Channels and links to decode workers, opened when first needed and shared by all shipments to one address.

Where the link was lost the next shipment opens another one over a new connection: that of the old one may be half-open,
and nothing would get through until its keepalive ping fails.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvferry.rpc import RpcChannel
from kvferry.telemetry import Telemetry
from kvtransfer.budget import ByteBudget
from kvtransfer.handshake import Hello
from kvtransfer.sender_link import SenderLink

MAX_IDLE_CHANNELS = 32
"""Workers come and go under new addresses; channels nobody uses are kept up to this number."""


@dataclass(slots=True)
class DecodePeer:
    """One address: the channel, and what was agreed on with the worker there."""

    channel: RpcChannel
    link: SenderLink
    num_users: int = 0

    async def close(self) -> None:
        """Ends link and channel; shipments that still run are cancelled."""
        await self.link.close()
        await self.channel.close()


class DecodePeers:
    """Peers by address.

    Args:
        telemetry: spans of the calls.
        hello: what this process says of itself.
        total: payload bytes on their way from this process.
        peer_bytes: most of them to one peer.
    """

    def __init__(self, telemetry: Telemetry, hello: Hello, total: ByteBudget, peer_bytes: int) -> None:
        self._telemetry = telemetry
        self._hello = hello
        self._total = total
        self._peer_bytes = peer_bytes
        self._peers: OrderedDict[str, DecodePeer] = OrderedDict()  # least recently used first
        self._lost: list[DecodePeer] = []  # of those that still have users, replaced already

    @asynccontextmanager
    async def peer(self, address: str) -> AsyncIterator[DecodePeer]:
        """The peer at `address` for the length of the block."""
        peer = self._current(address)
        peer.num_users += 1
        try:
            yield peer
        finally:
            peer.num_users -= 1
            await self._close_unused()

    def _current(self, address: str) -> DecodePeer:
        peer = self._peers.get(address)
        if peer is not None and peer.link.was_lost:
            self._lost.append(self._peers.pop(address))
            peer = None
        if peer is None:
            peer = self._peers[address] = self._open(address)
        self._peers.move_to_end(address)
        return peer

    async def _close_unused(self) -> None:
        unused = [peer for peer in self._lost if peer.num_users == 0]
        self._lost = [peer for peer in self._lost if peer.num_users > 0]  # at once: others come here while one closes
        for peer in unused:
            await peer.close()
        if unused:
            # A connection stays open while calls on it are in memory, and failed ones are held in cycles by the
            # tracebacks of their errors. Lost links are rare, and this takes some 6 ms.
            gc.collect()
        idle = [address for address, peer in self._peers.items() if peer.num_users == 0]
        surplus = [self._peers.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]]
        for peer in surplus:
            await peer.close()

    def _open(self, address: str) -> DecodePeer:
        channel = RpcChannel(address, tracer=self._telemetry.tracer, has_own_connection=True)
        return DecodePeer(channel, SenderLink(channel, self._hello, self._total, self._peer_bytes))

    async def close(self) -> None:
        """Closes every peer; shipments that still run are cancelled."""
        while self._lost:
            await self._lost.pop().close()
        while self._peers:
            _, peer = self._peers.popitem()
            await peer.close()
