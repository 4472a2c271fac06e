"""What the clients ask in one run, and what they must get."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from engine.scripted import reference_continuation
from kvferry.sampling import Finish, FinishKind, SamplingParams
from tests.simulation.oracle import SCRIPT
from tests.simulation.world import MS

MAX_PROMPT_TOKENS = 22
MAX_OUTPUT_TOKENS = 12
NUM_CHOICES = (1, 1, 1, 2, 4)
SALTS = ("", "", "", "tenant-a")


class Interruption(enum.Enum):
    """How a request may be cut short from outside."""

    CLIENT_GONE = "client gone"
    ABORT = "abort"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """The right answer of one choice.

    Attributes:
        expected: output tokens of an undisturbed run, up to and including the ending one.
        finish: how an undisturbed run ends.
        stop_after: output tokens that complete a stop string; None: there is none.
    """

    expected: tuple[int, ...]
    finish: Finish
    stop_after: int | None


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request and its right answer.

    Attributes:
        arrival_ns: when the client asks.
        choices: what each choice must get.
        interruption, interrupted_at_ns: what cuts it short, and when; it may have finished by then.
    """

    request_id: str
    arrival_ns: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tier_rank: int
    cache_salt: str
    choices: tuple[ChoicePlan, ...]
    interruption: Interruption | None
    interrupted_at_ns: int

    @property
    def all_tokens(self) -> list[tuple[int, ...]]:
        """Prompt and the whole output that workers may compute, of each choice."""
        return [(*self.prompt, *choice.expected) for choice in self.choices]


def draw_requests(rng: random.Random) -> list[RequestPlan]:
    """5 to 25 requests, mostly few; prompts share beginnings, arrivals are spread."""
    count = 5 + int(21 * rng.random() ** 3)
    spread_ns = rng.choice((0, 10, 40, 120)) * MS
    stems = [_draw_tokens(rng, rng.randrange(4, 17)) for _ in range(rng.randrange(1, 4))]
    interruptions = rng.choice((0.0, 0.0, 0.2, 0.6))
    return [
        _draw_request(rng, f"r{index}", int(rng.random() * spread_ns), stems, interruptions) for index in range(count)
    ]


def _draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(int(rng.random() * SCRIPT.vocab_size) for _ in range(count))


def _draw_prompt(rng: random.Random, stems: list[tuple[int, ...]]) -> tuple[int, ...]:
    stem = rng.choice(stems)
    if rng.random() < 0.2:
        return stem
    head = stem[: int(rng.random() * (len(stem) + 1))]
    return (head + _draw_tokens(rng, 1 + int(rng.random() * 7)))[:MAX_PROMPT_TOKENS]


def _draw_request(
    rng: random.Random, request_id: str, arrival_ns: int, stems: list[tuple[int, ...]], interruptions: float
) -> RequestPlan:
    prompt = _draw_prompt(rng, stems)
    max_tokens = 1 + int(rng.random() ** 1.5 * MAX_OUTPUT_TOKENS)
    num_choices = rng.choice(NUM_CHOICES)
    is_greedy = num_choices == 1 and rng.random() < 0.5
    free = SamplingParams(max_tokens, temperature=0.0 if is_greedy else 1.0, seed=int(rng.random() * 2**32))
    outputs = [reference_continuation(prompt, max_tokens, SCRIPT, free, choice=choice) for choice in range(num_choices)]
    sampling = _with_ending_token(rng, free, rng.choice(outputs))
    interruption = rng.choice(list(Interruption)) if rng.random() < interruptions else None
    return RequestPlan(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt=prompt,
        sampling=sampling,
        tier_rank=int(rng.random() * 3),
        cache_salt=rng.choice(SALTS),
        choices=tuple(_plan_choice(rng, output, sampling) for output in outputs),
        interruption=interruption,
        interrupted_at_ns=arrival_ns + int(rng.random() ** 2 * 60 * MS),
    )


def _plan_choice(rng: random.Random, output: list[int], sampling: SamplingParams) -> ChoicePlan:
    expected, finish = _cut(output, sampling)
    stop_after = None
    last = len(expected) if finish.kind is FinishKind.LENGTH else len(expected) - 1
    if last >= 1 and rng.random() < 0.15:
        stop_after = 1 + int(rng.random() * last)
    return ChoicePlan(expected, finish, stop_after)


def _with_ending_token(rng: random.Random, free: SamplingParams, output: list[int]) -> SamplingParams:
    """Sometimes one of the coming tokens is the end of sequence, or a stop token."""
    kind = rng.random()
    if kind > 0.35:
        return free
    ending = (output[int(rng.random() * len(output))],)
    return SamplingParams(
        free.max_tokens,
        temperature=free.temperature,
        seed=free.seed,
        eos_token_ids=ending if kind < 0.25 else (),
        stop_token_ids=ending if kind >= 0.25 else (),
    )


def _cut(output: list[int], sampling: SamplingParams) -> tuple[tuple[int, ...], Finish]:
    """The output up to its end, by the rules of `SamplingParams.finish_after`, said once more in our own words."""
    ending = {**dict.fromkeys(sampling.eos_token_ids, FinishKind.END_OF_SEQUENCE)}
    ending |= dict.fromkeys(sampling.stop_token_ids, FinishKind.STOP_TOKEN)
    for index, token_id in enumerate(output):
        if token_id in ending:
            return tuple(output[: index + 1]), Finish(ending[token_id], token_id=token_id)
    return tuple(output), Finish(FinishKind.LENGTH)
