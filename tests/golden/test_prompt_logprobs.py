"""Real (tiny) models: log-probabilities of prompt tokens are those of the same model run alone by transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch

from engine.core import EngineCore
from engine.local import LocalResult, generate
from engine.opening import open_core
from engine.outputs import PromptScored
from engine.sequence import Priority, Sequence
from kvferry.client import Completion, GenerateOptions
from kvferry.sampling import SamplingParams
from kvferry.spec import PromptScoring
from tests.golden.drivers import parity_config
from tests.golden.logprobs import NUM_TOP, TOLERANCE, Truth
from tests.golden.parity import random_prompts
from tests.support.deployment import deployment_config, running_deployment
from tests.support.engines import deny_room
from tests.support.models import VOCAB_SIZE, save_tiny_model

LENGTHS = (1, 2, 8, 9, 33, 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth(folder)


_NUMBERS = itertools.count()


def scored(
    core: EngineCore, prompts: SequenceOf[SequenceOf[int]], *, first_index: int = 1, max_tokens: int = 3
) -> list[LocalResult]:
    """All at once; `LocalResult` asserts that no log-probability is lost, doubled or late, from the first place on."""
    sequences = [sequence_of(core, prompt, first_index=first_index, max_tokens=max_tokens) for prompt in prompts]
    results = generate(core, sequences)
    return [results[sequence.seq_id] for sequence in sequences]


def sequence_of(
    core: EngineCore, prompt: SequenceOf[int], *, first_index: int = 1, max_tokens: int = 3, is_scored: bool = True
) -> Sequence:
    number = next(_NUMBERS)
    return Sequence(
        f"s{number}",
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        priority=Priority(arrival=number),
        hash_root=core.hash_root(),
        scoring=PromptScoring(first_index, NUM_TOP) if is_scored and len(prompt) > first_index else None,
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(4, 1), (8, 5), (16, 64)])
def test_every_prompt_token_is_as_likely_as_transformers_says(
    tmp_path: Path, architecture: str, block_size: int, chunk_tokens: int
) -> None:
    """In one batch; the second round finds all blocks of the first in the prefix cache."""
    folder = save_tiny_model(tmp_path / architecture, architecture)
    truth, core = Truth(folder), open_core(parity_config(folder, block_size=block_size, chunk_tokens=chunk_tokens))
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    rounds = [scored(core, [*prompts, prompts[-1]]) for _ in range(2)]
    for results in rounds:
        for prompt, result in zip([*prompts, prompts[-1]], results, strict=True):
            truth.check(prompt, result.prompt_logprobs)
    assert [one.token_ids for one in rounds[0]] == [one.token_ids for one in rounds[1]]
    assert core.stats().num_cached_tokens == 0
    plain = [sequence_of(core, prompt, is_scored=False) for prompt in prompts]
    unscored = generate(core, plain)
    assert [unscored[one.seq_id].token_ids for one in plain] == [one.token_ids for one in rounds[0][:-1]]
    assert core.stats().num_cached_tokens > 0, "what was scored is published all the same"
    core.check_integrity()


def test_what_was_told_before_is_not_computed_again(folder: Path, truth: Truth) -> None:
    core = open_core(parity_config(folder, block_size=4, chunk_tokens=8))
    (prompt,) = random_prompts([50], VOCAB_SIZE)
    scored(core, [prompt])
    for first_index, num_cached_tokens in ((1, 0), (8, 4), (9, 8), (49, 48)):
        core.add(sequence_of(core, prompt, first_index=first_index))
        before, outputs = core.stats().num_cached_tokens, list[PromptScored]()
        while core.has_work:
            outputs += [output for output in core.step() if isinstance(output, PromptScored)]
        assert outputs[0].token_index == first_index
        truth.check(prompt, [one for output in outputs for one in output.logprobs], first_index=first_index)
        assert core.stats().num_cached_tokens - before == num_cached_tokens


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_prompt_that_is_preempted_is_told_once(folder: Path, truth: Truth, preemption: str) -> None:
    """In the middle, while a sequence before it finds no room."""
    config = parity_config(folder, block_size=4, chunk_tokens=4)
    config = config.replace("engine", preemption=preemption, num_blocks=200, prefix_caching=preemption == "swap")
    core, step = open_core(config), 0
    deny_room(core, lambda: step in (6, 15))
    first, (prompt,) = sequence_of(core, [5, 6, 7], max_tokens=60, is_scored=False), random_prompts([60], VOCAB_SIZE)
    sequence = sequence_of(core, prompt)
    places: list[int] = []

    def count(number: int) -> None:
        nonlocal step
        step = number
        if number == 2:
            core.add(sequence)
        if sequence.num_preemptions > len(places) and sequence.scoring is not None:
            places.append(sequence.scoring.first_index)

    result = generate(core, [first], before_step=count)[sequence.seq_id]
    assert len(places) == 2 and all(1 < place < len(prompt) for place in places), "preempted within the prompt"
    truth.check(prompt, result.prompt_logprobs)


@pytest.mark.parametrize("num_prefill", [1, 0])
async def test_a_deployment_gives_the_likelihood_of_a_continuation(
    folder: Path, truth: Truth, num_prefill: int
) -> None:
    """As evaluations ask for it: echo, `prompt_logprobs` 1 and the least output there can be, one token."""
    config = deployment_config(folder, max_chunk_tokens=8, num_blocks=256, timeout_s=30.0)
    prompts = random_prompts([40, 3, 17], VOCAB_SIZE)
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        for prompt in [*prompts, prompts[0]]:
            options = GenerateOptions(
                prompt=prompt, max_tokens=1, temperature=0.0, echo=True, prompt_logprobs=1, logprobs=1
            )
            answer = await deployment.client.complete(options, timeout_s=60.0)
            truth.check(prompt, answer.prompt_logprobs, num_top=1)
            (choice,) = answer.choices
            check_likelihood(truth, prompt, answer)
            rows = truth.rows([*prompt, choice.token_ids[0]])
            assert choice.logprobs[0].logprob == pytest.approx(rows[-2].max().item(), abs=TOLERANCE)
        await deployment.assert_idle()


def check_likelihood(truth: Truth, prompt: SequenceOf[int], answer: Completion) -> None:
    """Of the prompt's second half given its first: the sum, and whether greedy sampling would have given it."""
    split = len(prompt) // 2
    told, rows = answer.prompt_logprobs[split - 1 :], truth.rows(prompt)
    target = torch.tensor(prompt[split:])
    wanted = rows[split - 1 : -1].gather(1, target[:, None]).sum()
    assert sum(one.logprob for one in told) == pytest.approx(wanted.item(), abs=len(told) * TOLERANCE)
    is_greedy = all(one.token_id == one.top[0].token_id for one in told)
    assert is_greedy == bool((rows[split - 1 : -1].argmax(dim=1) == target).all())
