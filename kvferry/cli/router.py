"""The connection of a command to its router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from kvferry.cli.options import RouterTarget
from kvferry.client import AsyncClient
from kvferry.config import TelemetryConfig
from kvferry.errors import Unavailable
from kvferry.telemetry import configure_logging, start_telemetry

CONNECT_TIMEOUT_S = 3.0


@asynccontextmanager
async def connected(router: RouterTarget, traces: TelemetryConfig | None = None) -> AsyncIterator[AsyncClient]:
    """A client of the router, or of several; raises Unavailable at once when nobody listens at any of their addresses.

    Where `traces` names a collector, the client's spans are the roots of its requests' traces.
    """
    await _check_one_listens(router.addresses)
    if traces is None or traces.otlp_endpoint is None:
        async with AsyncClient(router.addresses, api_key=router.api_key, resume=router.resume) as client:
            yield client
        return
    configure_logging(traces, "client", "cli")
    telemetry = start_telemetry(traces, "client", "cli")
    try:
        async with AsyncClient(
            router.addresses, tracer=telemetry.tracer, api_key=router.api_key, resume=router.resume
        ) as client:
            yield client
    finally:
        await telemetry.shutdown()


async def _check_one_listens(targets: Sequence[str]) -> None:
    for target in targets[:-1]:
        with suppress(Unavailable):
            return await _check_listens(target)
    await _check_listens(targets[-1])


async def _check_listens(target: str) -> None:
    """A bare connection first: unlike gRPC's own, its failure is known at once and has one plain reason."""
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        raise _no_router(target, f"no answer in {CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _no_router(target, _reason(error)) from error
    writer.close()


def _no_router(target: str, reason: str) -> Unavailable:
    return Unavailable(
        f"no router answers at {target} ({reason}); start one with `kvferry up`, or give --target HOST:PORT"
    )


def _reason(error: OSError) -> str:
    """In words; event loops word it themselves where several addresses were tried."""
    return "connection refused" if isinstance(error, ConnectionRefusedError) else (error.strerror or str(error)).lower()
