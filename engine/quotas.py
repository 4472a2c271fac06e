"""Tenants' shares of a pool as numbers of blocks."""

from __future__ import annotations

from collections.abc import Iterable

from engine.block_pool import BlockQuota
from kvferry.config import TenantConfig


def block_quotas(tenants: Iterable[TenantConfig], num_blocks: int) -> dict[str, BlockQuota]:
    """By name, for a pool of `num_blocks`; tenants without a bound are left out."""
    return {
        tenant.name: BlockQuota(tenant.max_used_blocks(num_blocks), tenant.max_cached_blocks(num_blocks))
        for tenant in tenants
        if tenant.max_used_share is not None or tenant.max_cached_share is not None
    }
