"""Tenants end to end: API keys, private prefixes and shared ones, quotas, flush, pins, snapshots."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvferry.client import AsyncClient, Completion, GenerateOptions, PinOptions, Prompt
from kvferry.config import Config, TenantConfig
from kvferry.errors import InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated
from kvferry.rpc import RpcChannel
from proto.kvferry.v1 import cache_pb2, inference_pb2, inference_pb2_grpc
from tests.support.deployment import chat_folder, deployment_config, running_deployment
from tests.support.workers import assert_idle

KEYS = {"root": "key-of-root", "a": "key-of-tenant-a", "b": "key-of-tenant-b", "small": "key-of-tenant-small"}
NUM_BLOCKS = 64
PROMPT_TOKENS = 25
PROMPT_BLOCKS = 6
"""Full blocks of a prompt; its last token is always computed, so this many can be hit."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """A deployment's router, and a client of each tenant."""

    address: str
    clients: dict[str, AsyncClient]

    async def ask(self, caller: str, prompt: Prompt, max_tokens: int | None = 4, **options: Any) -> Completion:
        values = {"temperature": 0.0, "ignore_eos": True, **options}
        request = GenerateOptions(prompt=prompt, max_tokens=max_tokens, **values)
        return await self.clients[caller].complete(request, timeout_s=30.0)

    async def cached(self, tenant: str, prompt: Sequence[int], **options: Any) -> int:
        """Tokens of the prompt found in the prefix cache."""
        return (await self.ask(tenant, prompt, **options)).usage.cached_tokens

    async def memory(self, tenant: str) -> Sequence[cache_pb2.MemorySnapshot]:
        workers = await self.clients[tenant].memory()
        assert not [worker.error for worker in workers if worker.error]
        assert [worker.role for worker in workers] == ["prefill", "decode"]
        return [worker.memory for worker in workers]


@asynccontextmanager
async def serving(folder: Path, **script: Any) -> AsyncIterator[Tenants]:
    tenants = tuple(
        TenantConfig(
            name=name,
            api_keys=(SecretStr(key),),
            admin=name == "root",
            max_used_share=0.25 if name == "small" else None,
        )
        for name, key in KEYS.items()
    )
    base = deployment_config(chat_folder(folder, **script), num_blocks=NUM_BLOCKS)
    config = Config(model=base.model, engine=base.engine, transfer=base.transfer, router=base.router, tenants=tenants)
    async with running_deployment(config) as deployment:
        clients = {name: AsyncClient(deployment.router.address, api_key=key) for name, key in KEYS.items()}
        try:
            yield Tenants(deployment.router.address, clients)
            await clients["root"].flush_prefix_cache()  # ends the pins
            await assert_idle(*deployment.prefill, *deployment.decode)
        finally:
            for client in clients.values():
                await client.close()


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[Tenants]:
    async with serving(tmp_path / "model") as tenants:
        yield tenants


def prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(num_tokens)]


# -- whose call it is -------------------------------------------------------------------------------------------------


async def test_every_call_needs_a_key_that_is_known(tenants: Tenants) -> None:
    for key in (None, "nobody-has-this-key"):
        async with AsyncClient(tenants.address, api_key=key) as client:
            for call in (
                client.complete(GenerateOptions(prompt=[1, 2], max_tokens=1)),
                client.abort("x"),
                client.capabilities(),
                client.workers(),
                client.memory(),
                client.flush_prefix_cache(),
                client.pin_prefix(PinOptions("x", [1, 2])),
                client.unpin_prefix("x"),
            ):
                with pytest.raises(Unauthenticated) as caught:
                    await call
                assert key is None or key not in caught.value.message


async def test_the_scheme_must_be_bearer_and_there_must_be_one_key(tenants: Tenants) -> None:
    request = inference_pb2.ListWorkersRequest()
    for value, is_good in ((f"bearer {KEYS['a']}", True), (f"Basic {KEYS['a']}", False), (KEYS["a"], False)):
        async with RpcChannel(tenants.address, headers={"authorization": value}) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel.grpc)
            if is_good:
                assert len((await channel.unary(stub.ListWorkers, request)).workers) == 2
            else:
                with pytest.raises(Unauthenticated, match="Bearer KEY"):
                    await channel.unary(stub.ListWorkers, request)


async def test_a_request_cannot_say_that_it_is_another_tenants(tenants: Tenants) -> None:
    with pytest.raises(PermissionDenied, match="tenant") as caught:
        await tenants.ask("b", prompt(1), tenant="a")
    assert caught.value.field == "tenant"
    assert (await tenants.ask("a", prompt(1), tenant="a")).usage.cached_tokens == 0


async def test_a_tenant_aborts_only_its_own_requests(tenants: Tenants) -> None:
    options = GenerateOptions(prompt=prompt(1), max_tokens=150, ignore_eos=True, request_id="mine")
    async with tenants.clients["a"].generate(options) as events:
        await anext(events)
        assert await tenants.clients["b"].abort("mine") == ()
        assert await tenants.clients["a"].abort("mine") == ("mine",)


# -- prefixes ---------------------------------------------------------------------------------------------------------


async def test_a_prefix_is_its_tenants_alone(tenants: Tenants) -> None:
    first = await tenants.ask("a", prompt(1))
    assert first.usage.cached_tokens == 0
    assert await tenants.cached("a", prompt(1)) == 4 * PROMPT_BLOCKS
    other = await tenants.ask("b", prompt(1))
    assert other.usage.cached_tokens == 0
    assert other.choices[0].token_ids == first.choices[0].token_ids
    assert await tenants.cached("root", prompt(1)) == 0


async def test_tenants_share_with_a_shared_salt_and_only_with_it(tenants: Tenants) -> None:
    assert await tenants.cached("a", prompt(1), shared_salt="ours") == 0
    assert await tenants.cached("b", prompt(1), shared_salt="ours") == 4 * PROMPT_BLOCKS
    assert await tenants.cached("b", prompt(1), shared_salt="theirs") == 0
    assert await tenants.cached("b", prompt(1)) == 0
    assert await tenants.cached("b", prompt(1), shared_salt="a") == 0, "a tenant's name opens nothing"
    assert await tenants.cached("b", prompt(1), shared_salt="ours", cache_salt="x") == 0


# -- quotas -----------------------------------------------------------------------------------------------------------


async def test_what_a_quota_can_never_hold_is_refused_with_the_numbers(tenants: Tenants) -> None:
    quota = NUM_BLOCKS // 4
    with pytest.raises(ResourceExhausted, match=rf"quota of tenant 'small'.* {quota}") as caught:
        await tenants.ask("small", prompt(1, 4 * quota), max_tokens=10)
    assert caught.value.retry_after_s is None
    assert (await tenants.ask("a", prompt(1, 4 * quota), max_tokens=10)).usage.completion_tokens == 10
    assert (await tenants.ask("small", prompt(1), max_tokens=10)).usage.completion_tokens == 10
    longest = 4 * quota - PROMPT_TOKENS + 1
    assert (await tenants.ask("small", prompt(1), max_tokens=None)).usage.completion_tokens == longest


async def test_a_tenant_at_its_quota_waits_for_itself_and_holds_up_nobody(tenants: Tenants) -> None:
    """Each request of `small` needs 12 of its 16 blocks, so they run one after the other."""
    async with (
        tenants.clients["small"].generate(GenerateOptions(prompt=prompt(1), max_tokens=24, ignore_eos=True)) as one,
        tenants.clients["small"].generate(GenerateOptions(prompt=prompt(2), max_tokens=24, ignore_eos=True)) as two,
    ):
        assert await tenants.cached("b", prompt(3)) == 0
        counts = [sum(len(event.delta.token_ids) for event in [e async for e in events]) for events in (one, two)]
    assert counts == [24, 24]


# -- flush and pin ----------------------------------------------------------------------------------------------------


async def test_flush_is_for_the_callers_blocks(tenants: Tenants) -> None:
    for tenant in ("a", "b"):
        await tenants.ask(tenant, prompt(1))
    flushed = await tenants.clients["a"].flush_prefix_cache()
    assert [worker.role for worker in flushed] == ["prefill", "decode"]
    assert all(worker.num_blocks >= PROMPT_BLOCKS and not worker.error for worker in flushed)
    assert await tenants.cached("a", prompt(1)) == 0
    assert await tenants.cached("b", prompt(1)) == 4 * PROMPT_BLOCKS
    with pytest.raises(PermissionDenied, match="only an administrator"):
        await tenants.clients["a"].flush_prefix_cache(tenant="b")
    await tenants.clients["root"].flush_prefix_cache(tenant="b")
    assert await tenants.cached("b", prompt(1)) == 0
    assert await tenants.cached("a", prompt(1)) == 4 * PROMPT_BLOCKS
    await tenants.clients["root"].flush_prefix_cache()
    assert await tenants.cached("a", prompt(1)) == 0


async def test_a_pin_survives_eviction_pressure(tenants: Tenants) -> None:
    client = tenants.clients["a"]
    for seed in (1, 2):
        await tenants.ask("a", prompt(seed))
    pinned = await client.pin_prefix(PinOptions("system", prompt(1)))
    assert (pinned.num_tokens, pinned.num_full_blocks) == (PROMPT_TOKENS, PROMPT_BLOCKS)
    assert [worker.num_blocks for worker in pinned.workers] == [PROMPT_BLOCKS, PROMPT_BLOCKS]
    for seed in range(100, 130):
        await tenants.ask("b", prompt(seed))
    assert await tenants.cached("a", prompt(2)) == 0, "the pressure was not enough to evict"
    assert await tenants.cached("a", prompt(1)) == 4 * PROMPT_BLOCKS
    assert [memory.num_pinned_blocks for memory in await tenants.memory("root")] == [PROMPT_BLOCKS, PROMPT_BLOCKS]
    assert [worker.num_blocks for worker in await tenants.clients["b"].unpin_prefix("system")] == [0, 0]
    assert [worker.num_blocks for worker in await client.unpin_prefix("system")] == [PROMPT_BLOCKS, PROMPT_BLOCKS]
    for seed in range(200, 230):
        await tenants.ask("b", prompt(seed))
    assert await tenants.cached("a", prompt(1)) == 0


async def test_pins_are_of_own_blocks_by_text_too_and_refused_beyond_the_bound(tenants: Tenants) -> None:
    await tenants.ask("a", prompt(1))
    foreign = await tenants.clients["b"].pin_prefix(PinOptions("x", prompt(1)))
    assert [worker.num_blocks for worker in foreign.workers] == [0, 0]
    with pytest.raises(PermissionDenied):
        await tenants.clients["b"].pin_prefix(PinOptions("x", prompt(1), tenant="a"))
    for_a = await tenants.clients["root"].pin_prefix(PinOptions("x", prompt(1), tenant="a"))
    assert [worker.num_blocks for worker in for_a.workers] == [PROMPT_BLOCKS, PROMPT_BLOCKS]
    text = "a system prompt that is long enough for some blocks of four tokens each, whatever the tokenizer is"
    await tenants.ask("a", text)
    by_text = await tenants.clients["a"].pin_prefix(PinOptions("text", text))
    assert all(worker.num_blocks == by_text.num_full_blocks > 0 for worker in by_text.workers)
    long = prompt(7, 4 * 30)
    await tenants.ask("a", long)
    refused = await tenants.clients["a"].pin_prefix(PinOptions("long", long))
    assert all("are beyond 32, the most that may be pinned" in worker.error for worker in refused.workers)


# -- the snapshot -----------------------------------------------------------------------------------------------------


async def test_the_numbers_of_a_snapshot_add_up(tenants: Tenants) -> None:
    for _ in range(3):
        await tenants.ask("a", prompt(1))
    await tenants.ask("b", prompt(2), tier="batch")
    await tenants.clients["a"].pin_prefix(PinOptions("x", prompt(1)))
    for memory in await tenants.memory("root"):
        assert memory.num_blocks == NUM_BLOCKS
        assert memory.num_free_blocks + memory.num_cached_blocks + memory.num_used_blocks == NUM_BLOCKS
        assert sum(memory.ref_counts.values()) == memory.num_used_blocks == memory.num_pinned_blocks == PROMPT_BLOCKS
        assert memory.num_filled_slots == PROMPT_BLOCKS * memory.block_size
        assert (memory.num_tail_slots, memory.fragmentation) == (0, 0.0)
        rows = {row.tenant: row for row in memory.tenants}
        assert sum(row.num_used_blocks for row in rows.values()) == memory.num_used_blocks
        assert sum(row.num_cached_blocks for row in rows.values()) == memory.num_cached_blocks
        assert rows["small"].max_used_blocks == NUM_BLOCKS // 4 and not rows["a"].HasField("max_used_blocks")
        assert rows["b"].num_hit_tokens == 0
    (prefill, _) = await tenants.memory("root")
    rows = {row.tenant: row for row in prefill.tenants}
    assert rows["a"].num_queried_tokens == 3 * PROMPT_TOKENS and rows["b"].num_queried_tokens == PROMPT_TOKENS
    assert rows["a"].num_hit_tokens == 2 * 4 * PROMPT_BLOCKS


async def test_a_running_sequence_is_seen_with_its_waste_and_tier(tmp_path: Path) -> None:
    async with serving(tmp_path / "model", step_delay_s=0.005) as tenants:
        options = GenerateOptions(prompt=prompt(1), max_tokens=150, ignore_eos=True, tier="batch")
        async with tenants.clients["a"].generate(options) as events:
            async for event in events:
                if event.delta.token_index > 4:
                    break
            _, decode = await tenants.memory("root")
            assert decode.num_used_blocks > PROMPT_BLOCKS
            assert [(tier.tier, tier.num_used_blocks) for tier in decode.tiers] == [("batch", decode.num_used_blocks)]
            assert dict(decode.ref_counts) == {1: decode.num_used_blocks}
            num_slots = decode.num_used_blocks * decode.block_size
            assert decode.num_tail_slots < decode.block_size
            assert num_slots - decode.block_size <= decode.num_filled_slots <= num_slots
            assert decode.fragmentation == pytest.approx(1 - decode.num_filled_slots / num_slots)


async def test_a_tenant_sees_only_its_own_row_and_the_size_of_the_pool(tenants: Tenants) -> None:
    for tenant in ("a", "b"):
        await tenants.ask(tenant, prompt(1))
    for memory in await tenants.memory("a"):
        (row,) = memory.tenants
        assert row.tenant == "a" and row.num_cached_blocks >= PROMPT_BLOCKS and row.num_queried_tokens > 0
        shown = {field.name for field, _ in memory.ListFields()}
        assert shown == {"num_blocks", "block_size", "tenants"}, "totals tell of the other tenants"
    assert {row.tenant for memory in await tenants.memory("root") for row in memory.tenants} >= {"a", "b", "small"}


async def test_where_workers_run_is_for_administrators(tenants: Tenants) -> None:
    async def shown_to(name: str) -> list[tuple[str, bool, bool]]:
        client = tenants.clients[name]
        blocks: list[cache_pb2.WorkerBlocks | cache_pb2.WorkerMemory] = [*await client.memory()]
        blocks += await client.flush_prefix_cache(tenant=name)
        pinned = await client.pin_prefix(PinOptions("x", prompt(1)))
        blocks += [*pinned.workers, *await client.unpin_prefix("x")]
        assert [entry.worker for entry in blocks] == 4 * ["prefill-0", "decode-0"]
        workers = [(worker.id, bool(worker.address), worker.pid > 0) for worker in await client.workers()]
        assert {bool(entry.address) for entry in blocks} == {workers[0][1]}
        return workers

    assert await shown_to("a") == [("prefill-0", False, False), ("decode-0", False, False)]
    assert await shown_to("root") == [("prefill-0", True, True), ("decode-0", True, True)]


async def test_an_unknown_tenant_is_named_to_administrators(tenants: Tenants) -> None:
    client = tenants.clients["root"]
    for call in (
        client.flush_prefix_cache(tenant="nobody"),
        client.pin_prefix(PinOptions("x", prompt(1), tenant="nobody")),
        client.unpin_prefix("x", tenant="nobody"),
    ):
        with pytest.raises(InvalidArgument, match="no tenant 'nobody'; known tenants: root, a, b, small") as caught:
            await call
        assert caught.value.field == "tenant"
