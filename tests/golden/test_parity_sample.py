"""A sample of the parity matrix that runs in seconds: every architecture, mixed batches, chunks, scattered blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.forward_batch import OnKvWritten, Sampled, SequenceSlice
from engine.runner import Runner, RunnerConfig, open_runner
from kvferry.config import Config, KernelChoice
from tests.golden.parity import LocalDriver, Reference, check_parity, random_prompts
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, save_tiny_model

NUM_TOKENS = 20
LENGTHS = (1, 7, 8, 9, 16, 17, 33, 97, 150)
BLOCK_AND_CHUNK = ((8, 16), (16, 64), (32, 512))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.parametrize(
    ("kernels", "block_size", "chunk_tokens"),
    [*(("native", *sizes) for sizes in BLOCK_AND_CHUNK), ("reference", 16, 64)],
)
def test_greedy_tokens_equal_generate(
    folder: Path, reference: Reference, kernels: KernelChoice, block_size: int, chunk_tokens: int
) -> None:
    config = RunnerConfig(
        num_blocks=1024 // block_size,
        block_size=block_size,
        kernels=kernels,
        kernels_folder=Config().model.kernels_path,
    )
    runner = open_runner(folder, config)
    driver = LocalDriver(runner, chunk_tokens=chunk_tokens, shuffle_seed=block_size)
    report = check_parity(driver.generate, reference, random_prompts(LENGTHS, VOCAB_SIZE), NUM_TOKENS)
    assert not report.mismatches, str(report)
    assert report.num_unjudged <= 0.05 * report.num_judged, str(report)


def test_a_prompt_longer_than_a_chunk_of_512(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", "llama")
    runner = open_runner(folder, RunnerConfig(num_blocks=64))
    driver = LocalDriver(runner, chunk_tokens=512)
    report = check_parity(driver.generate, Reference(folder), random_prompts([700], VOCAB_SIZE), NUM_TOKENS)
    assert not report.mismatches, str(report)
    assert report.num_judged >= NUM_TOKENS - 1


def test_reused_blocks_leave_no_trace(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "mistral", "mistral")
    runner = open_runner(folder, RunnerConfig(num_blocks=8, block_size=8))
    driver = LocalDriver(runner, chunk_tokens=16)
    reference = Reference(folder)
    for seed in range(3):
        report = check_parity(driver.generate, reference, random_prompts([5, 17], VOCAB_SIZE, seed), NUM_TOKENS)
        assert not report.mismatches, str(report)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_these_models_notice_a_stale_block(tmp_path: Path, architecture: str) -> None:
    """Parity would mean nothing if the tokens did not depend on the cached blocks."""
    folder = save_tiny_model(tmp_path / architecture, architecture)
    runner = open_runner(folder, RunnerConfig(num_blocks=16, block_size=8))
    prompt = random_prompts([40], VOCAB_SIZE)
    right = LocalDriver(runner, chunk_tokens=64).generate(prompt, NUM_TOKENS)
    disturbed = LocalDriver(_OverwritesABlock(runner), chunk_tokens=64).generate(prompt, NUM_TOKENS)
    assert right != disturbed


class _OverwritesABlock:
    """A runner in which block 4 holds what block 3 does from the second step on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_steps = 0
        self.layout, self.num_blocks, self.window = runner.layout, runner.num_blocks, runner.window
        self.suits_drafts = runner.suits_drafts
        self.max_context, self.vocab_size = runner.max_context, runner.vocab_size
        self.block_view, self.copy_partial, self.populate = runner.block_view, runner.copy_partial, runner.populate

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        self._num_steps += 1
        if self._num_steps == 2:
            self.block_view(4)[:] = self.block_view(3)
        return self._runner.run(slices, on_kv_written)
