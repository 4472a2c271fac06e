"""Snapshots of an engine's memory, computed by hand; pins and quotas over a real engine."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockQuota
from engine.core import EngineCore, EngineLimits
from engine.local import generate
from engine.memory_admin import pin_prefix
from engine.quotas import block_quotas
from engine.scripted import ScriptedRunner
from engine.sequence import Priority, Sequence
from engine.snapshot import memory_snapshot
from kvferry.config import TenantConfig
from kvferry.errors import ResourceExhausted
from kvferry.sampling import SamplingParams
from kvferry.spec import CachedPrefix

BLOCK = 4


def make_core(num_blocks: int = 32, **limits: object) -> EngineCore:
    return EngineCore(ScriptedRunner(num_blocks=num_blocks, block_size=BLOCK), EngineLimits(**limits))  # type: ignore[arg-type]


def sequence(core: EngineCore, name: str, prompt: list[int], *, tenant: str = "", tier: int = 0) -> Sequence:
    return Sequence(
        name,
        prompt,
        SamplingParams(max_tokens=50, temperature=0.0),
        priority=Priority(tier_rank=tier),
        hash_root=core.hash_root(tenant=tenant),
        tenant=tenant,
    )


def test_an_empty_engine() -> None:
    snapshot = memory_snapshot(make_core(num_blocks=8))
    assert (snapshot.num_blocks, snapshot.num_free_blocks, snapshot.num_used_blocks) == (8, 8, 0)
    assert (snapshot.fragmentation, snapshot.ref_counts, snapshot.tenants) == (0.0, {}, ())


def test_two_sequences_that_share_a_prefix_count_it_once() -> None:
    """9 prompt tokens: 2 full blocks, shared, and one block each with the rest: 1 prompt token and the output."""
    core = make_core()
    prompt = list(range(1, 10))
    core.add(sequence(core, "one", prompt, tenant="a", tier=2))
    core.step()
    core.add(sequence(core, "two", prompt, tenant="a", tier=1))
    core.step()
    one, two = core.sequences["one"], core.sequences["two"]
    assert one.block_table[:2] == two.block_table[:2] and one.num_computed_tokens == 10 and two.num_computed_tokens == 9
    snapshot = memory_snapshot(core)
    assert snapshot.num_used_blocks == 4
    assert snapshot.ref_counts == {1: 2, 2: 2}
    assert snapshot.num_filled_slots == 8 + 2 + 1
    assert (one.num_tokens, two.num_tokens) == (11, 10)
    assert snapshot.num_tail_slots == (4 - 3) + (4 - 2), "known tokens whose KV is to come are no waste"
    assert snapshot.fragmentation == pytest.approx(1 - 11 / 16)
    assert snapshot.tier_blocks == {1: 3, 2: 1}
    (row,) = snapshot.tenants
    assert (row.tenant, row.num_used_blocks, row.num_queried_tokens, row.num_hit_tokens) == ("a", 4, 18, 8)


def test_a_snapshot_is_a_copy() -> None:
    core = make_core()
    generate(core, [sequence(core, "one", [1, 2, 3], tenant="a")])
    before = memory_snapshot(core)
    generate(core, [sequence(core, "two", [1, 2, 3], tenant="a")])
    assert before.counters.hits["a"].num_queried_tokens == 3
    assert before.tenants[0].num_queried_tokens == 3


def test_a_prefix_is_pinned_as_far_as_it_is_cached_and_its_tenants() -> None:
    core = make_core()
    prompt = list(range(1, 14))
    generate(core, [sequence(core, "one", prompt, tenant="a")])
    assert pin_prefix(core, "x", CachedPrefix(tuple(prompt), tenant="b")) == 0
    assert pin_prefix(core, "x", CachedPrefix((*prompt[:7], 500), tenant="a")) == 1
    assert pin_prefix(core, "x", CachedPrefix(tuple(prompt), tenant="a")) == 3
    snapshot = memory_snapshot(core)
    assert (snapshot.num_pinned_blocks, snapshot.num_used_blocks, snapshot.num_filled_slots) == (3, 3, 12)
    core.check_integrity()
    assert core.pool.unpin("x", tenant="a") == 3


def test_blocks_shared_by_a_salt_are_pinned_by_their_owner_only() -> None:
    core = make_core()
    prompt = list(range(1, 10))
    owner = Sequence(
        "one",
        prompt,
        SamplingParams(max_tokens=2, temperature=0.0),
        hash_root=core.hash_root(tenant="a", shared_salt="s"),
        tenant="a",
    )
    generate(core, [owner])
    assert pin_prefix(core, "x", CachedPrefix(tuple(prompt), tenant="b", shared_salt="s")) == 0
    assert pin_prefix(core, "x", CachedPrefix(tuple(prompt), tenant="a", shared_salt="s")) == 2


def test_a_pin_beyond_the_quota_is_refused() -> None:
    core = make_core(quotas={"a": BlockQuota(max_used_blocks=16)})
    first, second = list(range(1, 34)), list(range(101, 142))
    for name, prompt in (("one", first), ("two", second)):
        one = sequence(core, name, prompt, tenant="a")
        one.sampling = SamplingParams(max_tokens=2, temperature=0.0)
        generate(core, [one])
    assert pin_prefix(core, "x", CachedPrefix(tuple(first), tenant="a")) == 8
    with pytest.raises(ResourceExhausted, match="beyond 16"):
        pin_prefix(core, "y", CachedPrefix(tuple(second), tenant="a"))


def test_shares_become_blocks() -> None:
    tenants = (
        TenantConfig(name="a", max_used_share=0.5),
        TenantConfig(name="b", max_used_share=0.001, max_cached_share=0.0),
        TenantConfig(name="c"),
    )
    assert block_quotas(tenants, 100) == {"a": BlockQuota(50, None), "b": BlockQuota(1, 0)}
