"""Which workers the router counts on: reconnecting, refusing, losing, choosing."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from kvferry.errors import Unavailable
from proto.kvferry.v1 import inference_pb2 as pb
from tests.support.fake_workers import LAYOUT, FakeNetwork, Point
from tests.unit.router.conftest import Router, StartRouter, ask

OUTPUT = list(range(35, 60))


async def changed_until(router: Router, state: str, address: str) -> pb.WorkerInfo:
    """The worker once it has reached that state."""
    membership = router.app.membership
    worker = next(worker for worker in membership.workers if worker.address == address)
    async with asyncio.timeout(10):
        while worker.state.value != state:
            await membership.changes.wait_next()
    return worker.to_pb()


async def test_list_shows_every_worker(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_decode=2) as network, start_router(network) as router:
        for address in network.decode_addresses:
            await changed_until(router, "ready", address)
        shown = (await router.channel.unary(router.stub.ListWorkers, pb.ListWorkersRequest())).workers
        assert [(worker.id, worker.role, worker.state) for worker in shown] == [
            ("prefill-0", "prefill", "ready"),
            ("decode-0", "decode", "ready"),
            ("decode-1", "decode", "ready"),
        ]
        assert all(worker.pid == 4242 and worker.num_blocks == 1000 for worker in shown)


async def test_starts_with_all_workers_down_and_says_so(start_router: StartRouter) -> None:
    network = FakeNetwork(OUTPUT)
    async with network:
        for worker in network.workers:
            await worker.stop()
        async with start_router(network, wait=False) as router:
            assert not await router.app.wait_ready(0.3)
            with pytest.raises(Unavailable, match=network.decode[0].address):
                await router.channel.unary(router.stub.GetCapabilities, pb.GetCapabilitiesRequest())
            with pytest.raises(Unavailable, match=r"no prefill worker is ready.*no decode worker is ready"):
                await router.generate(ask())
            for worker in network.workers:
                await worker.start()
            assert await router.app.wait_ready(5)
            assert len((await router.generate(ask())).token_ids) == 8


async def test_capabilities_come_from_the_workers(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        response = await router.channel.unary(router.stub.GetCapabilities, pb.GetCapabilitiesRequest())
        offered = response.capabilities
        assert (offered.model, offered.model_path, offered.max_context) == ("tiny", "models/tiny", 256)
        assert (offered.vocab_size, offered.layout.block_size) == (400, 16)
        assert (list(offered.tiers), offered.default_tier) == (["interactive", "standard", "batch"], "standard")
        assert list(offered.unsupported_fields) == []


async def test_a_worker_that_differs_is_refused_with_both_values(start_router: StartRouter) -> None:
    network = FakeNetwork(OUTPUT, num_decode=2)
    network.decode[1].layout = dataclasses.replace(LAYOUT, block_size=32, model_fingerprint="fingerprint-b")
    async with network:
        await network.decode[1].stop()
        async with start_router(network) as router:
            await network.decode[1].start()
            refused = await changed_until(router, "refused", network.decode[1].address)
            assert "block_size: 16 here, 32 there" in refused.reason
            assert "model_fingerprint: fingerprint-a here, fingerprint-b there" in refused.reason
            for _ in range(4):
                await router.generate(ask())
            assert {call.worker.name for call in network.calls_of("decode")} == {"decode-0"}
            assert [worker.num_block_watches for worker in network.decode] == [1, 0]


async def test_a_worker_with_another_vocabulary_or_role_is_refused(start_router: StartRouter) -> None:
    network = FakeNetwork(OUTPUT)
    network.decode[0].vocab_size = 500
    async with network:
        network.prefill[0].role = "decode"
        async with start_router(network, wait=False) as router:
            refused = await changed_until(router, "refused", network.decode[0].address)
            assert refused.reason == "vocab_size: 400 in the router's tokenizer, 500 there"
            refused = await changed_until(router, "refused", network.prefill[0].address)
            assert refused.reason == "it is a decode worker, configured as prefill"


async def test_a_draining_worker_gets_nothing_new(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_decode=2) as network, start_router(network) as router:
        network.decode[0].draining = True
        await changed_until(router, "draining", network.decode[0].address)
        await changed_until(router, "ready", network.decode[1].address)
        for _ in range(4):
            await router.generate(ask())
        assert {call.worker.name for call in network.calls_of("decode")} == {"decode-1"}


async def test_a_silent_worker_is_lost_and_found_again(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network, progress_timeout_s=0.3) as router:
        network.decode[0].is_silent = True
        lost = await changed_until(router, "connecting", network.decode[0].address)
        assert "no progress for 0.3 s" in lost.reason
        network.decode[0].is_silent = False
        await changed_until(router, "ready", network.decode[0].address)


async def test_the_least_loaded_pair_is_chosen(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_prefill=2, num_decode=2) as network, start_router(network) as router:
        for address in (*network.prefill_addresses, *network.decode_addresses):
            await changed_until(router, "ready", address)
        network.hold(Point.TOKEN, 2)
        calls = [router.stub.Generate(ask()) for _ in range(6)]
        await network.reached(Point.TOKEN, 2, times=6)
        names = [call.worker.name for call in network.calls_of("decode")]
        assert (names.count("decode-0"), names.count("decode-1")) == (3, 3)
        for call in calls:
            call.cancel()
        await network.all_ended()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_of_an_older_version_never_gets_what_it_would_overlook(
    start_router: StartRouter, role: str
) -> None:
    """It goes on serving all others, and everything once it was replaced."""
    async with FakeNetwork(OUTPUT, num_prefill=2, num_decode=2) as network, start_router(network) as router:
        workers = network.prefill if role == "prefill" else network.decode
        for worker in network.workers:
            await changed_until(router, "ready", worker.address)
        workers[0].sequence_fields = []  # a version that tells none
        await _told(router, workers[0].address)
        banned = ask(sampling={"bad_words": ["x"]})
        for _ in range(4):
            await router.generate(banned)
        assert {call.worker.name for call in network.calls_of(role)} == {f"{role}-1"}
        for _ in range(4):
            await router.generate(ask())
        assert {call.worker.name for call in network.calls_of(role)} == {f"{role}-0", f"{role}-1"}
        if role == "prefill":
            return
        workers[1].sequence_fields = []
        await _told(router, workers[1].address)
        num_calls = len(network.calls)
        with pytest.raises(Unavailable, match=r"no ready decode worker knows sampling\.rules.*older version"):
            await router.generate(banned)
        assert len(network.calls) == num_calls


async def _told(router: Router, address: str) -> None:
    """Returns once the router heard that this worker is of an older version."""
    worker = next(worker for worker in router.app.membership.workers if worker.address == address)
    async with asyncio.timeout(10):
        while "sampling.rules" in worker.sequence_fields:  # noqa: ASYNC110 - a status changes no state
            await asyncio.sleep(0.01)
