"""Following the blocks of one worker: gaps, errors, old workers, wrong messages, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvferry.block_changes import BlockChanges
from kvferry.errors import Internal, KvferryError, UnsupportedField
from kvferry.rpc import RpcChannel, RpcServer
from kvferry.wire import block_changes_to_pb
from proto.kvferry.v1 import worker_pb2, worker_pb2_grpc
from router.block_index import BlockIndex, KnownBlocks
from router.block_watch import BlockWatch
from tests.support.workers import until

if TYPE_CHECKING:
    from grpc.aio import ServicerContext


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


@dataclass(slots=True)
class Script:
    """What one call is answered with: messages by number, then an error, the end, or nothing more.

    Without an error the stream ends at once where `ends`, else with its caller.
    """

    messages: dict[int, BlockChanges] = field(default_factory=dict)
    epoch: int = 1
    error: KvferryError | None = None
    ends: bool = False


STAY = {1: BlockChanges(is_reset=True), 2: BlockChanges(stored=names(1, 2, 3))}


class ScriptedBlocks(worker_pb2_grpc.WorkerServiceServicer):
    """Answers the calls of WatchBlocks by script, the last of which is for all that follow."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = scripts
        self.num_calls = 0
        self.num_running = 0

    async def WatchBlocks(  # type: ignore[override]  # a coroutine that writes
        self,
        request: worker_pb2.WatchBlocksRequest,
        context: ServicerContext[worker_pb2.WatchBlocksRequest, worker_pb2.WatchBlocksResponse],
    ) -> None:
        script = self._scripts[min(self.num_calls, len(self._scripts) - 1)]
        self.num_calls += 1
        self.num_running += 1
        try:
            for number, changes in script.messages.items():
                (message,) = block_changes_to_pb(changes)
                message.epoch, message.sequence_number = script.epoch, number
                await context.write(message)
            if script.error is not None:
                raise script.error
            if not script.ends:
                await asyncio.Event().wait()
        finally:
            self.num_running -= 1

    Watch = Drain = Undrain = WatchBlocks  # type: ignore[assignment]  # nobody calls them


@dataclass(slots=True)
class Followed:
    """A worker that is followed."""

    server: ScriptedBlocks
    watch: BlockWatch
    index: BlockIndex
    address: str

    @property
    def known(self) -> KnownBlocks:
        return self.index.known(self.address)


@asynccontextmanager
async def followed(*scripts: Script) -> AsyncIterator[Followed]:
    servicer, server, index = ScriptedBlocks(scripts), RpcServer(), BlockIndex()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc)
    address = await server.start("127.0.0.1:0", ())
    try:
        async with RpcChannel(address) as channel, BlockWatch(channel, address, index) as watch:
            watch.follow(True)
            yield Followed(servicer, watch, index, address)
            await until(lambda: servicer.num_running <= 1)
        assert index.known(address) == KnownBlocks(), "nothing of it is left at the end"
        await until(lambda: servicer.num_running == 0)
    finally:
        await server.grpc.stop(None)


async def test_what_is_told_is_known() -> None:
    async with followed(Script(STAY)) as worker:
        await until(lambda: worker.known == KnownBlocks(3, False, 1))
        worker.watch.follow(True)
        assert worker.server.num_calls == 1


async def test_a_worker_that_is_no_member_any_more_is_forgotten_at_once() -> None:
    async with followed(Script(STAY)) as worker:
        await until(lambda: worker.known.num_blocks == 3)
        worker.watch.follow(False)
        assert worker.known == KnownBlocks()
        await until(lambda: worker.server.num_running == 0)
        worker.watch.follow(True)
        await until(lambda: worker.known.num_blocks == 3)
        assert worker.server.num_calls == 2


@pytest.mark.parametrize(
    "broken",
    [
        Script({**STAY, 4: BlockChanges(stored=names(9))}),
        Script({**STAY, 2: BlockChanges(stored=[b"short"])}),
        Script(STAY, error=Internal("no")),
        Script(STAY, ends=True),
        Script(error=Internal("no")),
    ],
    ids=["gap", "wrong hash", "error", "end", "error at once"],
)
async def test_what_goes_wrong_costs_what_was_known_and_is_begun_anew(broken: Script) -> None:
    later = Script({1: BlockChanges(is_reset=True), 2: BlockChanges(stored=names(7))})
    async with followed(broken, broken, later) as worker:
        await until(lambda: worker.known == KnownBlocks(1, False, 1))
        assert worker.index.longest_run(names(1)) == {}
        assert worker.server.num_calls == 3


async def test_nothing_is_known_between_two_streams() -> None:
    async with followed(Script(STAY, error=Internal("no")), Script(error=Internal("still not"))) as worker:
        await until(lambda: worker.server.num_calls >= 2)
        await until(lambda: worker.known == KnownBlocks())


async def test_another_life_behind_the_address_begins_with_nothing() -> None:
    lives = Script(STAY, epoch=1, ends=True), Script({1: BlockChanges(is_reset=True)}, epoch=2)
    async with followed(*lives) as worker:
        await until(lambda: worker.known == KnownBlocks(0, False, 2))


async def test_a_worker_of_an_earlier_version_is_asked_once() -> None:
    async with followed(Script(error=UnsupportedField("WatchBlocks"))) as worker:
        await until(lambda: worker.server.num_calls == 1 and worker.server.num_running == 0)
        task = worker.watch._task
        assert task is not None
        await asyncio.wait([task], timeout=10)
        assert task.done() and task.exception() is None
        worker.watch.follow(True)
        assert worker.server.num_calls == 1
