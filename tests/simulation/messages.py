"""What the router sends to workers; what they answer are the events of `router/events.py`, ready for the lifecycle."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.spec import SequenceSpec
from router.events import ShipTo


@dataclass(frozen=True, slots=True)
class DecodeStart:
    """Begins a Decode call."""

    spec: SequenceSpec
    local_prefill: bool


@dataclass(frozen=True, slots=True)
class DecodeStop:
    """No more tokens of a choice are wanted."""

    num_wanted_tokens: int
    choice: int


@dataclass(frozen=True, slots=True)
class PrefillStart:
    """The request of a Prefill call."""

    spec: SequenceSpec
    target: ShipTo | None
