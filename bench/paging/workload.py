"""Requests of the simulations: lengths by a stated shape or from a file, arrivals by a Poisson process; all seeded.

The paper prints the means of its two data sets and histograms, not their numbers, so the shape here is an assumption:
both lengths are lognormal, independent, with the sigma given below, the prompt clipped to 1,024 tokens and prompt +
output to 2,048. The mu of each is set so that the sample itself has the paper's means.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.paging.beams import BeamRecording
from kvferry.lengths import RequestLength

MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class LengthShape:
    """A data set's means and the assumed spread (sigma of the logarithm) of prompt and output lengths."""

    name: str
    mean_prompt_tokens: float
    mean_output_tokens: float
    prompt_sigma: float
    output_sigma: float

    @property
    def mean_tokens(self) -> float:
        return self.mean_prompt_tokens + self.mean_output_tokens

    def sample(self, num_requests: int, seed: int) -> list[RequestLength]:
        """`num_requests` requests whose mean lengths are the shape's, but for rounding; equal for equal seeds."""
        generator = random.Random(f"{self.name} {seed}")
        normals = [(generator.gauss(0.0, 1.0), generator.gauss(0.0, 1.0)) for _ in range(num_requests)]
        prompts = _with_mean(
            self.mean_prompt_tokens,
            lambda mu: [_clipped(mu + self.prompt_sigma * z, MAX_PROMPT_TOKENS) for z, _ in normals],
        )
        outputs = _with_mean(
            self.mean_output_tokens,
            lambda mu: [
                _clipped(mu + self.output_sigma * z, MAX_TOTAL_TOKENS - prompt)
                for (_, z), prompt in zip(normals, prompts, strict=True)
            ],
        )
        return [RequestLength(*pair) for pair in zip(prompts, outputs, strict=True)]


SHAREGPT = LengthShape("ShareGPT", 161.0, 338.0, prompt_sigma=1.2, output_sigma=0.9)
ALPACA = LengthShape("Alpaca", 19.0, 58.0, prompt_sigma=0.6, output_sigma=0.9)
TRANSLATION = LengthShape("WMT16 sentences", 30.0, 30.0, prompt_sigma=0.5, output_sigma=0.5)
"""Sentence pairs without the prefix; the paper gives no lengths for them, thirty tokens each way are assumed."""


def resized(lengths: Sequence[RequestLength], num_tokens: int, seed: int) -> list[RequestLength]:
    """As many of the requests, drawn at random and repeated where they are few, as have `num_tokens` tokens in all."""
    shuffled = list(lengths)
    random.Random(f"resize {seed}").shuffle(shuffled)
    chosen, total = list[RequestLength](), 0
    for length in itertools.cycle(shuffled):
        if total >= num_tokens:
            break
        chosen.append(length)
        total += length.num_tokens
    return chosen


def _clipped(log_length: float, limit: int) -> int:
    """A whole length of 1 … limit."""
    return limit if log_length >= math.log(limit) else max(1, round(math.exp(log_length)))


def _with_mean(mean: float, lengths_of: Callable[[float], list[int]]) -> list[int]:
    """The lengths for the mu at which their mean is `mean`; the mean grows with mu."""
    low, high = -5.0, 12.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        lengths = lengths_of(middle)
        low, high = (low, middle) if sum(lengths) > mean * len(lengths) else (middle, high)
    return lengths_of(low)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a simulation.

    Attributes:
        num_prefix_tokens: so many tokens of the prompt, from the first on, are the same for all requests.
        num_choices: outputs sampled from the one prompt, all of the request's output length.
        beam: beam search instead; which beam extends which.
    """

    number: int
    at_s: float
    length: RequestLength
    num_prefix_tokens: int = 0
    num_choices: int = 1
    beam: BeamRecording | None = None


def all_at_once(lengths: Sequence[RequestLength], *, num_choices: int = 1) -> list[Arrival]:
    """Everything waits from the beginning: saturation."""
    return [Arrival(number, 0.0, length, num_choices=num_choices) for number, length in enumerate(lengths)]


def with_beams(lengths: Sequence[RequestLength], recordings: Sequence[BeamRecording]) -> list[Arrival]:
    """All at once; the recorded searches take turns."""
    pairs = zip(lengths, itertools.cycle(recordings), strict=False)
    return [Arrival(number, 0.0, length, beam=beam) for number, (length, beam) in enumerate(pairs)]


def poisson(
    lengths: Sequence[RequestLength], rate_per_s: float, seed: int, num_prefix_tokens: int = 0
) -> list[Arrival]:
    """`rate_per_s` requests a second; other rates only stretch the same arrivals, so that rates can be compared.

    A prefix comes on top of the prompt lengths.
    """
    generator = random.Random(f"arrivals {seed}")
    arrivals, now = [], 0.0
    for number, length in enumerate(lengths):
        now += generator.expovariate(1.0)
        whole = RequestLength(num_prefix_tokens + length.num_prompt_tokens, length.num_output_tokens)
        arrivals.append(Arrival(number, now / rate_per_s, whole, num_prefix_tokens))
    return arrivals
