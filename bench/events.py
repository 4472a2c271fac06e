"""What block events cost: the pool that publishes, the snapshot of a large pool, the router's index. Processor time.

cycle_ns          a block evicted, taken, published and freed, by who watches; `overflowed`: one that takes nothing
snapshot          a pool of 262,144 blocks: the step loop's part, making and reading all messages, the longest of each
index             what the router keeps: bytes a hash; forgetting a worker; runs of a prompt of 512 blocks, 16 workers
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_events import BlockEvents, PendingChanges
from engine.block_pool import BlockPool
from kvferry.block_changes import BlockChanges
from kvferry.wire import block_changes_to_pb, numbered_changes_from_pb
from proto.kvferry.v1 import worker_pb2
from router.block_index import BlockIndex

NUM_POOL_BLOCKS = 4_096
NUM_CYCLES = 100_000
NUM_ROUNDS = 7
CYCLES_PER_STEP = 16
"""Blocks that fill in one step; a watcher takes its changes once a step."""
NUM_LARGE_POOL_BLOCKS = 262_144
NUM_WORKERS, NUM_PROMPT_BLOCKS = 16, 512


def run_events() -> dict[str, object]:
    """All of it."""
    return {"cycle_ns": _cycles(), "snapshot": _snapshot(), "index": _index()}


@dataclass(frozen=True, slots=True)
class _Case:
    """A full pool, its watchers, and whether they take what they are told."""

    num_watchers: int
    takes: bool = True

    def cycle_ns(self) -> float:
        pool = _full_pool(NUM_POOL_BLOCKS)
        events, watchers = BlockEvents(pool), [PendingChanges(NUM_POOL_BLOCKS, int) for _ in range(self.num_watchers)]
        for watcher in watchers:
            events.open(watcher)
            events.take(watcher)
        names = [_name(NUM_POOL_BLOCKS + number) for number in range(NUM_CYCLES)]
        begin_ns = time.thread_time_ns()
        for number, name in enumerate(names):
            blocks = pool.allocate(1)
            assert blocks is not None
            pool.publish(blocks[0], name, ())
            pool.free(blocks)
            if self.takes and number % CYCLES_PER_STEP == 0:
                for watcher in watchers:
                    events.take(watcher)
        return (time.thread_time_ns() - begin_ns) / NUM_CYCLES


def _cycles() -> dict[str, float]:
    cases = {"nobody": _Case(0), "1 watcher": _Case(1), "4 watchers": _Case(4), "1 overflowed": _Case(1, takes=False)}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(NUM_ROUNDS):  # in turn, so that all see the same machine
        for name, case in cases.items():
            samples[name].append(case.cycle_ns())
    return {name: round(statistics.median(times)) for name, times in samples.items()}


def _snapshot() -> dict[str, float]:
    pool = _full_pool(NUM_LARGE_POOL_BLOCKS)
    watcher, index, begin_s = PendingChanges(NUM_LARGE_POOL_BLOCKS, int), BlockIndex(), time.thread_time()
    changes = watcher.take(pool)
    take_s = time.thread_time() - begin_s
    made, read, num_bytes = list[float](), list[float](), 0
    messages = block_changes_to_pb(changes)
    number = 0
    while True:
        begin_s = time.thread_time()
        message = next(messages, None)
        if message is None:
            break
        number += 1
        message.epoch, message.sequence_number = 1, number
        raw = message.SerializeToString()
        made.append(time.thread_time() - begin_s)
        num_bytes += len(raw)
        begin_s = time.thread_time()
        index.take("worker", numbered_changes_from_pb(worker_pb2.WatchBlocksResponse.FromString(raw)))
        read.append(time.thread_time() - begin_s)
    return {
        "take_ms": _ms(take_s),
        "num_messages": number,
        "num_bytes": num_bytes,
        "make_ms": _ms(sum(made)),
        "longest_make_ms": _ms(max(made)),
        "read_ms": _ms(sum(read)),
        "longest_read_ms": _ms(max(read)),
        "forget_ms": _ms(_time_s(lambda: index.forget("worker"))),
    }


def _index() -> dict[str, float]:
    tracemalloc.start()
    index = BlockIndex()
    for worker in range(NUM_WORKERS):
        for number, message in enumerate(block_changes_to_pb(_reset_of(NUM_POOL_BLOCKS)), start=1):
            message.epoch, message.sequence_number = 1, number
            index.take(str(worker), numbered_changes_from_pb(message))
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    prompt, missed = [_name(number) for number in range(NUM_PROMPT_BLOCKS)], [_name(-1 & (1 << 64) - 1)]
    return {
        "bytes_a_hash": round(num_bytes / NUM_WORKERS / NUM_POOL_BLOCKS),
        "all_hit_us": round(1e6 * min(_time_s(lambda: index.longest_run(prompt)) for _ in range(100)), 1),
        "all_miss_us": round(1e6 * min(_time_s(lambda: index.longest_run(missed)) for _ in range(100)), 1),
    }


def _reset_of(num_blocks: int) -> BlockChanges:
    return BlockChanges(is_reset=True, stored=[_name(number) for number in range(num_blocks)])


def _full_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    for number, block_id in enumerate(blocks):
        pool.publish(block_id, _name(number), ())
    pool.free(blocks)
    return pool


def _name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _time_s(call: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    call()
    return time.thread_time() - begin_s


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
