"""Speculation without a draft model: what followed a sequence's last tokens earlier in its text may follow them again.

    Speculator.propose ─► the draft rides in the sequence's slice ─► `sample_run` ─► Speculator.observe

A draft costs rows of a step, no step of its own. Each place is sampled as if the draft were not there (the noise is
keyed by position), and the draft counts only as far as it is what was sampled: tokens are the same with and without.
How far it goes is the bet of a cost model, in which the sequence's own record says how likely each place is right.
Torch-free, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engine.forward_batch import Sampled, SampledToken, SampleRequest

if TYPE_CHECKING:
    from engine.sequence import Sequence

SpeculationMode = Literal["prompt_lookup", "none"]

MAX_DRAFT_TOKENS = 16
"""Most tokens of one sequence's draft: rows cost more than the model of a step says when there are many."""
MAX_INDEXED_TOKENS = 16_384
"""Of a longer text only the end is looked through, so that a long prompt holds no step up: 0.3 µs a token."""
MAX_CANDIDATES = 8
"""Earlier places that are compared, the latest ones."""
LEAST_MATCH, LONGEST_MATCH = 2, 16
"""Tokens that must be the same before an earlier place and before the end; more than the longest are not compared."""
PRIOR_RIGHT = {2: 0.35, 3: 0.5, 4: 0.6, 8: 0.8, 16: 0.9}
"""How often a place was right after so many same tokens and up to the next entry, before a sequence's own record."""
PRIOR_WEIGHT = 2.0
"""Places that the prior counts for."""
MEMORY = 0.85
"""What each further place leaves of the weight of those before it."""


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """Whether sequences speculate, and what a row of a draft costs.

    Attributes:
        mode: "prompt_lookup" or "none".
        row_cost: time of one more row in a step, as a share of that of a step of one row; measured at start.
    """

    mode: SpeculationMode = "none"
    row_cost: float = 0.1


NO_SPECULATION = SpeculationPolicy()


@dataclass(slots=True)
class StepOutlook:
    """What a step is expected to bring and to cost so far; a further row must bring more than the step on average.

    Attributes:
        num_tokens: tokens expected of it.
        cost: its time, in steps of one row.
    """

    num_tokens: float
    cost: float

    @classmethod
    def of(cls, num_decodes: int, row_cost: float) -> StepOutlook:
        """Without any draft. Chunks of prompts beside it are not its cost: they would be computed anyway."""
        return cls(num_decodes, 1.0 + (num_decodes - 1) * row_cost)


class TextIndex:
    """Where each pair of tokens stood in a text that grows: chains of places, the latest first, as in LZ77."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # by pair: the place behind it
        self._earlier: dict[int, int] = {}  # by place: the next earlier one behind the same pair
        self._num_read = 0

    def read(self, token_ids: SequenceOf[int]) -> None:
        """Takes in what has come since; the text must only have grown."""
        first = max(self._num_read, LEAST_MATCH, len(token_ids) - MAX_INDEXED_TOKENS)
        latest, earlier = self._latest, self._earlier
        for place in range(first, len(token_ids)):  # a place has a token behind the pair, so the end is none
            pair = (token_ids[place - 2], token_ids[place - 1])
            if pair in latest:
                earlier[place] = latest[pair]
            latest[pair] = place
        self._num_read = max(first, len(token_ids))

    def match(self, token_ids: SequenceOf[int]) -> tuple[int, int]:
        """The place with most of the end's tokens before it, the latest of equals, and how many they are; or (0, 0)."""
        end = len(token_ids)
        best, best_length = 0, 0
        place = self._latest.get((token_ids[-2], token_ids[-1])) if end > LEAST_MATCH else None
        for _ in range(MAX_CANDIDATES):
            if place is None:
                break
            length = LEAST_MATCH
            while length < min(LONGEST_MATCH, place) and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._earlier.get(place)
        return best, best_length


class TrackRecord:
    """How often places were right, by the number of same tokens before them; old ones count ever less."""

    def __init__(self) -> None:
        self._right = {length: PRIOR_WEIGHT * share for length, share in PRIOR_RIGHT.items()}
        self._weight = dict.fromkeys(PRIOR_RIGHT, PRIOR_WEIGHT)

    def chance(self, length: int) -> float:
        """That a place with `length` same tokens before it is right."""
        level = _level(length)
        return self._right[level] / self._weight[level]

    def add(self, length: int, *, is_right: bool) -> None:
        """What became of such a place."""
        level = _level(length)
        self._right[level] = self._right[level] * MEMORY + is_right
        self._weight[level] = self._weight[level] * MEMORY + 1.0


def _level(length: int) -> int:
    return max(level for level in PRIOR_RIGHT if level <= length)


class SequenceLookup:
    """One sequence's text, its record, and what is expected to come next."""

    def __init__(self) -> None:
        self._index = TextIndex()
        self._record = TrackRecord()
        self._expected: list[int] = []  # drafted or not: the first one is compared with what comes, which costs nothing
        self._length = 0  # same tokens before the first of them

    def draft(self, token_ids: SequenceOf[int], most: int, outlook: StepOutlook, row_cost: float) -> list[int]:
        """Up to `most` tokens that are worth their rows; they are added to `outlook`."""
        self._index.read(token_ids)
        place, self._length = self._index.match(token_ids)
        self._expected = _following(token_ids, place, max(1, most)) if place else []
        chance, num_drafted = 1.0, 0
        for number in range(min(most, len(self._expected))):
            chance *= self._record.chance(self._length + number)
            if chance * outlook.cost <= row_cost * outlook.num_tokens:
                break
            outlook.num_tokens += chance
            outlook.cost += row_cost
            num_drafted += 1
        return self._expected[:num_drafted]

    def observe(self, new: SequenceOf[int]) -> None:
        """Compares what came with what was expected, up to the first difference."""
        for number, (expected, token_id) in enumerate(zip(self._expected, new, strict=False)):
            self._record.add(self._length + number, is_right=expected == token_id)
            if expected != token_id:
                break
        self._expected = []


def _following(token_ids: SequenceOf[int], place: int, number: int) -> list[int]:
    """Tokens from `place` on, which goes on into what it copies where the text ends: a text in a loop stays in it."""
    found = list(token_ids[place : place + number])
    period = len(token_ids) - place
    while len(found) < number:
        found.append(found[len(found) - period])
    return found


class Speculator:
    """Drafts of one engine's sequences.

    Attributes:
        row_cost: as in `SpeculationPolicy`.
        num_drafts, num_draft_tokens, num_accepted_tokens: since the start, as verified.
    """

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.row_cost = policy.row_cost
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def counts(self) -> dict[str, int]:
        """The counters as `EngineStats` names them."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }

    def outlook(self, num_decodes: int) -> StepOutlook:
        """Of a step with so many sequences that decode."""
        return StepOutlook.of(num_decodes, self.row_cost)

    def propose(self, sequence: Sequence, most: int, outlook: StepOutlook) -> list[int]:
        """The draft of one sequence for this step, none or up to `most` tokens."""
        if sequence.lookup is None:
            sequence.lookup = SequenceLookup()
        return sequence.lookup.draft(sequence.token_ids, min(most, MAX_DRAFT_TOKENS), outlook, self.row_cost)

    def observe(self, sequence: Sequence, draft: SequenceOf[int], new: SequenceOf[int]) -> None:
        """What a step brought: `new` tokens, all but the last one of them a beginning of `draft`."""
        if draft:
            self.num_drafts += 1
            self.num_draft_tokens += len(draft)
            self.num_accepted_tokens += len(new) - 1
        if sequence.lookup is not None:
            sequence.lookup.observe(new)


def may_speculate(sequence: Sequence) -> bool:
    """Whether a sequence takes drafts: it decodes, with one choice; beams pick among candidates and are left alone."""
    return (
        sequence.beam is None
        and sequence.num_choices == 1
        and not sequence.hold_after_prefill
        and sequence.num_uncomputed_tokens == 1
        and sequence.num_computed_tokens >= sequence.num_given_tokens
    )


def sample_run(
    sample: Callable[[int, SampleRequest], Sampled], request: SampleRequest, draft: SequenceOf[int]
) -> Sampled:
    """Samples behind the known tokens, and behind each token of the draft as long as it is what was sampled there.

    Args:
        sample: samples behind so many tokens of the draft.
        request: of the place behind the known tokens.
        draft: may be empty.

    Returns:
        The first token, those after it as `further`. A place that fails ends the run before it and fails at its turn.
    """
    first = sample(0, request)
    if not draft or first.error is not None:
        return first
    further: list[SampledToken] = []
    token_ids, last = list(request.token_ids), first.token_id
    for number, drafted in enumerate(draft, start=1):
        num_output_tokens = request.num_output_tokens + number
        if last != drafted or request.sampling.finish_after(drafted, num_output_tokens) is not None:
            break
        token_ids.append(drafted)
        place = replace(
            request, position=request.position + number, num_output_tokens=num_output_tokens, token_ids=token_ids
        )
        sampled = sample(number, place)
        if sampled.token_id is None:
            break
        further.append(SampledToken(sampled.token_id, sampled.logprob))
        last = sampled.token_id
    return replace(first, further=tuple(further)) if further else first
