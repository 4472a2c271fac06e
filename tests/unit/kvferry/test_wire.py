"""A worker's figures and block events on the wire."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest

from kvferry.block_changes import BlockChanges
from kvferry.errors import InvalidArgument
from kvferry.stats import EngineStats, HitCounter, MemoryCounters, ShipCounters
from kvferry.wire import block_changes_to_pb, load_to_pb, numbered_changes_from_pb
from proto.kvferry.v1 import worker_pb2


def test_every_figure_arrives_under_its_own_name() -> None:
    memory = MemoryCounters(
        num_recompute_preemptions=31, num_swap_preemptions=32, num_parked_prompts=33, hits={"a": HitCounter(34, 35)}
    )
    fields = [field.name for field in dataclasses.fields(EngineStats) if field.name != "memory"]
    stats = EngineStats(**{name: value for value, name in enumerate(fields, start=1)}, memory=memory)
    load = load_to_pb(stats, ShipCounters(num_blocks=41, num_bytes=42, num_nacks=43), num_waiting_grants=100)
    assert load.num_waiting == stats.num_waiting + 100
    for name in set(fields) - {"num_waiting", "num_preemptions"}:
        assert getattr(load, name) == getattr(stats, name), name
    assert (load.num_recompute_preemptions, load.num_swap_preemptions, load.num_parked_prompts) == (31, 32, 33)
    assert (load.num_blocks_shipped, load.shipped_bytes, load.num_nacks) == (41, 42, 43)
    assert [(hits.tenant, hits.num_queried_tokens, hits.num_hit_tokens) for hits in load.tenant_hits] == [("a", 34, 35)]


def test_changes_become_bounded_messages_in_an_order_that_gives_the_same() -> None:
    """A reset first, then what was removed, then what was stored."""
    one, two, three = (bytes([number]) * 32 for number in range(3))
    with patch("kvferry.wire.MAX_HASHES_PER_MESSAGE", 2):
        messages = list(block_changes_to_pb(BlockChanges(is_reset=True, removed=[one], stored=[one, two, three])))
    assert [numbered_changes_from_pb(message).changes for message in messages] == [
        BlockChanges(is_reset=True),
        BlockChanges(removed=(one,)),
        BlockChanges(stored=(one, two)),
        BlockChanges(stored=(three,)),
    ]
    assert list(block_changes_to_pb(BlockChanges())) == []


@pytest.mark.parametrize("length", [0, 31, 33])
@pytest.mark.parametrize("kind", ["stored", "removed"])
def test_a_hash_of_another_length_is_refused_by_name(kind: str, length: int) -> None:
    message = worker_pb2.WatchBlocksResponse()
    getattr(message, kind).block_hashes.extend([bytes(32), bytes(length)])
    with pytest.raises(InvalidArgument, match=f"{kind}.block_hashes: a hash has 32 bytes, one here has {length}"):
        numbered_changes_from_pb(message)


def test_an_event_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="event: is not set"):
        numbered_changes_from_pb(worker_pb2.WatchBlocksResponse(epoch=1, sequence_number=1))
