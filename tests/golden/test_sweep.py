"""The whole parity matrix (`make sweep`), and of it a sample that runs with the suite.

Prompts: every length from 1 to three blocks and one token, and 100 longer ones to 1,500 tokens; 64 greedy tokens each,
float32, equal to transformers' `generate` token by token. Each case prints how many decisions were judged and how many
were too close to call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.config import Config
from tests.golden.drivers import EngineDriver, PairDriver, parity_config
from tests.golden.parity import GreedyGenerate, Reference, check_parity, random_prompts, sweep_lengths
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, save_tiny_model

NUM_TOKENS = 64
MODES: dict[str, Callable[[Config], GreedyGenerate]] = {
    "alone": lambda config: EngineDriver(config, at_once=1).generate,
    "batch": lambda config: EngineDriver(config).generate,
    "split": lambda config: PairDriver(config).generate,
}
MATRIX = [(block_size, chunk_tokens) for block_size in (8, 16, 32) for chunk_tokens in (16, 64, 512)]
DIAGONAL = [(8, 512), (16, 64), (32, 16)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def tiny_reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_folder: Path) -> Reference:
    return Reference(smollm2_folder)


def judge(
    mode: str,
    config: Config,
    reference: Reference,
    lengths: list[int],
    vocab_size: int,
    report: Callable[[str], None],
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Runs one cell of the matrix."""
    outcome = check_parity(MODES[mode](config), reference, random_prompts(lengths, vocab_size), num_tokens)
    engine = config.engine
    report(f"{mode}, block {engine.block_size}, chunk {engine.max_chunk_tokens}: {outcome}")
    assert not outcome.mismatches, str(outcome)
    assert outcome.num_unjudged <= 0.05 * outcome.num_judged, str(outcome)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints past pytest's capture: a sweep takes long and shows its progress."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.callspec.id} {line}", flush=True)  # noqa: T201 - progress for people

    return show


@pytest.mark.sweep
@pytest.mark.parametrize(("block_size", "chunk_tokens"), MATRIX)
@pytest.mark.parametrize("mode", ["batch", "split"])
def test_tiny_models(
    tiny_folder: Path,
    tiny_reference: Reference,
    mode: str,
    block_size: int,
    chunk_tokens: int,
    report: Callable[[str], None],
) -> None:
    config = parity_config(tiny_folder, block_size=block_size, chunk_tokens=chunk_tokens)
    judge(mode, config, tiny_reference, sweep_lengths(block_size), VOCAB_SIZE, report)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mode", "block_size", "chunk_tokens"),
    [("alone", 16, 512), *((mode, *cell) for mode in ("batch", "split") for cell in DIAGONAL)],
)
def test_smollm2(
    smollm2_folder: Path,
    smollm2_reference: Reference,
    mode: str,
    block_size: int,
    chunk_tokens: int,
    report: Callable[[str], None],
) -> None:
    config = parity_config(smollm2_folder, block_size=block_size, chunk_tokens=chunk_tokens, num_threads=2)
    judge(mode, config, smollm2_reference, sweep_lengths(block_size), 40_000, report)


@pytest.mark.parametrize("mode", ["batch", "split"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sample_of_tiny_models(tmp_path: Path, architecture: str, mode: str) -> None:
    folder = save_tiny_model(tmp_path / architecture, architecture)
    lengths = [1, 7, 8, 9, 15, 16, 17, 24, 25, 40, 150, 200]
    config = parity_config(folder, block_size=8, chunk_tokens=16)
    judge(mode, config, Reference(folder), lengths, VOCAB_SIZE, lambda line: None, num_tokens=24)


@pytest.mark.timeout(600)  # the model is large for a machine that has other work
@pytest.mark.parametrize("mode", ["split"])
def test_sample_of_smollm2(smollm2_folder: Path, mode: str) -> None:
    lengths = [1, 17, 100]
    config = parity_config(smollm2_folder, block_size=16, chunk_tokens=64, num_threads=2)
    judge(mode, config, Reference(smollm2_folder), lengths, 40_000, lambda line: None, num_tokens=6)
