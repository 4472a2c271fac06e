"""All KV blocks of one device: who holds them, which are empty, which are cached, and what each tenant may take.

Every block is in exactly one state: *used* (reference count above zero), *cached* (count zero, its contents may be hit)
or *free* (count zero, its contents mean nothing). Blocks are taken from the free ones first, then from the cached ones,
least recently freed first. A cached block is found by the hash of its tokens and of all before them; its token ids are
compared on a hit as a last guard. Torch-free; block contents live in the runner.

A used block is charged to the tenant that took it, from the free ones or the cached ones, whoever shares it later. Pins
are holders like sequences, inside the pool: a pinned block is used, so it is never evicted.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.errors import ResourceExhausted

MAX_PINNED_SHARE = 0.5
"""Part of the pool that pins may hold: the rest always serves, however much is pinned."""
MAX_PINS = 1024
"""Pins of one pool; each is a few words of memory that only its owner's `unpin` gives back, so there is a bound."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the three add up to the pool's size."""

    free: int
    cached: int
    used: int

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True)
class BlockQuota:
    """Most blocks of one tenant by state; None is no bound.

    Beyond `max_used_blocks` nothing is given; beyond `max_cached_blocks` the least recently freed one is dropped.
    """

    max_used_blocks: int | None = None
    max_cached_blocks: int | None = None


@dataclass(slots=True)
class TenantBlocks:
    """Blocks charged to one tenant; the pinned ones are among the used."""

    num_used: int = 0
    num_cached: int = 0
    num_pinned: int = 0


@dataclass(frozen=True, slots=True)
class PoolCensus:
    """One look at every block.

    Attributes:
        ref_counts: number of used blocks by reference count.
        tenants: by name; only those that blocks are charged to.
    """

    ref_counts: Mapping[int, int]
    tenants: Mapping[str, TenantBlocks]


class Room(enum.Enum):
    """Whether blocks can be taken: `OVER_QUOTA` is the tenant's own doing and stays so when others free theirs."""

    ENOUGH = enum.auto()
    NO_BLOCKS = enum.auto()
    OVER_QUOTA = enum.auto()


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    block_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    tenant: str = ""
    digest: bytes | None = None


@dataclass(slots=True)
class _Account:
    """Books of one tenant with a quota; `cached` is in the order its blocks were freed."""

    quota: BlockQuota
    num_used: int = 0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def allows(self, num_more: int) -> bool:
        limit = self.quota.max_used_blocks
        return limit is None or self.num_used + num_more <= limit


class BlockListener(Protocol):
    """Told of every change of what can be found, in the middle of it: must be quick and leave the pool alone."""

    def on_published(self, block_hash: bytes) -> None: ...

    def on_unpublished(self, block_hash: bytes) -> None: ...

    def on_all_unpublished(self) -> None:
        """Nothing can be found now, as was told one by one."""


class BlockPool:
    """Allocation, reference counts, the index of published blocks, quotas and pins.

    Args:
        num_blocks: size of the pool.
        quotas: by tenant; one without a quota may take everything, and costs no book-keeping.
    """

    def __init__(self, num_blocks: int, quotas: Mapping[str, BlockQuota] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.max_pinned_blocks = int(num_blocks * MAX_PINNED_SHARE)
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # eviction order, oldest first
        self._by_hash: dict[bytes, int] = {}
        self._accounts = {tenant: _Account(quota) for tenant, quota in (quotas or {}).items()}
        self._pins: dict[tuple[str, str], set[int]] = {}  # (tenant, name) -> blocks
        self._pin_counts: Counter[int] = Counter()  # pinned block -> number of pins
        self.listener: BlockListener | None = None

    # -- counts ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free=free, cached=cached, used=self.num_blocks - free - cached)

    @property
    def num_pinned(self) -> int:
        """Blocks that at least one pin holds."""
        return len(self._pin_counts)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def tenant(self, block_id: int) -> str:
        """Whom a used or cached block is charged to."""
        return self._blocks[block_id].tenant

    @property
    def quotas(self) -> dict[str, BlockQuota]:
        """By tenant."""
        return {tenant: account.quota for tenant, account in self._accounts.items()}

    def published_blocks(self) -> list[int]:
        """Blocks that can be found, used and cached ones."""
        return list(self._by_hash.values())

    def published_hashes(self) -> list[bytes]:
        """Their hashes, in the order they were published."""
        return list(self._by_hash)

    def digest(self, block_id: int) -> bytes | None:
        """Digest of the block's contents, made when it filled; None where none was made."""
        return self._blocks[block_id].digest

    def set_digest(self, block_id: int, digest: bytes) -> None:
        """Keeps the digest of a full block until the block is taken anew."""
        self._blocks[block_id].digest = digest

    def max_used_blocks(self, tenant: str) -> int:
        """Most blocks `tenant` can ever hold: its quota, or the pool."""
        account = self._accounts.get(tenant)
        if account is None or account.quota.max_used_blocks is None:
            return self.num_blocks
        return min(self.num_blocks, account.quota.max_used_blocks)

    def census(self) -> PoolCensus:
        """Counts that nobody keeps up to date; one pass over all blocks."""
        ref_counts: Counter[int] = Counter()
        tenants: dict[str, TenantBlocks] = {}
        for block_id, block in enumerate(self._blocks):
            if block.ref_count == 0 and block.block_hash is None:
                continue
            owner = tenants.setdefault(block.tenant, TenantBlocks())
            if block.ref_count > 0:
                ref_counts[block.ref_count] += 1
                owner.num_used += 1
                owner.num_pinned += block_id in self._pin_counts
            else:
                owner.num_cached += 1
        return PoolCensus(dict(sorted(ref_counts.items())), dict(sorted(tenants.items())))

    # -- taking and giving back -----------------------------------------------------------------------------------

    def room(self, num_blocks: int, *, revived: Iterable[int] = (), spare: int = 0, tenant: str = "") -> Room:
        """Whether `tenant` can take `num_blocks` new blocks when also the cached ones among `revived` become used.

        `spare` blocks must stay available after that. Blocks of `revived` that are used already cost nothing.
        """
        cached = [block_id for block_id in revived if self._blocks[block_id].ref_count == 0]
        account = self._accounts.get(tenant) if self._accounts else None
        if account is not None and not account.allows(num_blocks + len(cached)):
            return Room.OVER_QUOTA
        num_available = len(self._free) + len(self._cached)
        return Room.ENOUGH if num_blocks + len(cached) + spare <= num_available else Room.NO_BLOCKS

    def allocate(self, num_blocks: int, tenant: str = "") -> list[int] | None:
        """Takes `num_blocks` blocks with reference count 1, charged to `tenant`.

        None, and nothing changed, when there are not enough or the tenant's quota forbids it.
        """
        if num_blocks > len(self._free) + len(self._cached):
            return None
        if self._accounts and (account := self._accounts.get(tenant)) is not None:
            if not account.allows(num_blocks):
                return None
            account.num_used += num_blocks
        taken: list[int] = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._evict_one()
            block = self._blocks[block_id]
            block.ref_count = 1
            block.tenant = tenant
            block.digest = None
            taken.append(block_id)
        return taken

    def _evict_one(self) -> int:
        block_id = next(iter(self._cached))
        self._remove_cached(block_id)
        self._forget(block_id)
        self.num_evictions += 1
        return block_id

    def touch(self, block_id: int, tenant: str | None = None) -> None:
        """Adds one holder; a cached block becomes used and is charged to `tenant`, None: as before."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is free and cannot be touched")
            self._remove_cached(block_id)
            block.tenant = block.tenant if tenant is None else tenant
            if self._accounts and (account := self._accounts.get(block.tenant)) is not None:
                account.num_used += 1
        block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one holder of each block, in the order given: the first ones are evicted first."""
        accounts = self._accounts
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                raise ValueError(f"block {block_id} is freed more often than it was taken")
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None
            if accounts and (account := accounts.get(block.tenant)) is not None:
                self._settle_freed(account, block_id)

    def _settle_freed(self, account: _Account, block_id: int) -> None:
        """Books of a tenant with a quota after its block got free or cached."""
        account.num_used -= 1
        if self._blocks[block_id].block_hash is None:
            return
        account.cached[block_id] = None
        limit = account.quota.max_cached_blocks
        if limit is not None and len(account.cached) > limit:
            self.unpublish(next(iter(account.cached)))
            self.num_evictions += 1

    def _remove_cached(self, block_id: int) -> None:
        del self._cached[block_id]
        if self._accounts and (account := self._accounts.get(self._blocks[block_id].tenant)) is not None:
            del account.cached[block_id]

    # -- the index of contents ------------------------------------------------------------------------------------

    def publish(self, block_id: int, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Makes a used block, whose contents are complete, findable. A hash that is known already keeps its block."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            raise ValueError(f"block {block_id} is not in use and cannot be published")
        if block.block_hash is not None or block_hash in self._by_hash:
            return
        block.block_hash = block_hash
        block.token_ids = tuple(token_ids)
        self._by_hash[block_hash] = block_id
        if self.listener is not None:
            self.listener.on_published(block_hash)

    def lookup(self, block_hash: bytes, token_ids: Sequence[int]) -> int | None:
        """The published block with this hash and these tokens; does not touch it."""
        block_id = self._by_hash.get(block_hash)
        if block_id is None or self._blocks[block_id].token_ids != tuple(token_ids):
            return None
        return block_id

    def unpublish(self, block_id: int) -> None:
        """Makes a block unfindable, for example because its contents proved wrong; its pins end."""
        self._forget(block_id)
        if block_id in self._pin_counts:
            self._drop_pins_of(block_id)
        if block_id in self._cached:
            self._remove_cached(block_id)
            self._free.append(block_id)

    def flush(self, tenant: str | None = None) -> int:
        """Unpublishes the blocks of `tenant`, all when None, and ends their pins; returns how many were published."""
        published = [
            block_id for block_id in self._by_hash.values() if tenant is None or self._blocks[block_id].tenant == tenant
        ]
        for block_id in published:
            self.unpublish(block_id)
        if self.listener is not None and published and not self._by_hash:
            self.listener.on_all_unpublished()
        return len(published)

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            if self.listener is not None:
                self.listener.on_unpublished(block.block_hash)
            block.block_hash = None
            block.token_ids = ()

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, name: str, block_ids: Iterable[int], *, tenant: str = "") -> int:
        """Keeps published blocks from eviction under `tenant`'s `name`, beside those the name holds already.

        Returns how many blocks the name holds then.

        Raises:
            ResourceExhausted: the pool's bound on pinned blocks or a quota of used blocks would be passed; nothing
                changed.
        """
        wanted = set(block_ids)
        if unpublished := [block_id for block_id in wanted if self._blocks[block_id].block_hash is None]:
            raise ValueError(f"blocks {sorted(unpublished)} are not published and cannot be pinned")
        held = self._pins.get((tenant, name), set())
        new = wanted - held
        if not held and len(self._pins) >= MAX_PINS:
            raise ResourceExhausted(f"this worker has {len(self._pins)} pins, the most it keeps; unpin one first")
        self._check_pinnable(new)
        if not new:
            return len(held)
        for block_id in new:
            self._pin_counts[block_id] += 1
            if self._pin_counts[block_id] == 1:
                self.touch(block_id)
        self._pins[tenant, name] = held | new
        return len(held | new)

    def _check_pinnable(self, block_ids: set[int]) -> None:
        num_new = len(block_ids - self._pin_counts.keys())
        if self.num_pinned + num_new > self.max_pinned_blocks:
            raise ResourceExhausted(
                f"{num_new} more blocks beside {self.num_pinned} pinned ones are beyond {self.max_pinned_blocks}, the "
                f"most that may be pinned of this worker's {self.num_blocks}"
            )
        charged = Counter(
            self._blocks[block_id].tenant for block_id in block_ids if self._blocks[block_id].ref_count == 0
        )
        for tenant, num_more in charged.items():
            account = self._accounts.get(tenant)
            if account is not None and not account.allows(num_more):
                raise ResourceExhausted(
                    f"{num_more} more blocks beside {account.num_used} used ones are beyond "
                    f"{account.quota.max_used_blocks}, the quota of tenant {tenant!r}"
                )

    def unpin(self, name: str, *, tenant: str = "") -> int:
        """Ends a pin; returns how many blocks it held, 0 when there is none of this name."""
        block_ids = self._pins.pop((tenant, name), set())
        for block_id in sorted(block_ids, reverse=True):
            self._drop_pin(block_id)
        return len(block_ids)

    def yield_pins(self, tenant: str | None = None) -> int:
        """Ends all pins, or one tenant's, where nothing but pins holds (its) blocks, for work that could not run else.

        Returns how many blocks are no longer pinned; 0 also where sequences will give blocks back by themselves.
        """
        if not self._pins:
            return 0
        # All pins of a block are one holder.
        idle = [block_id for block_id in self._pin_counts if self._blocks[block_id].ref_count == 1]
        if tenant is None:
            return self.unpin_all() if self.counts.used == len(idle) else 0
        account = self._accounts.get(tenant)
        num_idle = sum(self._blocks[block_id].tenant == tenant for block_id in idle)
        return self.unpin_all(tenant) if account is not None and account.num_used == num_idle else 0

    def unpin_all(self, tenant: str | None = None) -> int:
        """Ends all pins, or one tenant's; returns how many blocks are no longer pinned."""
        num_pinned = self.num_pinned
        for owner, name in list(self._pins):
            if tenant is None or owner == tenant:
                self.unpin(name, tenant=owner)
        return num_pinned - self.num_pinned

    def _drop_pin(self, block_id: int) -> None:
        self._pin_counts[block_id] -= 1
        if self._pin_counts[block_id] == 0:
            del self._pin_counts[block_id]
            self.free([block_id])

    def _drop_pins_of(self, block_id: int) -> None:
        for key, block_ids in list(self._pins.items()):
            if block_id in block_ids:
                block_ids.remove(block_id)
                self._drop_pin(block_id)
                if not block_ids:
                    del self._pins[key]

    # -- checking -------------------------------------------------------------------------------------------------

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raises AssertionError unless free + cached + used = total and each count equals its holders and its pin."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks both free and cached: {sorted(free & cached)}"
        for block_id, block in enumerate(self._blocks):
            expected = holders.get(block_id, 0) + (block_id in self._pin_counts)
            assert block.ref_count == expected, f"block {block_id}: count {block.ref_count}, holders {expected}"
            assert (block.ref_count == 0) == (block_id in free or block_id in cached), f"block {block_id} is nowhere"
            if block_id in free:
                assert block.block_hash is None, f"free block {block_id} is published"
            if block_id in cached:
                assert block.block_hash is not None, f"cached block {block_id} is not published"
            if block.block_hash is not None:
                assert self._by_hash.get(block.block_hash) == block_id, f"index and block {block_id} disagree"
        assert len(self._by_hash) == sum(block.block_hash is not None for block in self._blocks)
        self._check_accounts()
        self._check_pins()

    def _check_accounts(self) -> None:
        for tenant, account in self._accounts.items():
            owned = [block_id for block_id, block in enumerate(self._blocks) if block.tenant == tenant]
            num_used = sum(self._blocks[block_id].ref_count > 0 for block_id in owned)
            assert account.num_used == num_used, f"tenant {tenant!r}: {account.num_used} used, counted {num_used}"
            in_order = [block_id for block_id in self._cached if self._blocks[block_id].tenant == tenant]
            assert list(account.cached) == in_order, f"tenant {tenant!r}: cached {list(account.cached)}, not {in_order}"
            limit = account.quota.max_cached_blocks
            assert limit is None or len(in_order) <= limit, f"tenant {tenant!r}: {len(in_order)} cached of {limit}"

    def _check_pins(self) -> None:
        held = Counter(block_id for block_ids in self._pins.values() for block_id in block_ids)
        assert held == self._pin_counts, f"pins {held} and their counts {self._pin_counts} disagree"
        assert all(self._pins.values()), "a pin without blocks"
        assert all(self._blocks[block_id].block_hash is not None for block_id in held), "a pinned block is unfindable"
        assert self.num_pinned <= self.max_pinned_blocks, f"{self.num_pinned} pinned of {self.max_pinned_blocks}"
