"""Streams in a closed loop whose every token is compared with the truth, and the pauses that failures caused in them.

async with ClosedLoop(client, questions) as loop:
    begin_s = loop.now_s()
    …                                       # kill, stop, cut
    window = Window(begin_s, loop.now_s())
loop.check()                                # every stream complete and equal, none doubled, no error
loop.pause(window)                          # the longest time that any stream stood still across it
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.scripted import load_script_config, reference_continuation
from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import KvferryError
from kvferry.sampling import SamplingParams
from tests.golden.drivers import EngineDriver
from tests.support.models import VOCAB_SIZE
from tests.support.workers import until

NUM_STREAMS = 16
SAMPLE_STREAMS = 8
"""Fewer than `RETRY_BURST`: one fault may hit all of them before their first token, seconds after the last one did."""
MAX_PROMPT_TOKENS = 120
SHORTEST_PAUSE_S = 0.02
"""Shorter ones are not kept: a soak has millions of them."""
MAX_PROBLEMS = 20
"""Then the streams end: nothing would slow those down that are refused at once."""
REQUEST_TIMEOUT_S = 120.0
"""Above every wait of the product: what hangs is a failure with a name, not a test that never ends."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the tokens of each of its choices, as one process alone gives them."""

    options: GenerateOptions
    answers: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Window:
    """From a failure until all was well again."""

    begin_s: float
    end_s: float


def scripted_questions(folder: Path, num_tokens: int, seed: int = 0) -> Iterator[Question]:
    """Never the same prompt twice; every third with two sampled choices, which part when they are resumed."""
    script, rng = load_script_config(folder), random.Random(seed)
    for number in itertools.count():
        prompt = [rng.randrange(script.vocab_size) for _ in range(rng.randrange(1, MAX_PROMPT_TOKENS))]
        is_sampled = number % 3 == 0
        temperature, num_choices = (1.0, 2) if is_sampled else (0.0, 1)
        sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=number)
        options = GenerateOptions(
            prompt=prompt,
            max_tokens=num_tokens,
            temperature=temperature,
            seed=number,
            n=num_choices,
            ignore_eos=True,
        )
        answers = [
            reference_continuation(prompt, num_tokens, script, sampling, choice) for choice in range(num_choices)
        ]
        yield Question(options, answers)


def model_questions(config: Config, num_tokens: int, num_prompts: int = 64, seed: int = 0) -> Iterator[Question]:
    """Greedy ones about a real model, over and over, so that prefix caches take part; the engine alone answers them."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, MAX_PROMPT_TOKENS))] for _ in range(num_prompts)
    ]
    answers = EngineDriver(config).generate(prompts, num_tokens)
    questions = [
        Question(GenerateOptions(prompt=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True), [answer])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    while True:
        yield rng.choice(questions)


class ClosedLoop:
    """`NUM_STREAMS` requests in flight, each followed by the next; leaving the block lets those under way finish.

    Attributes:
        num_complete: requests that were answered right.
        num_retried: those of them that took more than one attempt.
        problems: what went wrong, a line each.
    """

    def __init__(self, client: AsyncClient, questions: Iterator[Question], *, num_streams: int = NUM_STREAMS) -> None:
        self._client = client
        self._questions = questions
        self._num_streams = num_streams
        self._is_ending = False
        self._tasks: list[asyncio.Task[None]] = []
        self._gaps: list[Window] = []
        self.num_complete = 0
        self.num_retried = 0
        self.problems: list[str] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(self._num_streams)]
        await self.goes_on()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._is_ending = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    @staticmethod
    def now_s() -> float:
        return time.monotonic()

    async def goes_on(self, num_requests: int = NUM_STREAMS, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Returns when so many more requests were answered, or there are too many problems to go on."""
        num_wanted = self.num_complete + num_requests
        await until(lambda: self.num_complete >= num_wanted or len(self.problems) >= MAX_PROBLEMS, timeout_s)

    def check(self) -> None:
        """Every request was answered, whole and token for token."""
        assert not self.problems, "\n".join(self.problems)
        assert self.num_complete > 0

    def pause(self, window: Window) -> float:
        """The longest that any stream waited, from its request or its last token to the next one, across a window."""
        lengths = [
            gap.end_s - gap.begin_s for gap in self._gaps if gap.begin_s < window.end_s and gap.end_s > window.begin_s
        ]
        return max(lengths, default=0.0)

    def usual_pause(self, windows: Sequence[Window]) -> float:
        """The longest wait outside of all windows."""
        return max(
            (
                gap.end_s - gap.begin_s
                for gap in self._gaps
                if not any(gap.begin_s < window.end_s and gap.end_s > window.begin_s for window in windows)
            ),
            default=0.0,
        )

    async def _stream(self) -> None:
        while not self._is_ending and len(self.problems) < MAX_PROBLEMS:
            question = next(self._questions)
            answer = Completion()
            try:
                await self._ask(question, answer)
            except KvferryError as error:
                num_tokens = sum(len(choice.token_ids) for choice in answer.choices)
                self.problems.append(f"{type(error).__name__} after {num_tokens} tokens: {error.message}")
            else:
                self._take(question, answer)

    async def _ask(self, question: Question, answer: Completion) -> None:
        before_s = self.now_s()
        async with self._client.generate(question.options, timeout_s=REQUEST_TIMEOUT_S) as events:
            async for event in events:
                answer.add(event)  # finds what is doubled or missing
                if event.HasField("delta"):
                    gap, before_s = Window(before_s, self.now_s()), self.now_s()
                    if gap.end_s - gap.begin_s >= SHORTEST_PAUSE_S:
                        self._gaps.append(gap)
        answer.check_complete()

    def _take(self, question: Question, answer: Completion) -> None:
        tokens = [choice.token_ids for choice in answer.choices]
        if tokens != [list(right) for right in question.answers]:
            self.problems.append(f"wrong tokens for {question.options.prompt}: {tokens}, not {question.answers}")
            return
        self.num_complete += 1
        self.num_retried += answer.timings.num_attempts > 1


def summary(what: str, loop: ClosedLoop, windows: Mapping[str, Sequence[Window]]) -> str:
    """For people: what the failures of one run, by their kinds, cost its clients."""
    parts = []
    for kind, ones in windows.items():
        pauses = [loop.pause(window) for window in ones]
        parts.append(
            f"{len(pauses)} x {kind}: pause median {statistics.median(pauses):.2f} s, worst {max(pauses):.2f} s"
        )
    usual_s = loop.usual_pause([window for ones in windows.values() for window in ones])
    return (
        f"{what}: {loop.num_complete} requests right, {loop.num_retried} of them retried or resumed; "
        f"{'; '.join(parts)}; otherwise at most {usual_s:.2f} s"
    )
