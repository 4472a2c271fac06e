"""From a configuration to an engine that has run once: what every worker does before it says that it is ready."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from engine.core import EngineCore, EngineLimits
from engine.local import generate
from engine.loop import EngineLoop
from engine.outputs import Output
from engine.runner import Runner, RunnerConfig, open_runner
from engine.sequence import Sequence
from kvferry.config import Config
from kvferry.errors import FailedPrecondition
from kvferry.sampling import SamplingParams
from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

MAX_STEP_S = 60.0
"""A step that takes longer than this counts as stuck: heartbeats stop and peers give the worker up."""


def open_core(config: Config) -> EngineCore:
    """Loads the model of `config` and runs a warm-up step.

    Raises:
        FailedPrecondition: the folder does not hold a model that can be served.
    """
    if config.model.path is None:
        raise FailedPrecondition("model.path is not set; `kvferry` finds it from the model's name")
    engine = config.engine
    runner = open_runner(
        Path(config.model.path),
        RunnerConfig(
            num_blocks=engine.pool_blocks,
            block_size=engine.block_size,
            dtype=config.model.dtype,
            num_threads=engine.num_threads or 1,
            max_context=engine.max_context,
        ),
    )
    limits = EngineLimits(
        max_batched_tokens=engine.max_batched_tokens,
        max_running=min(engine.max_running, engine.max_batched_tokens),
        max_chunk_tokens=engine.max_chunk_tokens,
        num_watermark_blocks=max(1, int(engine.watermark * runner.num_blocks)),
        prefix_caching=engine.prefix_caching,
    )
    warm_up(runner)
    core = EngineCore(runner, limits)
    log_event(
        logger,
        "pool_ready",
        num_blocks=runner.num_blocks,
        block_bytes=runner.layout.block_bytes,
        pool_bytes=runner.num_blocks * runner.layout.block_bytes,
        num_tokens=runner.num_blocks * runner.layout.block_size,
    )
    return core


def warm_up(runner: Runner) -> None:
    """One prefill and one decode step in an engine of their own, so that no figure counts them."""
    core = EngineCore(runner, EngineLimits(prefix_caching=False))
    token_ids = [0] * max(1, min(core.layout.block_size, runner.max_context - 2))
    sequence = Sequence("warm-up", token_ids, SamplingParams(max_tokens=2, temperature=0.0))
    result = generate(core, [sequence])["warm-up"]
    if result.error is not None:
        raise FailedPrecondition(f"the warm-up step failed: {result.error.message}")


def open_loop(
    core: EngineCore, deliver: Callable[[list[Output]], None], before_step: Callable[[], list[Output]] = list
) -> EngineLoop:
    """A started step loop; should it ever crash, the process ends so that a supervisor restarts it."""

    def end_process(error: BaseException) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    loop = EngineLoop(core, deliver, before_step=before_step, on_crash=end_process)
    loop.start()
    return loop
