"""From a configuration to an engine that has run once: what every worker does before it says that it is ready."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.constraint import Constraints
from engine.core import EngineCore, EngineLimits
from engine.forward_batch import SampleRequest, SequenceSlice
from engine.local import generate
from engine.loop import EngineLoop
from engine.outputs import Output
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.quotas import block_quotas
from engine.runner import Runner, RunnerConfig, open_runner
from engine.scripted import SCRIPT_FILE
from engine.sequence import Sequence
from engine.speculation import NO_SPECULATION, SpeculationPolicy
from engine.swap_space import SwapSpace
from kvferry.config import Config, Speculation
from kvferry.errors import FailedPrecondition
from kvferry.sampling import SamplingParams
from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19
MEASURED_TOKENS, MEASURED_BLOCKS = 64, 8
"""How much is computed and copied at start to choose between recompute and swap."""
MEASURED_DRAFT = 8
"""Length of the draft that is measured at start."""
LEAST_ROW_COST = 0.05
"""Of a step: a busy machine may measure less, and longer drafts than this leads to bring little."""


def open_core(config: Config, *, digests: bool = False) -> EngineCore:
    """Loads the model of `config` and runs a warm-up step; with `digests` for a worker that ships its blocks.

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
            quantization=config.model.quantization,
            kernels=engine.kernels,
            kernels_folder=config.model.kernels_path,
        ),
    )
    warm_up(runner)
    num_swap_blocks = 0 if engine.preemption == "recompute" else engine.swap_blocks(runner.layout.block_bytes)
    limits = EngineLimits(
        max_batched_tokens=engine.max_batched_tokens,
        max_running=min(engine.max_running, engine.max_batched_tokens),
        max_chunk_tokens=engine.max_chunk_tokens,
        num_watermark_blocks=max(1, int(engine.watermark * runner.num_blocks)),
        prefix_caching=engine.prefix_caching,
        num_swap_blocks=num_swap_blocks,
        preemption=measure_preemption(runner, engine.preemption if num_swap_blocks else "recompute"),
        speculation=measure_speculation(runner, engine.speculation),
        quotas=block_quotas(config.tenants, runner.num_blocks),
        digests=digests,
        check_integrity=engine.check_integrity,
    )
    threading.Thread(target=_populate, args=(runner,), name="kvferry-populate", daemon=True).start()
    _log_pool(runner, limits)
    return EngineCore(runner, limits)


def open_constraints(config: Config, core: EngineCore) -> Constraints:
    """For the calls of a worker with this engine; makes ready for grammars."""
    assert config.model.path is not None, "the engine is open"
    folder = Path(config.model.path)
    return Constraints(folder, core.runner.vocab_size, has_logits=not (folder / SCRIPT_FILE).is_file())


def _populate(runner: Runner) -> None:
    """Brings in the pool's pages behind everything else that this machine has to do."""
    with suppress(AttributeError, OSError):  # where a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    runner.populate()


def _log_pool(runner: Runner, limits: EngineLimits) -> None:
    log_event(
        logger,
        "pool_ready",
        num_blocks=runner.num_blocks,
        block_bytes=runner.layout.block_bytes,
        pool_bytes=runner.num_blocks * runner.layout.block_bytes,
        num_tokens=runner.num_blocks * runner.layout.block_size,
        swap_pool_bytes=limits.num_swap_blocks * runner.layout.block_bytes,
        recompute_s_per_token=round(limits.preemption.recompute_s_per_token, 9),
        swap_s_per_block=round(limits.preemption.swap_s_per_block, 9),
        speculation=limits.speculation.mode,
        draft_row_cost=round(limits.speculation.row_cost, 4),
    )


def measure_preemption(runner: Runner, mode: PreemptionMode) -> PreemptionPolicy:
    """The policy for this model on this machine; nothing is measured where the mode leaves no choice."""
    if mode != "auto":
        return PreemptionPolicy(mode)
    num_tokens = max(1, min(MEASURED_TOKENS, runner.max_context - 2, runner.num_blocks * runner.layout.block_size - 2))
    recompute_s = min(_prefill_s(runner, num_tokens) for _ in range(2))
    num_blocks = min(MEASURED_BLOCKS, runner.num_blocks)
    space = SwapSpace(num_blocks, runner.layout.block_bytes)
    for block_id in range(num_blocks):  # the first copy brings the pages; it is not measured
        space.store(runner, block_id, block_id)
    begin_s = time.monotonic()
    for block_id in range(num_blocks):
        space.store(runner, block_id, block_id)
        space.load(runner, block_id, block_id)
    swap_s = time.monotonic() - begin_s
    return PreemptionPolicy(mode, recompute_s / num_tokens, swap_s / (2 * num_blocks))


def measure_speculation(runner: Runner, mode: Speculation) -> SpeculationPolicy:
    """The policy for this model on this machine: what a row of a draft costs, where there are drafts."""
    if mode == "none" or (mode == "auto" and not runner.suits_drafts):
        return NO_SPECULATION
    num_known = min(MEASURED_TOKENS, runner.num_blocks * runner.layout.block_size, runner.max_context) - MEASURED_DRAFT
    if num_known < 1 or not runner.suits_drafts:
        return SpeculationPolicy("prompt_lookup")
    rounds = [[_decode_s(runner, num_known, length) for length in (0, MEASURED_DRAFT)] for _ in range(4)]
    alone_s, drafted_s = map(min, zip(*rounds, strict=True))  # in turn, so that a machine that is busy slows both
    row_cost = (drafted_s / alone_s - 1.0) / MEASURED_DRAFT
    return SpeculationPolicy("prompt_lookup", min(max(row_cost, LEAST_ROW_COST), 1.0))


def _decode_s(runner: Runner, num_known: int, num_draft_tokens: int) -> float:
    """Time of a step of one token and a draft, behind `num_known` tokens, in whatever the first blocks hold."""
    sampling = SamplingParams(max_tokens=1 + num_draft_tokens, temperature=0.0)
    part = SequenceSlice(
        "measured",
        token_ids=[0] * (1 + num_draft_tokens),
        start=num_known - 1,
        block_table=range(runner.layout.num_blocks_for(num_known + num_draft_tokens)),
        sample=SampleRequest(sampling, num_known, 0),
        num_draft_tokens=num_draft_tokens,
    )
    begin_s = time.monotonic()
    runner.run([part])
    return time.monotonic() - begin_s


def warm_up(runner: Runner) -> None:
    """One prefill and one decode step, so that the first request finds everything loaded."""
    _run_alone(runner, max(1, min(runner.layout.block_size, runner.max_context - 2)))


def _prefill_s(runner: Runner, num_tokens: int) -> float:
    """Time of one prefill step of `num_tokens` tokens."""
    begin_s = time.monotonic()
    _run_alone(runner, num_tokens, max_tokens=1)
    return time.monotonic() - begin_s


def _run_alone(runner: Runner, num_tokens: int, max_tokens: int = 2) -> None:
    """A prompt of `num_tokens` tokens in an engine of its own, so that no figure counts it."""
    core = EngineCore(runner, EngineLimits(prefix_caching=False))
    sequence = Sequence("warm-up", [0] * num_tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    result = generate(core, [sequence])["warm-up"]
    if result.error is not None:
        raise FailedPrecondition(f"the warm-up step failed: {result.error.message}")


def open_loop(
    core: EngineCore,
    deliver: Callable[[list[Output]], None],
    before_step: Callable[[], list[Output]] = list,
    *,
    kill_at_step: int | None = None,
) -> EngineLoop:
    """A started step loop; should it ever crash, the process ends so that a supervisor restarts it.

    With `kill_at_step` the process ends in the same way before that step (from 1), for those who rehearse failures.
    """

    def end_process(error: BaseException) -> None:
        _end_process()

    def prepare_step() -> list[Output]:
        outputs = before_step()
        if kill_at_step is not None and core.has_work and core.num_steps + 1 >= kill_at_step:
            log_event(logger, "fault_committed", level=logging.WARNING, kind="kill", step=core.num_steps + 1)
            _end_process()
        return outputs

    loop = EngineLoop(core, deliver, before_step=prepare_step, on_crash=end_process)
    loop.start()
    return loop


def _end_process() -> None:
    """At once, with nothing said or given back."""
    os.kill(os.getpid(), signal.SIGKILL)
