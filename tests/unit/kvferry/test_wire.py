"""A worker's figures on the wire."""

from __future__ import annotations

import dataclasses

from kvferry.stats import EngineStats, HitCounter, MemoryCounters, ShipCounters
from kvferry.wire import load_to_pb


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
