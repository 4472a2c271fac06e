"""The workers that the configuration lists: addresses once, names for as long as the router runs."""

from __future__ import annotations

from functools import partial
from typing import Self

from kvferry.config import RouterConfig
from kvferry.rpc.names import FollowedTargets
from router.membership import Membership
from router.worker import Role


class Discovery:
    """Lists workers with the membership; use it as `async with`."""

    def __init__(self, membership: Membership, config: RouterConfig) -> None:
        self._membership = membership
        self._config = config
        self._targets = FollowedTargets(refresh_s=config.dns_refresh_s)

    async def __aenter__(self) -> Self:
        for role, targets in ((Role.PREFILL, self._config.prefill), (Role.DECODE, self._config.decode)):
            for target in targets:
                self._targets.add(target, partial(self._membership.list_workers, target, role))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._targets.close()
