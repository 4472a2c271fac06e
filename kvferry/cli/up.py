"""`kvferry up`: the whole thing on one machine, with a demonstration if wanted."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from kvferry.cli.console import Progress, note, write, write_json, write_table
from kvferry.cli.generate import stream_answer
from kvferry.cli.options import (
    ConfigOption,
    DtypeOption,
    ModelOption,
    QuantizationOption,
    SetOption,
    configuration,
)
from kvferry.cli.serve import prepared
from kvferry.client import AsyncClient, ChatMessage, Completion, GenerateOptions
from kvferry.cluster import MODULES, Endpoints, LocalCluster
from kvferry.config import Config
from kvferry.errors import InvalidArgument
from kvferry.process import StopSignals
from kvferry.supervisor import Report
from kvferry.telemetry import configure_logging

DEMO_QUESTION = "What is the capital of France?"
DEMO_MAX_TOKENS = 64


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("up", epilog="Example: kvferry up --prefill 1 --decode 2 --model smollm2-135m-instruct")(up)


def up(
    prefill: Annotated[
        int, typer.Option("--prefill", min=0, help="Prefill workers a model; 0: decode computes prompts.")
    ] = 1,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Decode workers a model.")] = 1,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    grpc_listen: Annotated[str | None, typer.Option("--grpc-listen", metavar="HOST:PORT", help="gRPC address.")] = None,
    http_listen: Annotated[str | None, typer.Option("--http-listen", metavar="HOST:PORT", help="HTTP address.")] = None,
    ready_json: Annotated[
        bool, typer.Option("--ready-json", help="Print one line of JSON once requests can be served.")
    ] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Answer a sample question and show where the time went.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="End after the sample question.")] = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Starts a router and its workers on this machine and serves until Ctrl-C."""
    effective = configuration(
        config,
        [*_logging_settings(is_demo=demo or once), *(settings or ())],
        {
            "model": {"name": model, "dtype": dtype, "quantization": quantization},
            "router": {"grpc_listen": grpc_listen, "http_listen": http_listen},
        },
    )
    configure_logging(effective.telemetry, "supervisor")
    report = Progress(for_people=demo or once or (sys.stderr.isatty() and effective.telemetry.log_format != "json"))
    effective = prepared(effective, lambda text: report(text, "preparing_model", step=text))
    _warn_of_faults(effective, report, num_prefill=prefill)
    cluster = LocalCluster(effective, num_prefill=prefill, num_decode=decode, relay=note, report=report)
    # asyncio's own loop: it starts children without running any code between fork and exec, gRPC's handlers included.
    asyncio.run(_serve(cluster, effective, report, ready_json=ready_json, demo=demo or once, once=once))


def _warn_of_faults(config: Config, report: Progress, *, num_prefill: int) -> None:
    """Says which faults workers will commit; raises InvalidArgument for those that nobody would."""
    faults = {role: config.faults.of_role(role) for role in MODULES}
    if faults["prefill"] and not num_prefill:
        raise InvalidArgument("faults", f"{'; '.join(faults['prefill'])}: needs a prefill worker, and there is none")
    for role, of_role in faults.items():
        if of_role:
            report.warn(f"{role} workers fail on purpose: {'; '.join(of_role)}", "faults_on", role=role, faults=of_role)


def _logging_settings(*, is_demo: bool) -> list[str]:
    """Children write to a pipe and cannot see whether a person reads; a demonstration is not to drown in events."""
    for_people = ["telemetry.log_format=logfmt"] if sys.stderr.isatty() else []
    return [*for_people, "telemetry.log_level=warning"] if is_demo else for_people


async def _serve(
    cluster: LocalCluster, config: Config, report: Report, *, ready_json: bool, demo: bool, once: bool
) -> None:
    stop = StopSignals().install()
    serving = asyncio.create_task(_serve_until(cluster, config, report, ready_json=ready_json, demo=demo, once=once))
    requested = asyncio.create_task(stop.requested.wait())
    await asyncio.wait([serving, requested], return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        grace_s = config.shutdown.grace_s
        report(f"draining, up to {grace_s:g} s; Ctrl-C again ends at once", "draining", grace_s=grace_s)
        hurry = asyncio.create_task(_hurry(cluster, stop, report))
        serving.cancel()  # also while starting or answering: leaving the cluster's block ends the children
        await asyncio.wait([serving])
        hurry.cancel()
    requested.cancel()
    if not serving.cancelled():
        serving.result()


async def _hurry(cluster: LocalCluster, stop: StopSignals, report: Report) -> None:
    await stop.hurried.wait()
    report("ending at once", "hurried")
    cluster.hurry()


async def _serve_until(
    cluster: LocalCluster, config: Config, report: Report, *, ready_json: bool, demo: bool, once: bool
) -> None:
    async with cluster:
        endpoints = cluster.endpoints
        if ready_json:
            write_json(ready_line(config, endpoints))
        else:
            _show_endpoints(endpoints)
        if demo:
            await _demonstrate(endpoints, config)
        if not once:
            report("serving; Ctrl-C ends", "cluster_ready", grpc=endpoints.grpc, http=endpoints.http)
            await asyncio.Event().wait()  # until `_serve` cancels this


def ready_line(config: Config, endpoints: Endpoints) -> dict[str, object]:
    """What `--ready-json` prints."""
    return {
        "grpc": endpoints.grpc,
        "http": endpoints.http,
        "model": {"name": config.model.public_name, "path": config.model.path},
        "workers": [
            {"id": worker.id, "role": worker.role, "pid": worker.pid, "address": worker.address}
            for worker in endpoints.workers
        ],
        "router": {"pid": endpoints.router_pid},
    }


def _show_endpoints(endpoints: Endpoints) -> None:
    write_table(
        {
            "process": ["router", *(worker.id for worker in endpoints.workers)],
            "pid": [str(endpoints.router_pid), *(str(worker.pid) for worker in endpoints.workers)],
            "address": [f"{endpoints.grpc}, {endpoints.http}", *(worker.address for worker in endpoints.workers)],
        }
    )


async def _demonstrate(endpoints: Endpoints, config: Config) -> None:
    """Asks the sample question and shows where the time went."""
    write(f"\n> {DEMO_QUESTION}\n")
    prompt = [ChatMessage("user", DEMO_QUESTION)]
    options = GenerateOptions(prompt=prompt, temperature=0.0, max_tokens=DEMO_MAX_TOKENS)
    async with AsyncClient(endpoints.grpc, api_key=config.own_key) as client:
        completion = await stream_answer(client, options)
    write("\n")
    write_table(timing_columns(completion))


def timing_columns(completion: Completion) -> dict[str, list[str]]:
    """Where the time of a request went; queue, prefill and other add up to the first token."""
    timings, num_tokens = completion.timings, completion.usage.completion_tokens
    other_s = max(0.0, timings.time_to_first_token_s - timings.queue_s - timings.prefill_s)
    after_first = max(0, num_tokens - 1)
    rate = f"{after_first / timings.decode_s:.1f}" if timings.decode_s > 0 else "-"
    rows = {
        "queue": _ms(timings.queue_s),
        "prefill": _ms(timings.prefill_s),
        "other": _ms(other_s),
        "first token, sum": _ms(timings.time_to_first_token_s),
        "ship, beside these": _ms(timings.ship_s),
        "decode tokens/s": rate,
        "blocks shipped": f"{timings.num_blocks_shipped} ({timings.shipped_bytes / 1e6:.1f} MB)",
        "tokens": f"{completion.usage.prompt_tokens} in, {num_tokens} out",
    }
    return {"where the time went": list(rows), "": list(rows.values())}


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.1f} ms"
