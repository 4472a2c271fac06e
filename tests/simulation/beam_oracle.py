"""The right answer of a beam search: that of an engine alone, with room for everything and nothing that disturbs it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.beam import Hypothesis
from engine.core import EngineCore, EngineLimits
from engine.local import generate
from engine.scripted import ScriptedRunner
from engine.sequence import Sequence
from kvferry.sampling import BeamParams, SamplingParams
from tests.simulation.oracle import BLOCK_SIZE, SCRIPT

NUM_BLOCKS = 64
"""More than all beams of the longest search hold."""


@dataclass(frozen=True, slots=True)
class UndisturbedSearch:
    """What a search finds, and every sequence that lives in it.

    Attributes:
        hypotheses: those returned, best first.
        lives: tokens of all beams after every step, the prompt's included: what any worker may compute.
    """

    hypotheses: tuple[Hypothesis, ...]
    lives: frozenset[tuple[int, ...]]


def search_undisturbed(prompt: SequenceOf[int], sampling: SamplingParams, beam: BeamParams) -> UndisturbedSearch:
    """Runs the search to its end."""
    runner = ScriptedRunner(SCRIPT, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    core = EngineCore(runner, EngineLimits(prefix_caching=False))
    lives: set[tuple[int, ...]] = set()

    def look(_step: int) -> None:
        lives.update(tuple(sequence.token_ids) for sequence in core.sequences.values())

    results = generate(core, [Sequence("search", prompt, sampling, beam=beam)], before_step=look)
    assert len(results["search"].beams) == beam.num_returned
    return UndisturbedSearch(results["search"].beams, frozenset(lives))
