"""The workers that the configuration lists: addresses once, names for as long as the router runs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Self

from kvferry.config import RouterConfig
from kvferry.rpc.names import follow_name, is_name
from router.membership import Membership
from router.worker import Role


class Discovery:
    """Lists workers with the membership; use it as `async with`."""

    def __init__(self, membership: Membership, config: RouterConfig) -> None:
        self._membership = membership
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for role, targets in ((Role.PREFILL, self._config.prefill), (Role.DECODE, self._config.decode)):
            for target in targets:
                listed = partial(self._membership.list_workers, target, role)
                if is_name(target):
                    following = follow_name(target, listed, refresh_s=self._config.dns_refresh_s)
                    self._tasks.append(asyncio.create_task(following))
                else:
                    listed(frozenset({target}))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
