"""Token parity with the same model run alone: transformers' `generate`, greedy, float32, eager attention.

Anything that turns prompts into tokens can be judged: a `GreedyGenerate` is a step driver over a runner
(`LocalDriver`), a single process, or a whole deployment. A decision whose margin in the reference is under
`LEAST_MARGIN` may fall either way by rounding: it is not judged, and the reference goes on with our token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from engine.forward_batch import SampleRequest, SequenceSlice
from engine.runner import Runner
from kvferry.sampling import SamplingParams

LEAST_MARGIN = 1e-3
"""Best logit minus second best."""
LEAST_ROUTER_MARGIN = 1e-5
"""Last chosen expert's logit minus the first one not chosen. A wrong expert stays in the KV, so this counts for all
later tokens too; it is well above the rounding of the small models it is used with."""

GreedyGenerate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""(prompts, tokens a prompt) → greedy output tokens of each prompt, end of sequence ignored."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One greedy decision of the reference, and whether it is clear enough to be judged."""

    token_id: int
    is_clear: bool


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first wrong token of one prompt."""

    prompt_length: int
    output_index: int
    expected: int
    actual: int


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What was compared; `num_unjudged` decisions were too close to call."""

    num_judged: int
    num_unjudged: int
    mismatches: tuple[Mismatch, ...]

    def __str__(self) -> str:
        wrong = "; ".join(str(mismatch) for mismatch in self.mismatches[:5])
        return f"{self.num_judged} judged, {self.num_unjudged} too close, {len(self.mismatches)} wrong: {wrong}"


class Reference:
    """A model folder run by transformers alone; remembers what it computed."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._known: dict[tuple[tuple[int, ...], int], list[Decision]] = {}

    def decide(self, token_ids: Sequence[int], num_tokens: int) -> list[Decision]:
        """The next `num_tokens` greedy decisions after `token_ids`."""
        key = (tuple(token_ids), num_tokens)
        if key not in self._known:
            self._known[key] = self._generate(token_ids, num_tokens)
        return self._known[key]

    @torch.inference_mode()
    def _generate(self, token_ids: Sequence[int], num_tokens: int) -> list[Decision]:
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=num_tokens,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        self.model.generation_config = config  # the model's own may name ids that would end the output
        prompt = torch.tensor([list(token_ids)])
        with _router_margins(self.model) as router_margins:
            output = cast(Any, self.model).generate(prompt, attention_mask=torch.ones_like(prompt))
        decisions = []
        for index, logits in enumerate(output.logits):
            best, second = logits[0].float().topk(2).values.tolist()
            router_margin = min(router_margins.up_to(index), default=1.0)
            is_clear = best - second >= LEAST_MARGIN and router_margin >= LEAST_ROUTER_MARGIN
            decisions.append(Decision(int(logits[0].argmax()), is_clear))
        return decisions


def check_parity(
    generate: GreedyGenerate, reference: Reference, prompts: Sequence[Sequence[int]], num_tokens: int
) -> ParityReport:
    """Compare what `generate` makes of all prompts together with the reference, prompt by prompt."""
    judged = unjudged = 0
    mismatches = []
    for prompt, output in zip(prompts, generate(prompts, num_tokens), strict=True):
        assert len(output) == num_tokens, f"{len(output)} tokens instead of {num_tokens}"
        for index, decision in _decisions_along(reference, prompt, output):
            judged, unjudged = judged + decision.is_clear, unjudged + (not decision.is_clear)
            if decision.is_clear and decision.token_id != output[index]:
                mismatches.append(Mismatch(len(prompt), index, decision.token_id, output[index]))
                break
    return ParityReport(judged, unjudged, tuple(mismatches))


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """One prompt of random tokens for each length; prompts of one length differ, and are the same in every list."""
    seen: Counter[int] = Counter()
    prompts = []
    for length in lengths:
        generator = random.Random(f"{seed}/{length}/{seen[length]}")
        seen[length] += 1
        prompts.append([generator.randrange(vocab_size) for _ in range(length)])
    return prompts


def sweep_lengths(block_size: int, num_long: int = 100, longest: int = 1500, seed: int = 0) -> list[int]:
    """Every length from 1 to three blocks and one token, and `num_long` longer ones, the same for every block size."""
    generator = random.Random(seed)
    return list(range(1, 3 * block_size + 2)) + [generator.randint(100, longest) for _ in range(num_long)]


@dataclass(slots=True)
class _Running:
    """A sequence of the local driver."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


class LocalDriver:
    """The least step loop over a runner: all sequences at once, decode rows first, then chunks up to `chunk_tokens`."""

    def __init__(self, runner: Runner, *, chunk_tokens: int, shuffle_seed: int | None = None) -> None:
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._free = list(range(runner.num_blocks))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._free)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """A `GreedyGenerate`."""
        sequences = [_Running(list(prompt), len(prompt)) for prompt in prompts]
        while running := [one for one in sequences if len(one.token_ids) < one.num_prompt_tokens + num_tokens]:
            self._step(running)
        for one in sequences:
            self._free += one.block_table
        return [one.token_ids[one.num_prompt_tokens :] for one in sequences]

    def _step(self, running: list[_Running]) -> None:
        budget = self._chunk_tokens
        slices, scheduled = [], []
        for one in sorted(running, key=lambda one: len(one.token_ids) - one.num_cached_tokens > 1):
            missing = len(one.token_ids) - one.num_cached_tokens
            count = missing if missing == 1 else min(missing, budget)
            budget -= count if missing > 1 else 0
            if count:
                slices.append(self._slice(one, count))
                scheduled.append(one)
        for one, part, sampled in zip(scheduled, slices, self._runner.run(slices), strict=True):
            one.num_cached_tokens = part.context_length
            if sampled is not None:
                assert sampled.token_id is not None, sampled.error
                one.token_ids.append(sampled.token_id)

    def _slice(self, one: _Running, count: int) -> SequenceSlice:
        start, end = one.num_cached_tokens, one.num_cached_tokens + count
        while len(one.block_table) * self._runner.layout.block_size < end:
            one.block_table.append(self._free.pop(0))
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        sample = SampleRequest(greedy, end, end - one.num_prompt_tokens) if end == len(one.token_ids) else None
        return SequenceSlice(str(id(one)), one.token_ids[start:end], start, one.block_table, sample)


def _decisions_along(
    reference: Reference, prompt: Sequence[int], output: Sequence[int]
) -> Iterator[tuple[int, Decision]]:
    """The reference's decision at every output index; after a token of ours that differs it starts anew from ours."""
    first = 0
    while first < len(output):
        decisions = reference.decide([*prompt, *output[:first]], len(output) - first)
        for index, decision in enumerate(decisions, first):
            yield index, decision
            first = index + 1
            if decision.token_id != output[index]:
                break


@dataclass(slots=True)
class _RouterMargins:
    """Least margins of each forward, one list a router; empty for models without experts."""

    by_router: list[list[float]]

    def up_to(self, forward: int) -> list[float]:
        return [margin for margins in self.by_router for margin in margins[: forward + 1]]


@contextmanager
def _router_margins(model: PreTrainedModel) -> Iterator[_RouterMargins]:
    """Note how clear the choice of experts is in every forward of every layer."""
    top_k = getattr(model.config, "num_experts_per_tok", None)
    routers = [module for name, module in model.named_modules() if top_k and name.endswith("mlp.gate")]
    seen = _RouterMargins([[] for _ in routers])
    handles = [
        router.register_forward_hook(_margin_hook(margins, top_k or 0))
        for router, margins in zip(routers, seen.by_router, strict=True)
    ]
    assert handles or not top_k, "the model has experts, but no router was found"
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _margin_hook(margins: list[float], top_k: int) -> Callable[..., None]:
    def note(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output  # [tokens, experts]
        ordered = logits.float().sort(dim=-1, descending=True).values
        margins.append(float((ordered[..., top_k - 1] - ordered[..., top_k]).min()))

    return note
