"""Owner of the block tables: matches prefixes, allocates, shares, copies on write, publishes, swaps and frees.

A sequence's path: `admit` (hits held, room for all known tokens) or `reserve` (the same for KV that arrives from
elsewhere), `prepare_write` for each further token, `fork` where several choices go on from one prompt, `publish` when
blocks are full and computed, `free` at the end. What must happen to the contents of blocks before the next step is
planned here, in order, and handed over by `take_ops`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from engine.block_pool import BlockPool, Room
from engine.memory_ops import CopyBlock, MemoryOp, SwapIn, SwapOut
from engine.sequence import Sequence
from engine.swap_space import SwappedTable, SwapSpace
from kvferry.kv_layout import num_beam_blocks

logger = logging.getLogger(__name__)


class BlockManager:
    """Block tables over one pool.

    Args:
        pool: the blocks.
        block_size: tokens of one block.
        swap_space: where swapped blocks go.
        num_watermark_blocks: blocks that stay available when a sequence joins running ones, so that those can grow.
        prefix_caching: whether full blocks are published and looked up.
        window: tokens that any layer attends to; None where a layer attends to all.
        is_sound: whether a cached block still holds what it held when it filled; asked before a hit is used.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        swap_space: SwapSpace | None = None,
        *,
        num_watermark_blocks: int = 1,
        prefix_caching: bool = True,
        window: int | None = None,
        is_sound: Callable[[int], bool] = lambda block_id: True,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.swap_space = swap_space or SwapSpace(0, 0)
        self.num_watermark_blocks = num_watermark_blocks
        self.prefix_caching = prefix_caching
        self.window = window
        self.num_unsound_hits = 0
        self._is_sound = is_sound
        self._computing: dict[bytes, Sequence] = {}  # hashes of blocks that are allocated and not yet computed
        self._ops: list[MemoryOp] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks_for(self, sequence: Sequence) -> int:
        """Most blocks a request of this sequence needs to go on alone: all beams together, or one choice."""
        if sequence.beam is None or sequence.hold_after_prefill:
            return self.num_blocks_for(sequence.max_kv_tokens)
        return num_beam_blocks(
            sequence.num_prompt_tokens, sequence.max_kv_tokens, sequence.beam.width, block_size=self.block_size
        )

    # -- the prefix cache -----------------------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Blocks of the longest published run of full blocks among the first `num_tokens` tokens; none is touched."""
        if not self._uses_cache(sequence):
            return []
        hits: list[int] = []
        for index, block_hash in enumerate(sequence.block_hashes(num_tokens // self.block_size, self.block_size)):
            block_id = self.pool.lookup(block_hash, self._tokens_of_block(sequence, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def computing_next(self, sequence: Sequence, num_tokens: int) -> Sequence | None:
        """Another sequence that is computing the first block of the first `num_tokens` tokens that is not published."""
        if not self._computing or not self._uses_cache(sequence):
            return None
        num_hits = len(self.match_prefix(sequence, num_tokens))
        if num_hits >= num_tokens // self.block_size:
            return None
        return self._computing.get(sequence.block_hashes(num_hits + 1, self.block_size)[num_hits])

    def _uses_cache(self, sequence: Sequence) -> bool:
        return self.prefix_caching and sequence.use_prefix_cache

    def _tokens_of_block(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _announce(self, sequence: Sequence) -> None:
        """Says which blocks the sequence is about to compute."""
        if self._uses_cache(sequence):
            num_full = sequence.num_tokens // self.block_size
            for block_hash in sequence.block_hashes(num_full, self.block_size)[sequence.num_published_blocks :]:
                self._computing.setdefault(block_hash, sequence)

    def _retract(self, sequence: Sequence, first: int, last: int) -> None:
        """Blocks `first` … `last - 1` are computed, or will not be."""
        if self._computing and self._uses_cache(sequence):
            for block_hash in sequence.block_hashes(last, self.block_size)[first:]:
                if self._computing.get(block_hash) is sequence:
                    del self._computing[block_hash]

    def publish(self, sequence: Sequence) -> None:
        """Publishes the full blocks whose KV is computed; gives back those that left the attention window."""
        if self._uses_cache(sequence):
            num_full = sequence.num_computed_tokens // self.block_size
            first = sequence.num_published_blocks
            if num_full > first:
                hashes = sequence.block_hashes(num_full, self.block_size)
                for index in range(first, num_full):
                    tokens = self._tokens_of_block(sequence, index)
                    self.pool.publish(sequence.block_table[index], hashes[index], tokens)
                self._retract(sequence, first, num_full)
                sequence.num_published_blocks = num_full
        if self.window is not None and not sequence.hold_after_prefill:
            self._drop_out_of_window(sequence, self.window)

    def _drop_out_of_window(self, sequence: Sequence, window: int) -> None:
        """Frees leading blocks no later token attends to. Their entries name a block still held: masked, but finite."""
        num_droppable = max(0, sequence.num_computed_tokens - window + 1) // self.block_size
        num_droppable = min(num_droppable, len(sequence.block_table) - 1)
        if num_droppable <= sequence.num_dropped_blocks:
            return
        self.pool.free(reversed(sequence.block_table[sequence.num_dropped_blocks : num_droppable]))
        sequence.num_dropped_blocks = num_droppable
        sequence.block_table[:num_droppable] = [sequence.block_table[num_droppable]] * num_droppable

    # -- taking blocks --------------------------------------------------------------------------------------------

    def admit(self, unit: SequenceOf[Sequence], *, keep_watermark: bool) -> Room:
        """Gives every sequence of `unit` blocks for all its known tokens, or nothing to any and says why not.

        Hits stop short of what must be computed (`Sequence.num_hittable_tokens`). Further beams of a gang share full
        blocks with the first, which computes them (`Sequence.prefix_leader`).
        """
        return self._unless_pins_yield(unit[0], lambda: self._admit(unit, keep_watermark=keep_watermark))

    def _admit(self, unit: SequenceOf[Sequence], *, keep_watermark: bool) -> Room:
        first = unit[0]
        hits = self.match_prefix(first, first.num_hittable_tokens)
        num_shared = [self._num_common_blocks(first, other) for other in unit[1:]]
        num_new = self.num_blocks_for(first.num_tokens) - len(hits)
        num_new += sum(self.num_blocks_for(other.num_tokens) for other in unit[1:]) - sum(num_shared)
        room = self._room(first, num_new, hits, keep_watermark=keep_watermark)
        if room is not Room.ENOUGH:
            return room
        if self._drop_unsound(hits):
            return self._admit(unit, keep_watermark=keep_watermark)
        self._take(first, hits, first.num_tokens)
        for other, shared in zip(unit[1:], num_shared, strict=True):
            self._take(other, first.block_table[:shared], other.num_tokens)
            other.prefix_leader = first
        return room

    def _drop_unsound(self, hits: list[int]) -> bool:
        """Makes hits unfindable whose contents have changed since they filled; says whether there were any."""
        unsound = [block_id for block_id in hits if not self._is_sound(block_id)]
        for block_id in unsound:
            logger.error("cached block %d has changed in memory; it is computed again", block_id)
            self.pool.unpublish(block_id)
        self.num_unsound_hits += len(unsound)
        return bool(unsound)

    def _num_common_blocks(self, first: Sequence, other: Sequence) -> int:
        num_blocks = (min(first.num_tokens, other.num_tokens) - 1) // self.block_size
        pairs = zip(*(one.block_hashes(num_blocks, self.block_size) for one in (first, other)), strict=True)
        return next((index for index, (mine, yours) in enumerate(pairs) if mine != yours), num_blocks)

    def reserve(self, sequence: Sequence, *, keep_watermark: bool) -> Room:
        """Like `admit`, for a sequence whose KV arrives from elsewhere: room for one token more, hits up to the end.

        Room for the forks of its choices must be there too, but is not taken: it is needed only when all has arrived.
        """
        return self._unless_pins_yield(sequence, lambda: self._reserve(sequence, keep_watermark=keep_watermark))

    def _reserve(self, sequence: Sequence, *, keep_watermark: bool) -> Room:
        hits = self.match_prefix(sequence, sequence.num_tokens)
        num_tokens = min(sequence.num_tokens + 1, sequence.max_kv_tokens)
        num_blocks = self.num_blocks_for(num_tokens)
        spare = min(sequence.num_forks, self.pool.num_blocks - num_blocks)
        room = self._room(sequence, num_blocks - len(hits), hits, keep_watermark=keep_watermark, spare=spare)
        if room is Room.ENOUGH:
            self._take(sequence, hits, num_tokens)
        return room

    def _room(
        self, sequence: Sequence, num_new: int, revived: list[int], *, keep_watermark: bool, spare: int = 0
    ) -> Room:
        spare += self.num_watermark_blocks if keep_watermark else 0
        return self.pool.room(num_new, revived=revived, spare=spare, tenant=sequence.tenant)

    def _unless_pins_yield(self, sequence: Sequence, take: Callable[[], Room]) -> Room:
        """Takes; where only the tenant's own pins take up its quota they end, and all is looked up and tried again."""
        room = take()
        if room is Room.OVER_QUOTA and (num_blocks := self.pool.yield_pins(sequence.tenant)):
            logger.warning("%d pinned blocks of tenant %r yield to its own work", num_blocks, sequence.tenant)
            room = take()
        return room

    def _take(self, sequence: Sequence, shared: list[int], num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens, the leading ones shared; room was checked before."""
        if sequence.block_table:
            raise ValueError(f"sequence {sequence.seq_id} has blocks already")
        for block_id in shared:
            self.pool.touch(block_id, sequence.tenant)
        new = self.pool.allocate(self.num_blocks_for(num_tokens) - len(shared), sequence.tenant)
        assert new is not None, "room was checked before"
        sequence.block_table = shared + new
        sequence.num_computed_tokens = len(shared) * self.block_size
        sequence.num_published_blocks = len(shared)
        self._announce(sequence)

    def prepare_write(self, sequence: Sequence) -> bool:
        """Room for the KV of the last known token, in a block of its own; False, and nothing changed, without room.

        A block that others hold too is replaced by a copy: copy on write.
        """
        index = (sequence.num_tokens - 1) // self.block_size
        if index == len(sequence.block_table):
            new = self.pool.allocate(1, sequence.tenant)
            if new is None:
                return False
            sequence.block_table += new
            return True
        source = sequence.block_table[index]
        if self.pool.ref_count(source) > 1:
            new = self.pool.allocate(1, sequence.tenant)
            if new is None:
                return False
            sequence.block_table[index] = new[0]
            if index == sequence.num_dropped_blocks:
                sequence.block_table[:index] = new * index  # entries of dropped blocks name a held one
            self._ops.append(CopyBlock(source, new[0]))
            self.pool.free([source])
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> int:
        """Room behind the last known token, to which `prepare_write` gave its own, for a draft of `num_tokens` tokens.

        Returns for how many of them there is. `truncate` gives back what it does not need in the end.
        """
        num_missing = self.num_blocks_for(sequence.num_tokens + num_tokens) - len(sequence.block_table)
        while num_missing > 0:
            spare = self.num_watermark_blocks
            if self.pool.room(num_missing, spare=spare, tenant=sequence.tenant) is Room.ENOUGH:
                new = self.pool.allocate(num_missing, sequence.tenant)
                assert new is not None, "room was checked before"
                sequence.block_table += new
                break
            num_missing -= 1
        return min(num_tokens, len(sequence.block_table) * self.block_size - sequence.num_tokens)

    def truncate(self, sequence: Sequence) -> None:
        """Gives back the blocks behind the computed tokens, the deepest first: what a draft took and got wrong."""
        first = self.num_blocks_for(sequence.num_computed_tokens)
        self.pool.free(reversed(sequence.block_table[first:]))
        del sequence.block_table[first:]

    def is_over_quota(self, sequence: Sequence, num_blocks: int = 1) -> bool:
        """Whether it is the tenant's quota that denies `sequence` so many blocks, not the pool."""
        return self.pool.room(num_blocks, tenant=sequence.tenant) is Room.OVER_QUOTA

    def holds_blocks_of(self, sequence: Sequence, tenant: str) -> bool:
        """Whether a block of `sequence`, whosever it is, counts against the quota of `tenant`."""
        return any(self.pool.tenant(block_id) == tenant for block_id in sequence.held_blocks)

    def fork(self, sequence: Sequence, seq_id: str, choice: int) -> Sequence:
        """A new sequence that shares all blocks of `sequence`."""
        fork = sequence.fork(seq_id, choice)
        del fork.block_table[self.num_blocks_for(sequence.num_computed_tokens) :]
        for block_id in fork.held_blocks:
            self.pool.touch(block_id)
        return fork

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks and slots of `sequence` back, the deepest first; without any it does nothing."""
        self._give_blocks_back(sequence)
        if sequence.swapped is not None:
            self._give_slots_back(sequence.unit)
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        sequence.num_digested_blocks = 0
        sequence.num_dropped_blocks = 0
        sequence.prefix_leader = None

    def _give_blocks_back(self, sequence: Sequence) -> None:
        if sequence.block_table:
            self._retract(sequence, sequence.num_published_blocks, sequence.num_tokens // self.block_size)
            self.pool.free(reversed(sequence.held_blocks))
        sequence.block_table = []

    # -- swapping -------------------------------------------------------------------------------------------------

    def swap_out(self, unit: SequenceOf[Sequence]) -> bool:
        """Plans to copy all blocks of `unit` to the host pool and frees them; False, and nothing changed, without room.

        Progress is kept: `swap_in` brings the sequences back as they were.
        """
        held = list(dict.fromkeys(block_id for sequence in unit for block_id in sequence.held_blocks))
        slots = self.swap_space.take(len(held))
        if slots is None:
            return False
        slot_of = dict(zip(held, slots, strict=True))
        self._ops += [SwapOut(block_id, slot) for block_id, slot in slot_of.items()]
        for sequence in unit:
            sequence.swapped = SwappedTable(tuple(slot_of[block_id] for block_id in sequence.held_blocks))
            self._give_blocks_back(sequence)
        return True

    def swap_in(self, unit: SequenceOf[Sequence], *, keep_watermark: bool) -> Room:
        """Gives swapped sequences their blocks back, all or nothing; blocks still in the prefix cache are not copied.

        Each must have room for its next token too, which is not taken yet: else it would be swapped out at once.
        """
        return self._unless_pins_yield(unit[0], lambda: self._swap_in(unit, keep_watermark=keep_watermark))

    def _swap_in(self, unit: SequenceOf[Sequence], *, keep_watermark: bool) -> Room:
        sources = self._swap_sources(unit)
        num_new = sum(block_id is None for block_id in sources.values())
        hits = list(dict.fromkeys(block_id for block_id in sources.values() if block_id is not None))
        num_needed = num_new + self._num_blocks_to_write(unit)
        room = self._room(unit[0], num_needed, hits, keep_watermark=keep_watermark)
        if room is not Room.ENOUGH:
            return room
        for block_id in hits:
            self.pool.touch(block_id, unit[0].tenant)
        new = self.pool.allocate(num_new, unit[0].tenant)
        assert new is not None, "room was checked before"
        block_of: dict[int, int] = {}
        for slot, hit in sources.items():
            block_of[slot] = new.pop() if hit is None else hit
            if hit is None:
                self._ops.append(SwapIn(slot, block_of[slot]))
        self._restore_tables(unit, block_of)
        return room

    def _num_blocks_to_write(self, unit: SequenceOf[Sequence]) -> int:
        """Blocks that the next token of every swapped sequence of `unit` takes: new ones, and copies of shared ones."""
        num_new = 0
        written: Counter[int] = Counter()
        for sequence in unit:
            assert sequence.swapped is not None
            index = (sequence.num_tokens - 1) // self.block_size - sequence.num_dropped_blocks
            if index < len(sequence.swapped.slots):
                written[sequence.swapped.slots[index]] += 1
            else:
                num_new += 1
        return num_new + sum(written.values()) - len(written)

    def _swap_sources(self, unit: SequenceOf[Sequence]) -> dict[int, int | None]:
        """For every slot of the unit the published block with its contents, None where there is none any more."""
        sources: dict[int, int | None] = {}
        for sequence in unit:
            assert sequence.swapped is not None
            hits = self.match_prefix(sequence, sequence.num_published_blocks * self.block_size)
            live_hits = hits[sequence.num_dropped_blocks :]
            for index, slot in enumerate(sequence.swapped.slots):
                sources.setdefault(slot, live_hits[index] if index < len(live_hits) else None)
        return sources

    def _restore_tables(self, unit: SequenceOf[Sequence], block_of: dict[int, int]) -> None:
        held: set[int] = set()
        for sequence in unit:
            assert sequence.swapped is not None
            live = [block_of[slot] for slot in sequence.swapped.slots]
            for block_id in live:
                if block_id in held:
                    self.pool.touch(block_id)
                held.add(block_id)
            sequence.block_table = [live[0]] * sequence.num_dropped_blocks + live
        self._give_slots_back(unit)
        for sequence in unit:
            self._announce(sequence)

    def _give_slots_back(self, unit: SequenceOf[Sequence]) -> None:
        """Slots are shared within a unit only, so a unit gives all of its slots back at once."""
        whole = {slot for sequence in unit if sequence.swapped for slot in sequence.swapped.slots}
        for sequence in unit:
            sequence.swapped = None
        self.swap_space.give_back(whole)

    # -- contents and books ---------------------------------------------------------------------------------------

    def take_ops(self) -> list[MemoryOp]:
        """What must happen to block contents before the next step, in order; they are planned anew after this."""
        ops, self._ops = self._ops, []
        return ops

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the pool's counts are those of the block tables of `sequences`."""
        known = list(sequences)
        self.pool.check_integrity(Counter(block_id for sequence in known for block_id in sequence.held_blocks))
        slots = {slot for sequence in known if sequence.swapped is not None for slot in sequence.swapped.slots}
        assert len(slots) == self.swap_space.num_used, f"{self.swap_space.num_used} slots used, {len(slots)} held"
        for sequence in known:
            assert sequence.swapped is None or not sequence.block_table, f"{sequence.seq_id} is swapped and has blocks"
        holders = {id(sequence) for sequence in known if sequence.block_table}
        assert all(id(leader) in holders for leader in self._computing.values()), "a prefix is computed by nobody"
