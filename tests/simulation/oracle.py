"""What had to come out: the tokens of every request, and the bytes of every block that any of them can fill."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core import EngineCore
from engine.scripted import SLOT_BYTES, ScriptConfig, slots_of
from kvferry.block_hash import hash_blocks
from tests.simulation.world import InvariantViolation

BLOCK_SIZE = 4
"""Small, so that short prompts have several blocks and partial ones."""

BLOCK_BYTES = BLOCK_SIZE * SLOT_BYTES

SCRIPT = ScriptConfig(vocab_size=512)


class BlockOracle:
    """Right contents by block hash."""

    def __init__(self) -> None:
        self._contents: dict[bytes, bytes] = {}

    def expect(self, hash_root: bytes, token_ids: Sequence[int]) -> None:
        """The full blocks of this sequence may be published."""
        slots = slots_of(token_ids)
        for index, block_hash in enumerate(hash_blocks(hash_root, token_ids, BLOCK_SIZE)):
            self._contents[block_hash] = slots[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    def check(self, core: EngineCore) -> None:
        """Raises unless each published block holds the KV its hash stands for."""
        contents, view = self._contents, core.runner.block_view
        for block_hash, block_id in core.pool._by_hash.items():
            expected = contents.get(block_hash)
            if expected is None:
                raise InvariantViolation(f"block {block_id} is published for tokens that no request has")
            if view(block_id).tobytes() != expected:
                raise InvariantViolation(f"block {block_id} is published and its contents are wrong")
