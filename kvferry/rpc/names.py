"""The addresses that configured targets stand for: `host:port` for itself, `dns:///host:port` for all of its name's.

A name that cannot be resolved keeps the addresses it had: a name server that is down takes no worker away.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import NoReturn

from kvferry.config import DNS_SCHEME
from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

Listed = Callable[[frozenset[str]], None]
"""Takes all addresses of a target, at every change."""


class FollowedTargets:
    """Tells of the addresses of targets, at every change where they are names, until `close`."""

    def __init__(self, *, refresh_s: float) -> None:
        self._refresh_s = refresh_s
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, target: str, listed: Listed) -> None:
        """From now on; an address is told of within this call."""
        if target.startswith(DNS_SCHEME):
            self._tasks.append(asyncio.create_task(follow_name(target, listed, refresh_s=self._refresh_s)))
        else:
            listed(frozenset({target}))

    async def close(self) -> None:
        """Follows nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def follow_name(target: str, listed: Listed, *, refresh_s: float) -> NoReturn:
    """Resolves a dns:/// target every `refresh_s` and tells of changes, until it is cancelled."""
    known: frozenset[str] | None = None
    reason = ""
    while True:
        try:
            found = await resolve(target)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name that can be asked for
            if reason != str(error):
                reason = str(error)
                log_event(logger, "name_not_resolved", level=logging.WARNING, target=target, reason=reason)
        else:
            reason = ""
            if found != known:
                known = found
                log_event(logger, "name_resolved", target=target, addresses=sorted(found))
                listed(found)
        await asyncio.sleep(refresh_s)


async def resolve(target: str) -> frozenset[str]:
    """All addresses of a dns:/// target, as host:port; raises OSError when there are none."""
    host, _, port = target.removeprefix(DNS_SCHEME).rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return frozenset(_host_port(entry[0], entry[4][0], int(port)) for entry in found)


def _host_port(family: int, host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
