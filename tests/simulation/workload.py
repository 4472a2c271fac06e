"""What the clients ask in one run, and what they must get."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace

from engine.scripted import reference_continuation
from kvferry.kv_layout import num_beam_blocks
from kvferry.sampling import BeamParams, Finish, FinishKind, SamplingParams
from tests.simulation.beam_oracle import UndisturbedSearch, search_undisturbed
from tests.simulation.oracle import BLOCK_SIZE, SCRIPT
from tests.simulation.world import MS

MAX_PROMPT_TOKENS = 22
MAX_OUTPUT_TOKENS = 12
LEAST_BLOCKS = -(-(MAX_PROMPT_TOKENS + MAX_OUTPUT_TOKENS - 1) // BLOCK_SIZE)
"""The longest request fits alone, with nothing to spare."""

MIN_MOVED_TOKENS = 2
"""Few, so that many of the short outputs here move with their blocks; a single token goes the ordinary way."""

NUM_CHOICES = (1, 1, 1, 2, 4)
BEAM_PROBABILITY = 0.12
BEAM_WIDTHS = (2, 2, 3)
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
        cumulative_logprob: of a hypothesis of a beam search.
    """

    expected: tuple[int, ...]
    finish: Finish
    stop_after: int | None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request and its right answer.

    Attributes:
        arrival_ns: when the client asks.
        choices: what each choice must get; of a beam search the hypotheses returned.
        computed: all tokens, the prompt's included, of every sequence that workers may compute for it.
        interruption, interrupted_at_ns: what cuts it short, and when; it may have finished by then.
    """

    request_id: str
    arrival_ns: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tier_rank: int
    cache_salt: str
    choices: tuple[ChoicePlan, ...]
    computed: tuple[tuple[int, ...], ...]
    interruption: Interruption | None
    interrupted_at_ns: int
    beam: BeamParams | None = None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is asked after a prompt, and the right answer; as in `RequestPlan`."""

    sampling: SamplingParams
    choices: tuple[ChoicePlan, ...]
    computed: tuple[tuple[int, ...], ...]
    beam: BeamParams | None = None


def draw_requests(rng: random.Random, max_width: int) -> list[RequestPlan]:
    """5 to 25 requests, mostly few; prompts share beginnings, arrivals are spread.

    Some are beam searches, of at most `max_width` beams and short enough to fit `LEAST_BLOCKS` blocks.
    """
    count = 5 + int(21 * rng.random() ** 3)
    spread_ns = rng.choice((0, 10, 40, 120)) * MS
    stems = [_draw_tokens(rng, rng.randrange(4, 17)) for _ in range(rng.randrange(1, 4))]
    interruptions = rng.choice((0.0, 0.0, 0.2, 0.6))
    return [
        _draw_request(rng, f"r{index}", int(rng.random() * spread_ns), stems, interruptions, max_width)
        for index in range(count)
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
    rng: random.Random,
    request_id: str,
    arrival_ns: int,
    stems: list[tuple[int, ...]],
    interruptions: float,
    max_width: int,
) -> RequestPlan:
    prompt = _draw_prompt(rng, stems)
    max_tokens = 1 + int(rng.random() ** 1.5 * MAX_OUTPUT_TOKENS)
    is_search = rng.random() < BEAM_PROBABILITY
    answer = _draw_search(rng, prompt, max_tokens, max_width) if is_search else _draw_choices(rng, prompt, max_tokens)
    interruption = rng.choice(list(Interruption)) if rng.random() < interruptions else None
    return RequestPlan(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt=prompt,
        sampling=answer.sampling,
        tier_rank=int(rng.random() * 3),
        cache_salt=rng.choice(SALTS),
        choices=answer.choices,
        computed=answer.computed,
        interruption=interruption,
        interrupted_at_ns=arrival_ns + int(rng.random() ** 2 * 60 * MS),
        beam=answer.beam,
    )


def _draw_choices(rng: random.Random, prompt: tuple[int, ...], max_tokens: int) -> AnswerPlan:
    num_choices = rng.choice(NUM_CHOICES)
    is_greedy = num_choices == 1 and rng.random() < 0.5
    free = SamplingParams(max_tokens, temperature=0.0 if is_greedy else 1.0, seed=int(rng.random() * 2**32))
    outputs = [reference_continuation(prompt, max_tokens, SCRIPT, free, choice=choice) for choice in range(num_choices)]
    sampling = _with_ending_token(rng, free, rng.choice(outputs))
    if sampling is not free and rng.random() < 0.5:
        sampling = replace(sampling, min_tokens=int(rng.random() * (max_tokens + 1)))
        outputs = [
            reference_continuation(prompt, max_tokens, SCRIPT, sampling, choice=choice) for choice in range(num_choices)
        ]
    choices = tuple(_plan_choice(rng, output, sampling) for output in outputs)
    return AnswerPlan(sampling, choices, tuple((*prompt, *choice.expected) for choice in choices))


def _draw_search(rng: random.Random, prompt: tuple[int, ...], max_tokens: int, max_width: int) -> AnswerPlan:
    width = min(max_width, rng.choice(BEAM_WIDTHS))
    while not _fits(len(prompt), max_tokens, width):
        max_tokens -= 1
    beam = BeamParams(
        width,
        length_penalty=rng.choice((-1.0, 0.0, 1.0, 2.0)),
        early_stopping=rng.random() < 0.3,
        num_returned=1 + int(rng.random() * width),
    )
    sampling = SamplingParams(max_tokens)
    search = search_undisturbed(prompt, sampling, beam)
    ending = _with_ending_token(rng, sampling, list(rng.choice(search.hypotheses).token_ids))
    if ending is not sampling:
        sampling = replace(ending, min_tokens=int(rng.random() ** 2 * max_tokens))
        search = search_undisturbed(prompt, sampling, beam)
    return AnswerPlan(sampling, _plans_of(search), tuple(search.lives), beam)


def _fits(num_prompt_tokens: int, max_tokens: int, width: int) -> bool:
    num_kv_tokens = num_prompt_tokens + max_tokens - 1
    return num_beam_blocks(num_prompt_tokens, num_kv_tokens, width, block_size=BLOCK_SIZE) <= LEAST_BLOCKS


def _plans_of(search: UndisturbedSearch) -> tuple[ChoicePlan, ...]:
    return tuple(ChoicePlan(one.token_ids, one.finish, None, one.cumulative_logprob) for one in search.hypotheses)


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
