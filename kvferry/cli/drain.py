"""`kvferry drain`: a worker takes no new work, and what runs there ends or moves."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.console import note
from kvferry.cli.options import (
    ApiKeyOption,
    ConfigOption,
    RouterTarget,
    SetOption,
    TargetOption,
    configuration,
    router_of,
)
from kvferry.cli.router import connected
from kvferry.rpc import run
from proto.kvferry.v1 import admin_pb2


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("drain", epilog="Example: kvferry drain decode-0 --grace 60 --router 127.0.0.1:50051")(drain)


def drain(
    worker: Annotated[str, typer.Argument(help="Name or HOST:PORT of the worker; see `kvferry workers`.")],
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0.0,
            help="How long what runs may go on before it moves to other workers; shutdown.grace_s of the worker.",
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Have it take new work again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also if it is the last ready worker of its role.")] = False,
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Has a worker take no new work, and waits until nothing runs there.

    Every router learns of it at once. Running requests finish, or go on with other workers once the grace has passed,
    in the same streams. The process stays until it gets SIGTERM or --undo. Ctrl-C ends the waiting, not the drain;
    repeated with --grace the command changes the grace.
    """
    if undo and (grace is not None or force):
        raise typer.BadParameter("--undo goes with neither --grace nor --force")
    router = router_of(target, api_key, configuration(config, settings))
    run(_undo(router, worker) if undo else _drain(router, worker, grace, force))


async def _drain(router: RouterTarget, worker: str, grace_s: float | None, force: bool) -> None:
    shown, name = "", worker
    async with connected(router) as client, client.drain_worker(worker, grace_s=grace_s, force=force) as progress:
        async for step in progress:
            name = step.worker
            line = _line(step)
            if step.num_running and line != shown:
                note(line)
                shown = line
    note(f"{name} is drained; end it with SIGTERM, or `kvferry drain {name} --undo`")


def _line(progress: admin_pb2.DrainWorkerResponse) -> str:
    """What is left; the same text as long as nothing but the time has changed."""
    rest = "until they finish or the grace has passed" if progress.grace_left_s > 0 else "moving to other workers"
    return f"{progress.worker}: {progress.num_running} running, {rest}"


async def _undo(router: RouterTarget, worker: str) -> None:
    async with connected(router) as client:
        answer = await client.undrain_worker(worker)
    note(f"{answer.worker} takes new work" + ("" if answer.was_draining else " (it did before)"))
