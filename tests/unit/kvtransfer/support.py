"""A tiny layout, blocks whose bytes are known by hand, and a host that keeps them in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.block_digest import block_digest
from kvferry.errors import KvferryError
from kvferry.kv_layout import KvLayout
from kvferry.spec import AttemptId
from kvtransfer.frames import cut_block
from kvtransfer.messages import BlockFrame, Offer, Region
from kvtransfer.staging import StagingView
from kvtransfer.transport import CommitOutcome, Grant

LAYOUT = KvLayout(
    num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", model_fingerprint="model"
)  # 128 bytes a block
EPOCH = 7
ATTEMPT = AttemptId("request", 1)


def make_offer(
    num_tokens: int = 10,
    *,
    id: AttemptId = ATTEMPT,
    layout: KvLayout = LAYOUT,
    epoch: int = EPOCH,
    progress_timeout_s: float = 5.0,
) -> Offer:
    """An offer of `num_tokens` tokens; 10 are two full blocks and a partial one."""
    hashes = tuple(bytes([index % 256]) * 32 for index in range(num_tokens // layout.block_size))
    return Offer(id, epoch, layout, hashes, num_tokens, progress_timeout_s)


def contents_of(block_index: int) -> bytes:
    """What block `block_index` holds."""
    return bytes((block_index * 31 + position) % 256 for position in range(LAYOUT.block_bytes))


def frames_of(block_index: int, num_tokens: int = 4, *, max_frame_bytes: int = 128) -> list[BlockFrame]:
    return cut_block(
        contents_of(block_index),
        id=ATTEMPT,
        block_index=block_index,
        num_tokens=num_tokens,
        max_frame_bytes=max_frame_bytes,
    )


def payload_of(frame: BlockFrame) -> bytes | memoryview:
    """The bytes of a frame that carries them."""
    assert not isinstance(frame.payload, Region)
    return frame.payload


def put(view: StagingView, payload: bytes | memoryview) -> Region:
    """Copies a payload into a free slot."""
    region = view.reserve(len(payload))
    view.write(region, payload)
    return region


class MemorySource:
    """Blocks of `contents_of`; remembers what was read. `digests` are those made when the blocks filled."""

    def __init__(self, digests: Mapping[int, bytes] | None = None) -> None:
        self.reads: list[tuple[int, int]] = []
        self._digests = digests or {}

    async def secure(self) -> None:
        """They always stay."""

    def digest(self, block_index: int) -> bytes | None:
        return self._digests.get(block_index)

    def read(self, block_index: int, num_tokens: int) -> memoryview:
        self.reads.append((block_index, num_tokens))
        return memoryview(contents_of(block_index))


class OneContents:
    """Every block holds the same; none has a stored digest."""

    def __init__(self, contents: bytes) -> None:
        self._contents = contents

    async def secure(self) -> None:
        """They always stay."""

    def read(self, block_index: int, num_tokens: int) -> bytes:
        return self._contents

    def digest(self, block_index: int) -> None:
        return None


@dataclass
class MemoryHost:
    """A decode side with room for everything: lacks what `held` does not name."""

    held: frozenset[int] = frozenset()
    refusal: KvferryError | None = None
    already_committed: bool = False
    commit_outcome: CommitOutcome = CommitOutcome.COMMITTED
    grant_gate: asyncio.Event | None = None
    commit_gate: asyncio.Event | None = None
    blocks: dict[int, bytearray] = field(default_factory=dict)
    first_token_ids: tuple[int, ...] = ()
    first_logprobs: tuple[float, ...] = ()
    num_releases: int = 0
    num_wrong: int = 0
    granting: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Event = field(default_factory=asyncio.Event)
    committing: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def grant(self, offer: Offer) -> Grant:
        self.granting.set()
        if self.grant_gate is not None:
            await self.grant_gate.wait()
        if self.refusal is not None:
            raise self.refusal
        wanted = tuple(index for index in range(offer.num_blocks) if index not in self.held)
        self.blocks = {index: bytearray(LAYOUT.block_bytes) for index in wanted}
        return Grant(wanted, already_committed=self.already_committed)

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        self.blocks[block_index][offset : offset + len(payload)] = payload
        self.writing.set()

    def verify(self, block_index: int, digest: bytes, num_tokens: int) -> bool:
        is_right = block_digest(self.blocks[block_index]) == digest
        self.num_wrong += not is_right
        return is_right

    async def commit(self, first_token_ids: tuple[int, ...], first_logprobs: tuple[float, ...]) -> CommitOutcome:
        self.committing.set()
        if self.commit_gate is not None:
            await self.commit_gate.wait()
        self.first_token_ids, self.first_logprobs = first_token_ids, first_logprobs
        return self.commit_outcome

    def release(self) -> None:
        self.num_releases += 1
        self.released.set()

    @property
    def is_complete(self) -> bool:
        return bool(self.first_token_ids) and all(
            bytes(block) == contents_of(index) for index, block in self.blocks.items()
        )


class LargeHost(MemoryHost):
    """Blocks of another size."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes

    async def grant(self, offer: Offer) -> Grant:
        grant = await super().grant(offer)
        self.blocks = {index: bytearray(self._block_bytes) for index in grant.wanted}
        return grant
