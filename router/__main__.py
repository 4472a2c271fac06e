"""`python -m router`: the router as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from kvferry.config import Config, load_config
from kvferry.errors import KvferryError
from kvferry.process import StopSignals, print_ready
from kvferry.rpc import run
from kvferry.tasks import run_until_first
from kvferry.telemetry import configure_logging, log_event, start_telemetry
from router.app import RouterApp

logger = logging.getLogger(__name__)

READY_WAIT_S = 10.0
"""How long the ready line waits for workers. It comes without them too: a router starts whatever is down."""


def main() -> None:
    """Entry point."""
    options = _parser().parse_args()
    try:
        overrides = {
            "router": {
                "grpc_listen": options.listen,
                "http_listen": options.http,
                "prefill": options.prefill,
                "decode": options.decode,
            }
        }
        config = load_config(options.config, overrides)
        configure_logging(config.telemetry, "router", options.worker_id)
        run(_serve(config, options.worker_id))
    except KvferryError as error:
        sys.exit(f"error: {error.message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m router",
        description="The router. Usually started by `kvferry up` or `kvferry router`.",
        epilog="example: python -m router --config kvferry.toml --listen 127.0.0.1:50051 --http 127.0.0.1:8000 "
        "--prefill 127.0.0.1:50061 --decode 127.0.0.1:50062",
    )
    parser.add_argument("--config", type=Path, help="TOML file with the whole configuration")
    parser.add_argument("--listen", help="host:port of the gRPC server; port 0 for any")
    parser.add_argument("--http", help="host:port of the HTTP server; port 0 for any")
    parser.add_argument("--prefill", help="addresses of prefill workers, separated by commas; none: decode does it")
    parser.add_argument("--decode", help="addresses of decode workers, separated by commas")
    parser.add_argument("--worker-id", default="router", help="name in logs and traces")
    return parser


async def _serve(config: Config, instance: str) -> None:
    signals = StopSignals().install()
    telemetry = start_telemetry(config.telemetry, "router", instance)
    async with RouterApp(config, telemetry) as router:
        await run_until_first(_announce(router), _wait(signals.requested))
        await signals.requested.wait()
        log_event(logger, "draining", grace_s=config.shutdown.grace_s)
        await router.drain(config.shutdown.grace_s, signals.hurried)
    await telemetry.shutdown()
    log_event(logger, "stopped")


async def _announce(router: RouterApp) -> None:
    serving = await router.wait_ready(READY_WAIT_S)
    print_ready(address=router.address, http=router.http_url, serving=serving)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


if __name__ == "__main__":
    main()
