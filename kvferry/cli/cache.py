"""`kvferry cache`: the KV memory of a deployment; stats, flush, pin, unpin."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf import json_format

from kvferry.cli.console import note, write_json, write_table
from kvferry.cli.generate import prompt_of
from kvferry.cli.options import (
    ApiKeyOption,
    ConfigOption,
    JsonOption,
    RouterTarget,
    SetOption,
    TargetOption,
    configuration,
    router_of,
)
from kvferry.cli.router import connected
from kvferry.client import AsyncClient, ChatMessage, PinOptions, Prompt
from kvferry.errors import InvalidArgument, NotFound, Unavailable
from kvferry.rpc import run
from proto.kvferry.v1 import cache_pb2

TenantOption = Annotated[
    str, typer.Option("--tenant", metavar="NAME", help="Whose blocks, for administrators; the API key's tenant.")
]

EXAMPLE_SYSTEM = "You answer in one short sentence, in plain words, and say so when you do not know the answer."
"""Of the help: long enough for a block of the default size."""

_T = TypeVar("_T")


def make_app() -> typer.Typer:
    """The commands below `kvferry cache`."""
    app = typer.Typer(
        help="Shows, empties and pins the prefix cache.", no_args_is_help=True, epilog="Example: kvferry cache stats"
    )
    app.command("stats", epilog="Example: kvferry cache stats --target 127.0.0.1:50051 --json")(stats)
    app.command("flush", epilog="Example: kvferry cache flush --tenant search")(flush)
    app.command("pin", epilog=f'Example: kvferry cache pin brief --system "{EXAMPLE_SYSTEM}"')(pin)
    app.command("unpin", epilog="Example: kvferry cache unpin brief")(unpin)
    return app


def stats(
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Shows the KV memory of every worker: blocks, waste, hits by tenant, evictions, preemptions, swaps.

    A tenant that is no administrator sees its own figures only.
    """
    workers = _ask(router_of(target, api_key, configuration(config, settings)), AsyncClient.memory)
    if as_json:
        write_json([_json(worker) for worker in workers])
    else:
        has_totals = any(_has_totals(worker.memory) for worker in workers)
        if has_totals:
            write_table(_memory_columns(workers), title="blocks")
            write_table(_cost_columns(workers), title="since each worker's start")
        write_table(_tenant_columns(workers), title="tenants")
        if has_totals:
            write_table(_holder_columns(workers), title="who holds the used blocks")
    _fail_if_any(workers)


def flush(
    tenant: TenantOption = "",
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Makes cached prefixes unfindable and ends their pins; running requests go on.

    An administrator flushes everybody's blocks unless --tenant says whose; others flush their own.
    """
    router = router_of(target, api_key, configuration(config, settings))
    workers = _ask(router, lambda client: client.flush_prefix_cache(tenant=tenant))
    _show_blocks("flushed", workers, as_json=as_json)
    if not _num_blocks(workers):
        note("nothing was cached")


def pin(
    name: Annotated[str, typer.Argument(help="What to call the pin.")],
    prompt: Annotated[str | None, typer.Argument(help="Text of the prefix; - reads standard input.")] = None,
    prompt_token_ids: Annotated[
        str | None, typer.Option("--prompt-token-ids", metavar="1,2,3", help="Token ids instead of text.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System prompt of conversations, instead of text.")
    ] = None,
    adapter: Annotated[str, typer.Option("--adapter", help="Adapter the prefix was computed with.")] = "",
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="Salt the prefix was computed with.")] = "",
    shared_salt: Annotated[str, typer.Option("--shared-salt", help="Shared salt it was computed with.")] = "",
    tenant: TenantOption = "",
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Keeps the full blocks of a prefix that are cached now from eviction. Run a request that begins with it first.

    For --system that is `kvferry chat --system` with the same text.
    """
    options = PinOptions(
        name,
        _prefix_of(prompt, prompt_token_ids, system),
        adapter=adapter,
        cache_salt=cache_salt,
        shared_salt=shared_salt,
        tenant=tenant,
    )
    router = router_of(target, api_key, configuration(config, settings))
    response = _ask(router, lambda client: client.pin_prefix(options))
    if not response.num_full_blocks:
        raise InvalidArgument("prompt", f"nothing is pinned: {response.num_tokens} tokens are shorter than one block")
    if _is_nowhere(response.workers):
        raise NotFound("nothing is pinned: the prefix is not cached on any worker; run a request with it first")
    heading = f"pinned of {response.num_full_blocks} ({response.num_tokens} tokens)"
    _show_blocks(heading, response.workers, as_json=as_json)


def unpin(
    name: Annotated[str, typer.Argument(help="What the pin is called.")],
    tenant: TenantOption = "",
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Ends a pin; its blocks stay cached until room is needed."""
    router = router_of(target, api_key, configuration(config, settings))
    workers = _ask(router, lambda client: client.unpin_prefix(name, tenant=tenant))
    if _is_nowhere(workers):
        raise NotFound(f"there is no pin {name!r} on any worker")
    _show_blocks("unpinned", workers, as_json=as_json)


def _prefix_of(prompt: str | None, prompt_token_ids: str | None, system: str | None) -> Prompt:
    """What to pin; exactly one source must be given."""
    if sum(source is not None for source in (prompt, prompt_token_ids, system)) != 1:
        raise typer.BadParameter("give one of PROMPT, --prompt-token-ids and --system")
    return prompt_of(prompt, prompt_token_ids) if system is None else [ChatMessage("system", system)]


def _ask(router: RouterTarget, question: Callable[[AsyncClient], Coroutine[Any, Any, _T]]) -> _T:
    async def ask() -> _T:
        async with connected(router) as client:
            return await question(client)

    return run(ask())


def _show_blocks(heading: str, workers: Sequence[cache_pb2.WorkerBlocks], *, as_json: bool) -> None:
    if as_json:
        write_json([_json(worker) for worker in workers])
    else:
        columns = _names(workers)
        columns[heading] = [worker.error or str(worker.num_blocks) for worker in workers]
        write_table(columns)
    _fail_if_any(workers)


def _num_blocks(workers: Sequence[cache_pb2.WorkerBlocks]) -> int:
    return sum(worker.num_blocks for worker in workers)


def _is_nowhere(workers: Sequence[cache_pb2.WorkerBlocks]) -> bool:
    """Whether all workers answered, and none has a block."""
    return not _num_blocks(workers) and not any(worker.error for worker in workers)


def _fail_if_any(workers: Sequence[cache_pb2.WorkerBlocks | cache_pb2.WorkerMemory]) -> None:
    failed = [f"{worker.worker}: {worker.error}" for worker in workers if worker.error]
    if failed:
        raise Unavailable("; ".join(failed))


def _json(message: cache_pb2.WorkerBlocks | cache_pb2.WorkerMemory) -> dict[str, Any]:
    """As scripts read it: names of the proto, zeros included, 64-bit numbers as numbers."""
    values = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    found: dict[str, Any] = _with_numbers(values)
    return found


def _with_numbers(value: Any, key: str = "") -> Any:
    """The standard mapping writes 64-bit numbers as strings; every field whose name begins with num_ is a number."""
    if isinstance(value, dict):
        return {name: _with_numbers(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    is_number = isinstance(value, str) and (key.startswith("num_") or key.endswith("_bytes"))
    return int(value) if is_number else value


def _names(workers: Sequence[cache_pb2.WorkerBlocks | cache_pb2.WorkerMemory]) -> dict[str, list[str]]:
    return {"worker": [worker.worker for worker in workers], "role": [worker.role for worker in workers]}


def _answered(workers: Sequence[cache_pb2.WorkerMemory]) -> list[cache_pb2.WorkerMemory]:
    return [worker for worker in workers if not worker.error]


def _has_totals(memory: cache_pb2.MemorySnapshot) -> bool:
    """Whether it tells of all tenants: blocks by state add up to the pool, unless they are left out."""
    return memory.num_free_blocks + memory.num_cached_blocks + memory.num_used_blocks > 0


def _memory_columns(workers: Sequence[cache_pb2.WorkerMemory]) -> dict[str, list[str]]:
    known = _answered(workers)
    memories = [worker.memory for worker in known]
    return _names(known) | {
        "free": [str(memory.num_free_blocks) for memory in memories],
        "cached": [str(memory.num_cached_blocks) for memory in memories],
        "used": [str(memory.num_used_blocks) for memory in memories],
        "pinned": [str(memory.num_pinned_blocks) for memory in memories],
        "of": [_pool(memory) for memory in memories],
        "tail waste, tokens": [str(memory.num_tail_slots) for memory in memories],
        "fragmentation": [f"{memory.fragmentation:.1%}" for memory in memories],
        "swapped out": [f"{memory.num_used_swap_blocks} of {memory.num_swap_blocks}" for memory in memories],
    }


def _cost_columns(workers: Sequence[cache_pb2.WorkerMemory]) -> dict[str, list[str]]:
    known = _answered(workers)
    memories = [worker.memory for worker in known]
    return _names(known) | {
        "evictions": [str(memory.num_evictions) for memory in memories],
        "preempted, recomputed": [
            f"{memory.num_recompute_preemptions}: {memory.num_recomputed_tokens} tokens" for memory in memories
        ],
        "preempted, swapped": [
            f"{memory.num_swap_preemptions}: {memory.swapped_bytes / 1e6:.1f} MB in {memory.swap_s:.3f} s"
            for memory in memories
        ],
        "parked": [str(memory.num_parked_prompts) for memory in memories],
        "copied on write": [str(memory.num_blocks_copied) for memory in memories],
        "waits for a prefix": [str(memory.num_prefix_waits) for memory in memories],
    }


def _tenant_columns(workers: Sequence[cache_pb2.WorkerMemory]) -> dict[str, list[str]]:
    rows = [(worker, tenant) for worker in _answered(workers) for tenant in worker.memory.tenants]
    return _names([worker for worker, _ in rows]) | {
        "tenant": [tenant.tenant or "(everybody)" for _, tenant in rows],
        "used": [_of(tenant.num_used_blocks, tenant, "max_used_blocks") for _, tenant in rows],
        "cached": [_of(tenant.num_cached_blocks, tenant, "max_cached_blocks") for _, tenant in rows],
        "pinned": [str(tenant.num_pinned_blocks) for _, tenant in rows],
        "hits, tokens": [_hits(tenant) for _, tenant in rows],
        "pool": [_pool(worker.memory) for worker, _ in rows],
    }


def _pool(memory: cache_pb2.MemorySnapshot) -> str:
    return f"{memory.num_blocks} × {memory.block_size} tokens"


def _of(num_blocks: int, tenant: cache_pb2.TenantMemory, quota: str) -> str:
    return f"{num_blocks} of {getattr(tenant, quota)}" if tenant.HasField(quota) else str(num_blocks)


def _hits(tenant: cache_pb2.TenantMemory) -> str:
    if not tenant.num_queried_tokens:
        return "-"
    rate = tenant.num_hit_tokens / tenant.num_queried_tokens
    return f"{tenant.num_hit_tokens} of {tenant.num_queried_tokens} ({rate:.1%})"


def _holder_columns(workers: Sequence[cache_pb2.WorkerMemory]) -> dict[str, list[str]]:
    known = _answered(workers)
    memories = [worker.memory for worker in known]
    return _names(known) | {
        "blocks by holders": [
            ", ".join(f"{number} by {holders}" for holders, number in sorted(memory.ref_counts.items())) or "-"
            for memory in memories
        ],
        "blocks by tier": [
            ", ".join(f"{tier.num_used_blocks} {tier.tier or tier.rank}" for tier in memory.tiers) or "-"
            for memory in memories
        ],
    }
