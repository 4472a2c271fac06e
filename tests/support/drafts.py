"""Drafts of every kind: right to the end, right for a while, wrong at once, or none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.core import EngineCore
from engine.scripted import DEFAULT_SCRIPT_CONFIG, SLOT_BYTES, ScriptConfig, next_slot, slots_of, token_of_slots
from engine.sequence import Sequence
from engine.speculation import SpeculationPolicy, Speculator, StepOutlook

LONGEST_DRAFT = 7

Oracle = Callable[[Sequence, int], SequenceOf[int]]
"""What so many next tokens of a sequence are going to be; may be fewer."""


class DrawnDrafts(Speculator):
    """Knows what comes next and proposes it, or something else, as `rng` wills.

    Attributes:
        met: how many drafts there were by their length and how much of it came out.
    """

    def __init__(self, rng: random.Random, oracle: Oracle, vocab_size: int) -> None:
        super().__init__(SpeculationPolicy("prompt_lookup"))
        self.met: Counter[tuple[int, int]] = Counter()
        self._rng, self._oracle, self._vocab_size = rng, oracle, vocab_size

    def propose(self, sequence: Sequence, most: int, outlook: StepOutlook) -> list[int]:
        length = max(0, min(most, self._rng.randint(0, LONGEST_DRAFT)))
        draft = list(self._oracle(sequence, self._rng.randint(0, length)))
        return draft + [self._rng.randrange(self._vocab_size) for _ in range(length - len(draft))]

    def observe(self, sequence: Sequence, draft: SequenceOf[int], new: SequenceOf[int]) -> None:
        super().observe(sequence, draft, new)
        if draft:
            self.met[len(draft), len(new) - 1] += 1


def scripted_drafts(rng: random.Random, config: ScriptConfig = DEFAULT_SCRIPT_CONFIG) -> DrawnDrafts:
    """For an engine whose scripted model has mode "digest"."""

    def oracle(sequence: Sequence, number: int) -> list[int]:
        slots, found = bytearray(slots_of(sequence.token_ids)), list[int]()
        for index in range(sequence.num_output_tokens, sequence.num_output_tokens + number):
            found.append(token_of_slots(bytes(slots), config, sequence.sampling, sequence.choice, index))
            slots += next_slot(bytes(slots[-SLOT_BYTES:]), found[-1])
        return found

    return DrawnDrafts(rng, oracle, config.vocab_size)


def speculate(core: EngineCore, speculator: Speculator | None) -> None:
    """Has an engine take its drafts from `speculator`, or make none."""
    core.speculator = core.scheduler.speculator = speculator
