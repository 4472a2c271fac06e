"""The runner for transformers models: steps, sampling rows, faults of one sequence, blocks moved between runners."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.forward_batch import Sampled, SampleRequest, SequenceSlice
from engine.model_runner import ModelRunner
from engine.runner import Runner, RunnerConfig, open_runner
from kvferry.errors import InvalidArgument
from kvferry.sampling import SamplingParams
from tests.golden.parity import LocalDriver, random_prompts
from tests.support.models import MAX_CONTEXT, NUM_LAYERS, VOCAB_SIZE, save_tiny_model

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
BLOCK = 8
CONFIG = RunnerConfig(num_blocks=32, block_size=BLOCK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return open_runner(folder, CONFIG)


def whole(prompt: list[int], table: list[int], sampling: SamplingParams = GREEDY, seq_id: str = "s") -> SequenceSlice:
    return SequenceSlice(seq_id, prompt, 0, table, SampleRequest(sampling, len(prompt), 0))


def token_of(sampled: Sampled | None) -> int:
    assert sampled is not None
    assert sampled.token_id is not None, sampled.error
    return sampled.token_id


def test_it_says_what_it_serves(runner: Runner) -> None:
    assert isinstance(runner, ModelRunner)
    assert (runner.max_context, runner.vocab_size, runner.num_blocks) == (MAX_CONTEXT, VOCAB_SIZE, 32)
    assert (runner.layout.num_layers, runner.layout.num_kv_heads, runner.layout.head_dim) == (NUM_LAYERS, 2, 16)
    assert len(runner.block_view(31)) == runner.layout.block_bytes


def test_max_context_can_be_lowered_only(folder: Path) -> None:
    assert open_runner(folder, replace(CONFIG, max_context=100)).max_context == 100
    assert open_runner(folder, replace(CONFIG, max_context=10**6)).max_context == MAX_CONTEXT


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("num_threads", 0), ("dtype", "int4"), ("device", "tpu"), ("max_context", 0)],
)
def test_a_wrong_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        replace(CONFIG, **{field: value})  # type: ignore[arg-type]


def test_the_pool_may_depend_on_the_size_of_a_block(runner: Runner) -> None:
    sized = replace(CONFIG, num_blocks=lambda block_bytes: 10 * block_bytes)
    assert sized.pool_blocks(runner.layout) == 10 * runner.layout.block_bytes
    with pytest.raises(InvalidArgument, match="num_blocks"):
        replace(CONFIG, num_blocks=0).pool_blocks(runner.layout)


def test_only_slices_that_ask_get_tokens(runner: Runner) -> None:
    (prompt,) = random_prompts([12], VOCAB_SIZE)
    chunk = SequenceSlice("c", prompt[:5], 0, [9], None)
    first, second, third = runner.run([chunk, whole(prompt, [1, 2]), replace(chunk, block_table=[8])])
    assert first is None
    assert third is None
    assert runner.run([whole(prompt, [4, 7])]) == [second]
    assert runner.run([chunk]) == [None]
    assert runner.run([]) == []


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=9, seed=3), SamplingParams(9, 1.5, 20, seed=4)])
def test_neighbours_change_nothing(runner: Runner, sampling: SamplingParams) -> None:
    prompts = random_prompts([5, 20, 33, 8], VOCAB_SIZE)
    tables = [[0], [1, 2, 3], [4, 5, 6, 7, 8], [9]]
    slices = [whole(prompt, table, sampling) for prompt, table in zip(prompts, tables, strict=True)]
    alone = [runner.run([one])[0] for one in slices]
    assert runner.run(slices) == alone
    assert runner.run(slices[::-1]) == alone[::-1]


def test_nan_in_one_sequences_blocks_fails_it_alone(runner: Runner) -> None:
    prompts = random_prompts([17, 17, 17], VOCAB_SIZE)
    tables = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for prompt, table in zip(prompts, tables, strict=True):
        runner.run([SequenceSlice("s", prompt[:16], 0, table, None)])
    slices = [
        SequenceSlice("s", prompt[16:], 16, table, SampleRequest(GREEDY, 17, 0))
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    right = runner.run(slices)
    runner.block_view(3).cast("f")[:8] = _nans(8)
    broken = runner.run(slices)
    assert broken[1] == Sampled(None, "non-finite logits at position 17")
    assert [broken[0], broken[2]] == [right[0], right[2]]
    reused = runner.run([whole(prompts[0], [3, 4, 5])])  # stale NaN in reused blocks reaches nobody
    assert reused == [right[0]]
    for block in (3, 4, 5):
        runner.block_view(block).cast("f")[:] = _nans(runner.layout.block_bytes // 4)
    assert runner.run([whole(prompts[0][:9], [3, 4])]) == runner.run([whole(prompts[0][:9], [20, 21])])


def _nans(count: int) -> memoryview:
    return torch.full((count,), float("nan")).numpy().data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_travel_between_runners(folder: Path, dtype: str) -> None:
    """What prefill and decode do: compute here, copy raw blocks, go on there, through other block ids."""
    sender, receiver = (open_runner(folder, replace(CONFIG, dtype=dtype)) for _ in range(2))
    assert sender.layout == receiver.layout
    (prompt,) = random_prompts([21], VOCAB_SIZE)
    first = token_of(sender.run([whole(prompt, [3, 1, 2])])[0])
    for here, there in ((3, 30), (1, 10)):
        receiver.block_view(there)[:] = sender.block_view(here)
    receiver.block_view(20)[:] = sender.copy_partial(2, 21 - 2 * BLOCK)
    decode = SequenceSlice("s", [first], 21, [3, 1, 2], SampleRequest(GREEDY, 22, 1))
    assert sender.run([decode]) == receiver.run([replace(decode, block_table=[30, 10, 20])])


def test_bfloat16_generates(folder: Path) -> None:
    runner = open_runner(folder, replace(CONFIG, dtype="bfloat16"))
    assert runner.layout.dtype == "bfloat16"
    assert runner.layout.block_bytes == NUM_LAYERS * 2 * 2 * BLOCK * 16 * 2
    outputs = LocalDriver(runner, chunk_tokens=16).generate(random_prompts([9, 30], VOCAB_SIZE), 10)
    assert [len(output) for output in outputs] == [10, 10]


def test_a_seeded_sequence_resumes_with_the_same_tokens(runner: Runner) -> None:
    """Prompt + tokens so far as a new prompt, elsewhere, in other chunks: the same stream goes on."""
    sampling = SamplingParams(max_tokens=9, temperature=0.9, seed=12345)
    (prompt,) = random_prompts([11], VOCAB_SIZE)
    token_ids = list(prompt)
    table = random.Random(0).sample(range(32), 4)
    start = 0
    for output in range(10):
        request = SampleRequest(sampling, len(token_ids), output)
        sampled = runner.run([SequenceSlice("s", token_ids[start:], start, table, request)])
        start = len(token_ids)
        token_ids.append(token_of(sampled[0]))
    for known in range(11, 20):
        request = SampleRequest(sampling, known, known - 11)
        sampled = runner.run([SequenceSlice("r", token_ids[:known], 0, [7, 8, 9], request)])
        assert token_of(sampled[0]) == token_ids[known]


def test_it_says_when_the_kv_is_written(folder: Path) -> None:
    """Once a step, with the last layer's keys and values in the pool, before the logits."""
    own = open_runner(folder, RunnerConfig(num_blocks=8))
    prompt = list(range(5, 45))
    at_call: list[bytes] = []
    sampled = own.run([whole(prompt, [3, 1, 2])], lambda: at_call.append(own.block_view(1).tobytes()))
    assert sampled[0] is not None
    assert len(at_call) == 1
    assert at_call[0] == own.block_view(1).tobytes()
    assert any(at_call[0])
