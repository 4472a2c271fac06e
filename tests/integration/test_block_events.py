"""Routers know which blocks their workers hold: pool, feed, messages and index together, then real workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_svc.role import DecodeRole
from engine.block_events import BlockEvents, PendingChanges
from engine.block_pool import BlockPool
from kvferry.block_changes import BlockChanges, NumberedChanges
from kvferry.block_hash import hash_blocks, hash_root
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.config import Config
from kvferry.kv_layout import KvLayout
from kvferry.rpc import RpcChannel
from kvferry.telemetry import start_telemetry
from kvferry.wire import block_changes_to_pb, numbered_changes_from_pb
from kvferry.worker_process import RunningWorker, WorkerContext, start_worker
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from router.app import RouterApp
from router.block_index import BlockIndex, KnownBlocks, Outcome
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.workers import core_of, running_worker, scripted_config, scripted_folder, until

# -- against a plain model: no sockets, no threads --------------------------------------------------------------------

NUM_BLOCKS, NUM_NAMES = 6, 20
WORKER = "worker"


class Reader:
    """One router's stream of one worker: taken when woken, on its way for as long as the test likes, then indexed."""

    def __init__(self, max_changes: int) -> None:
        self.index = BlockIndex()
        self._max_changes = max_changes
        self._on_the_way: deque[NumberedChanges] = deque()

    def begin(self, events: BlockEvents, epoch: int) -> None:
        """A stream to a life; what the last one told is on its way no more."""
        self._events, self._epoch, self._number = events, epoch, 0
        self._on_the_way.clear()
        self._pending = PendingChanges(self._max_changes, self._wake)
        self._is_woken = True
        events.open(self._pending)

    def _wake(self) -> None:
        self._is_woken = True

    def lose_worker(self) -> None:
        self._events.close(self._pending)
        self.index.forget(WORKER)

    def take(self) -> None:
        """What the servicer does when it is woken."""
        if not self._is_woken:
            return
        self._is_woken = False
        changes = self._events.take(self._pending)
        for message in block_changes_to_pb(changes):
            self._number += 1
            message.epoch, message.sequence_number = self._epoch, self._number
            read = worker_pb2.WatchBlocksResponse.FromString(message.SerializeToString())
            self._on_the_way.append(numbered_changes_from_pb(read))

    def deliver(self) -> None:
        """One message arrives."""
        if self._on_the_way and self.index.take(WORKER, self._on_the_way.popleft()) is Outcome.GAP:
            self._events.close(self._pending)
            self.begin(self._events, self._epoch)

    def lose_message(self) -> None:
        if self._on_the_way:
            self._on_the_way.popleft()

    def quiesce(self) -> None:
        while self._is_woken or self._on_the_way:
            self.take()
            self.deliver()

    def known(self) -> set[bytes]:
        return {name(number) for number in range(NUM_NAMES + 1) if self.index.longest_run([name(number)])}


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass(slots=True)
class Engine:
    """A pool, and who holds its blocks."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    held: list[int] = field(default_factory=list)

    def do(self, operation: str, number: int) -> None:
        """`number` chooses among blocks or names."""
        if operation == "allocate":
            self.held += self.pool.allocate(1 + number % 3, f"tenant-{number % 2}") or []
        elif operation == "flush":
            self.pool.flush()
        elif operation == "flush tenant":
            self.pool.flush(f"tenant-{number % 2}")
        elif self.held and operation == "publish":
            self.pool.publish(self.held[number % len(self.held)], name(number % NUM_NAMES), [number])
        elif self.held and operation == "free":
            self.pool.free([self.held.pop(number % len(self.held))])
        elif self.held and operation == "unpublish":
            self.pool.unpublish(self.held[number % len(self.held)])

    def stir(self) -> None:
        """One more change that every reader is told of, and that nothing takes back: a name that is not used else."""
        self.pool.free(self.held)
        (block_id,) = self.pool.allocate(1) or [-1]
        self.pool.publish(block_id, name(NUM_NAMES), [0])


POOL_OPERATIONS = ["allocate", "publish", "publish", "publish", "free", "free", "unpublish", "flush", "flush tenant"]
READER_OPERATIONS = ["take", "take", "deliver", "deliver", "lose message", "lose worker"]
OPERATIONS = st.tuples(st.sampled_from([*POOL_OPERATIONS, *READER_OPERATIONS, "restart"]), st.integers(0, 59))


@settings(max_examples=300)
@given(st.lists(OPERATIONS, max_size=60), st.integers(1, 8))
def test_once_all_is_quiet_the_index_is_what_is_published(operations: list[tuple[str, int]], max_changes: int) -> None:
    """Two readers of their own pace, of which either may miss messages; the worker may be another life in between."""
    engine, epoch, readers = Engine(), 1, [Reader(max_changes), Reader(100)]
    events = BlockEvents(engine.pool)
    with patch("kvferry.wire.MAX_HASHES_PER_MESSAGE", 2):
        for reader in readers:
            reader.begin(events, epoch)
        for operation, number in operations:
            reader = readers[number % 2]
            match operation:
                case "take":
                    reader.take()
                case "deliver":
                    reader.deliver()
                case "lose message":
                    reader.lose_message()
                case "lose worker":
                    reader.lose_worker()
                    reader.begin(events, epoch)
                case "restart":
                    engine, epoch = Engine(), epoch + 1
                    events = BlockEvents(engine.pool)
                    for one in readers:  # nobody says that the old life ended
                        one.begin(events, epoch)
                case _:
                    engine.do(operation, number)
        engine.stir()
        for reader in readers:
            reader.quiesce()
    for reader in readers:
        assert reader.known() == set(engine.pool.published_hashes())
        assert reader.index.known(WORKER) == KnownBlocks(len(engine.pool.published_hashes()), False, epoch)


# -- real workers and a real router -----------------------------------------------------------------------------------

PROMPT = list(range(20, 100))
NUM_PROMPT_BLOCKS = 20
MAX_TOKENS = 10
BLOCK_SIZE = 4


def options(prompt: list[int] = PROMPT) -> GenerateOptions:
    return GenerateOptions(prompt=prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


def hashes_of(layout: KvLayout, token_ids: list[int]) -> list[bytes]:
    """As a router computes them, from what a worker told of itself."""
    return hash_blocks(hash_root(layout), token_ids, layout.block_size)


async def published(worker: RunningWorker) -> set[bytes]:
    hashes: list[bytes] = await worker.role.engine.run(lambda core: core.pool.published_hashes())  # type: ignore[attr-defined]
    return set(hashes)


async def until_known(router: RouterApp, *workers: RunningWorker) -> None:
    """Returns once the router's index has of each worker what is published there, and nothing else."""
    blocks = router.membership.blocks
    for worker in workers:
        hashes = await published(worker)

        def is_known(worker: RunningWorker = worker, hashes: set[bytes] = hashes) -> bool:
            has_all = all(worker.address in blocks.longest_run([block_hash]) for block_hash in hashes)
            return has_all and known(router, worker).num_blocks == len(hashes)

        await until(is_known)


def known(router: RouterApp, worker: RunningWorker) -> KnownBlocks:
    return router.membership.blocks.known(worker.address)


def metric(deployment: Deployment, name: str, worker: RunningWorker) -> float | None:
    role = worker.context.identity.role
    labels = {"worker": worker.context.identity.worker_id, "role": role, "address": worker.address}
    return deployment.telemetry.metrics.registry.get_sample_value(name, labels)


async def test_a_warm_prefix_is_known_until_it_is_flushed(tmp_path: Path) -> None:
    """Of both roles, exactly what they published; and ListWorkers and metrics say how much."""
    config = deployment_config(chat_folder(tmp_path / "m"))
    async with running_deployment(config) as deployment:
        router, (prefill,), (decode,) = deployment.router, deployment.prefill, deployment.decode
        await until(lambda: known(router, prefill).epoch == prefill.context.identity.epoch)
        assert known(router, prefill) == KnownBlocks(0, False, prefill.context.identity.epoch)
        answer = await deployment.client.complete(options())
        await until_known(router, prefill, decode)
        tokens = [*PROMPT, *answer.choices[0].token_ids]
        hashes = hashes_of(core_of(decode).layout, tokens[:-1])  # the last token has no KV
        runs = router.membership.blocks.longest_run(hashes)
        assert runs == {prefill.address: NUM_PROMPT_BLOCKS, decode.address: len(hashes)}
        assert set(hashes) == await published(decode)
        assert {worker.id: worker.num_known_blocks for worker in await deployment.client.workers()} == {
            "prefill-0": NUM_PROMPT_BLOCKS,
            "decode-0": len(hashes),
        }
        assert metric(deployment, "kvferry_worker_known_blocks", decode) == len(hashes)
        assert metric(deployment, "kvferry_worker_known_blocks_partial", decode) == 0
        await deployment.client.flush_prefix_cache()
        await until(lambda: known(router, prefill).num_blocks == known(router, decode).num_blocks == 0)
        assert router.membership.blocks.longest_run(hashes) == {}


async def test_evictions_are_followed(tmp_path: Path) -> None:
    """Many prompts through a small pool: the index stays exactly what is published."""
    config = deployment_config(chat_folder(tmp_path / "m"), num_blocks=48)
    async with running_deployment(config) as deployment:
        for first in range(0, 60, 3):
            await deployment.client.complete(options(PROMPT[first:] + PROMPT[:first]))
        workers = (*deployment.prefill, *deployment.decode)
        assert all(core_of(worker).pool.num_evictions > 48 for worker in workers)
        await until_known(deployment.router, *workers)


@asynccontextmanager
async def running_router(config: Config, *decode: str) -> AsyncIterator[tuple[RouterApp, AsyncClient]]:
    telemetry = start_telemetry(config.telemetry, "router", "router")
    async with RouterApp(config.replace("router", decode=list(decode)), telemetry) as router:
        assert await router.wait_ready(10.0)
        async with AsyncClient(router.address) as client:
            yield router, client
    await telemetry.shutdown()


async def test_a_worker_that_is_started_again_is_credited_with_nothing(tmp_path: Path) -> None:
    """R124: with two warm workers, the one that was restarted is cold in the index, the other one as warm as before."""
    config = deployment_config(chat_folder(tmp_path / "m"))
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(running_worker("decode", config, worker_id="decode-1"))
        async with running_worker("decode", config) as first:
            router, client = await stack.enter_async_context(running_router(config, first.address, second.address))
            await until(lambda: all(worker.state.value == "ready" for worker in router.membership.workers))
            hashes = hashes_of(core_of(first).layout, PROMPT)

            def runs() -> dict[str, int]:
                return dict(router.membership.blocks.longest_run(hashes))

            warm = {first.address: NUM_PROMPT_BLOCKS, second.address: NUM_PROMPT_BLOCKS}
            for _ in range(10):
                if runs() != warm:
                    await asyncio.gather(*(client.complete(options()) for _ in range(4)))
                    await until_known(router, first, second)
            assert runs() == warm
        await until(lambda: runs() == {second.address: NUM_PROMPT_BLOCKS})
        again = await stack.enter_async_context(running_worker("decode", config, listen=first.address))
        await until(lambda: known(router, again).epoch == again.context.identity.epoch)
        assert known(router, again).num_blocks == 0
        assert runs() == {second.address: NUM_PROMPT_BLOCKS}


async def test_a_worker_that_ends_does_not_wait_for_its_watchers(tmp_path: Path) -> None:
    config = scripted_config(scripted_folder(tmp_path / "m"))
    async with running_worker("decode", config) as worker, RpcChannel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel.grpc)
        async with channel.stream(stub.WatchBlocks, worker_pb2.WatchBlocksRequest()) as call:
            first: object = await call.read()
            assert isinstance(first, worker_pb2.WatchBlocksResponse) and first.HasField("cleared")
            assert (first.epoch, first.sequence_number) == (worker.context.identity.epoch, 1)
            async with asyncio.timeout(30):
                await worker.stop(grace_s=600.0)


class LargePool:
    """A feed of a pool of 262,144 blocks, and nothing after that."""

    hashes = tuple(name(number) for number in range(262_144))

    async def watch(self) -> AsyncGenerator[BlockChanges, None]:
        yield BlockChanges(is_reset=True, stored=self.hashes)
        await asyncio.Event().wait()


def open_large(context: WorkerContext) -> DecodeRole:
    role = DecodeRole(context)
    role.blocks = LargePool()
    return role


async def test_a_large_pool_is_told_in_messages_far_below_the_limit(tmp_path: Path) -> None:
    config = scripted_config(scripted_folder(tmp_path / "m"))
    telemetry = start_telemetry(config.telemetry, "decode", "decode-0")
    worker = await start_worker("decode", open_large, config, "127.0.0.1:0", worker_id="decode-0", telemetry=telemetry)
    index, largest_bytes = BlockIndex(), 0
    async with RpcChannel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel.grpc)
        async with channel.stream(stub.WatchBlocks, worker_pb2.WatchBlocksRequest(), timeout_s=60) as call:
            async for message in call:
                largest_bytes = max(largest_bytes, message.ByteSize())
                assert index.take(WORKER, numbered_changes_from_pb(message)) is Outcome.TAKEN
                if index.known(WORKER).num_blocks == len(LargePool.hashes):
                    break
    assert largest_bytes < 1 << 20
    assert index.longest_run(LargePool.hashes) == {WORKER: len(LargePool.hashes)}
    await worker.stop()
    await telemetry.shutdown()
