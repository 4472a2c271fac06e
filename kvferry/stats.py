"""Figures of one engine: load now, counters since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Blocks by state (the three add up to `num_blocks`), queues, and counters that only grow."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_prefill_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int


@dataclass(slots=True)
class ShipCounters:
    """Blocks one worker sent, or received and verified, since its start; bytes of their contents; wrong digests."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_nacks: int = 0
