"""Channels and links of a prefill worker: what becomes of one whose connection is half-open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvferry.config import TelemetryConfig
from kvferry.errors import Unavailable
from kvferry.telemetry import start_telemetry
from kvtransfer.budget import ByteBudget
from prefill_svc.peers import DecodePeers
from tests.support.relay import Relay
from tests.support.workers import until
from tests.unit.kvtransfer.pairs import MIB, SHORT_S, make_terms, running_receiver
from tests.unit.kvtransfer.support import MemoryHost


@asynccontextmanager
async def peers_and_relay() -> AsyncIterator[tuple[DecodePeers, Relay]]:
    """A prefill worker's peers, and the relay before a receiver."""
    telemetry, terms = start_telemetry(TelemetryConfig(), "prefill", "prefill-0"), make_terms("grpc")
    peers = DecodePeers(telemetry, terms.hello("prefill-0", 1, SHORT_S), ByteBudget(MIB), MIB)
    async with running_receiver(lambda offer: MemoryHost(), terms) as receiver, Relay() as relay:
        relay.forward_to(receiver.address)
        try:
            yield peers, relay
        finally:
            await peers.close()
    await telemetry.shutdown()


async def test_the_next_shipment_leaves_a_connection_that_is_half_open() -> None:
    """Bytes sent over the old one are lost for good; a new one gets through at once."""
    async with peers_and_relay() as (peers, relay):
        async with peers.peer(relay.address) as first:
            before = await first.link.agreed()
            relay.drop()
            await until(lambda: first.link.transport is None)
            relay.pass_on()
            with pytest.raises(Unavailable):
                await first.link.agreed()
            async with peers.peer(relay.address) as second:
                assert second is not first
                assert (await second.link.agreed()).link_id != before.link_id
            async with peers.peer(relay.address) as third:
                assert third is second, "it is kept"
            assert first.channel.grpc.get_state() is not grpc.ChannelConnectivity.SHUTDOWN, "it has a user"
        assert first.channel.grpc.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_a_receiver_that_cannot_be_reached_leaves_no_channels_behind() -> None:
    async with peers_and_relay() as (peers, relay):
        await relay.refuse()
        tried = []
        for _ in range(3):
            async with peers.peer(relay.address) as peer:
                tried.append(peer)
                with pytest.raises(Unavailable):
                    await peer.link.agreed()
        relay.pass_on()
        async with peers.peer(relay.address) as peer:
            await peer.link.agreed()
        assert all(one.channel.grpc.get_state() is grpc.ChannelConnectivity.SHUTDOWN for one in tried)


async def test_a_link_that_lives_is_shared() -> None:
    async with peers_and_relay() as (peers, relay):
        links = []
        for _ in range(3):
            async with peers.peer(relay.address) as peer:
                links.append(await peer.link.agreed())
        assert links[0] is links[1] is links[2]
        assert relay.num_connections == 1


async def test_many_that_come_back_at_once_close_what_was_lost_once() -> None:
    """While one of them closes a connection the others must not close it, too."""
    async with peers_and_relay() as (peers, _):
        gone = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
        lost = []
        for address in gone:
            async with peers.peer(address) as peer:
                with pytest.raises(Unavailable):
                    await peer.link.agreed()
                lost.append(peer)

        async def come_back(address: str) -> None:
            async with peers.peer(address):
                await asyncio.sleep(0)

        await asyncio.gather(*(come_back(address) for address in gone * 3))
        assert all(one.channel.grpc.get_state() is grpc.ChannelConnectivity.SHUTDOWN for one in lost)
