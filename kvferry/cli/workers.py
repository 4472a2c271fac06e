"""`kvferry workers`: who serves behind a router."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from kvferry.cli.console import write_json, write_table
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
from kvferry.rpc import run
from proto.kvferry.v1 import inference_pb2


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("workers", epilog="Example: kvferry workers --target 127.0.0.1:50051 --json")(workers)


def workers(
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Lists the workers of a router and their state; where they run is for administrators."""
    found = run(_ask(router_of(target, api_key, configuration(config, settings))))
    if as_json:
        write_json([worker_json(worker) for worker in found])
        return
    columns = {
        "id": [worker.id for worker in found],
        "role": [worker.role for worker in found],
        "state": [f"{worker.state}: {worker.reason}" if worker.reason else worker.state for worker in found],
    }
    if len({worker.model for worker in found} - {""}) > 1:
        columns["model"] = [worker.model for worker in found]
    if any(worker.address for worker in found):
        columns |= {"pid": [str(worker.pid) for worker in found], "address": [worker.address for worker in found]}
    columns |= {
        "requests": [str(worker.num_requests) for worker in found],
        "free blocks": [f"{worker.num_available_blocks} of {worker.num_blocks}" for worker in found],
    }
    if any(worker.address for worker in found):
        columns["known blocks"] = [str(worker.num_known_blocks) for worker in found]
    write_table(columns)


def worker_json(worker: inference_pb2.WorkerInfo) -> dict[str, object]:
    """A worker as scripts read it: id, role, pid, address, and the rest of what the router knows."""
    return {field.name: getattr(worker, field.name) for field in worker.DESCRIPTOR.fields}


async def _ask(router: RouterTarget) -> Sequence[inference_pb2.WorkerInfo]:
    async with connected(router) as client:
        return await client.workers()
