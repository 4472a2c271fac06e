"""The engine of one worker: schedule → run → process outputs, over one runner and one block pool.

    add ──► waiting ──► running ──► finished           a worker that decodes
                          └──────► held ──► remove     a prefill worker: shipping reads the blocks until `remove`
    reserve ──► (KV arrives) ──► adopt ──► running     a decode worker that is shipped to

Everything here runs on one thread, between two steps; what a step brought about comes back as a list of `Output`s. No
clock but the one given, no threads, no sockets: the simulator drives this very class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.block_pool import BlockPool
from engine.forward_batch import Sampled, SampleRequest, SequenceSlice
from engine.outputs import (
    ChunkComputed,
    Output,
    SequenceFailed,
    SequencePreempted,
    SequenceStarted,
    TokenSampled,
)
from engine.runner import Runner
from engine.scheduler import ScheduledChunk, Scheduler
from engine.sequence import Sequence, SequenceStatus
from kvferry.block_hash import hash_root
from kvferry.errors import Internal, InvalidArgument, ResourceExhausted
from kvferry.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of one engine.

    Attributes:
        max_batched_tokens: token budget of a step.
        max_running: most sequences in the batch.
        max_chunk_tokens: most tokens of one sequence in one step; None: the budget.
        num_watermark_blocks: blocks kept available when a sequence joins running ones.
        prefix_caching: whether full blocks are published and looked up.
    """

    max_batched_tokens: int = 512
    max_running: int = 64
    max_chunk_tokens: int | None = None
    num_watermark_blocks: int = 1
    prefix_caching: bool = True


class EngineCore:
    """One runner, its blocks and its sequences."""

    def __init__(self, runner: Runner, limits: EngineLimits, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.runner = runner
        self.layout = runner.layout
        self.pool = BlockPool(runner.num_blocks)
        self.block_manager = BlockManager(
            self.pool,
            self.layout.block_size,
            num_watermark_blocks=limits.num_watermark_blocks,
            prefix_caching=limits.prefix_caching,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_batched_tokens=limits.max_batched_tokens,
            max_running=limits.max_running,
            max_chunk_tokens=limits.max_chunk_tokens or limits.max_batched_tokens,
        )
        self.sequences: dict[str, Sequence] = {}
        self.num_steps = 0
        self._clock_ns = clock_ns
        self._num_prefill_tokens = 0
        self._num_cached_tokens = 0
        self._num_sampled_tokens = 0

    # -- commands, between two steps ------------------------------------------------------------------------------

    def hash_root(self, *, adapter: str = "", cache_salt: str = "") -> bytes:
        return hash_root(self.layout, adapter=adapter, cache_salt=cache_salt)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose KV this engine computes itself.

        Raises:
            InvalidArgument: it has no tokens, or more than the context allows.
            ResourceExhausted: it could never fit, even alone.
        """
        self.register(sequence)
        self.scheduler.add(sequence)

    def register(self, sequence: Sequence) -> None:
        """Checks a sequence and takes it into the books without queueing it; raises like `add`."""
        if sequence.seq_id in self.sequences:
            raise InvalidArgument("id", f"sequence {sequence.seq_id} is running already")
        self.check_fits(sequence)
        self.sequences[sequence.seq_id] = sequence

    def check_fits(self, sequence: Sequence) -> None:
        """Raises as `add` does; on any thread, as long as the sequence belongs to it."""
        if not sequence.token_ids:
            raise InvalidArgument("token_ids", "the prompt has no tokens")
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            raise InvalidArgument(
                "max_tokens", f"{sequence.sampling.max_tokens}, of which {sequence.num_output_tokens} are given already"
            )
        if max(sequence.token_ids) >= self.runner.vocab_size:
            raise InvalidArgument(
                "token_ids", f"{max(sequence.token_ids)}, the vocabulary has {self.runner.vocab_size} tokens"
            )
        num_total = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        if num_total > self.runner.max_context:
            raise InvalidArgument(
                "max_tokens",
                f"prompt ({sequence.num_prompt_tokens}) + max_tokens ({sequence.sampling.max_tokens}) is beyond the "
                f"context of {self.runner.max_context} tokens",
            )
        num_needed = self.block_manager.num_blocks_for(sequence.max_kv_tokens)
        if num_needed > self.pool.num_blocks:
            raise ResourceExhausted(
                f"the sequence needs up to {num_needed} blocks of {self.layout.block_size} tokens; "
                f"this worker's pool has {self.pool.num_blocks}"
            )

    def reserve(self, sequence: Sequence) -> bool:
        """Sets blocks aside for a registered sequence whose KV arrives from elsewhere; all or nothing."""
        keep_watermark = bool(self.scheduler.running)
        if not self.block_manager.reserve(sequence, keep_watermark=keep_watermark):
            return False
        sequence.status = SequenceStatus.RESERVED
        sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def adopt(self, sequence: Sequence, first_token_ids: list[int]) -> None:
        """Lets a reserved sequence run: all its KV has arrived, and the sender sampled `first_token_ids`."""
        assert sequence.status is SequenceStatus.RESERVED, sequence.status
        sequence.num_computed_tokens = sequence.num_tokens
        self._num_cached_tokens += sequence.num_cached_tokens or 0
        self.block_manager.publish(sequence)
        sequence.token_ids.extend(first_token_ids)
        self.scheduler.start(sequence)

    def release_reservation(self, sequence: Sequence, num_arrived_tokens: int) -> None:
        """Frees a reservation; leading full blocks that arrived stay cached, so a failed attempt is not lost work."""
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_arrived_tokens)
        self.block_manager.publish(sequence)
        self.block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING

    def remove(self, seq_id: str) -> Sequence | None:
        """Ends a sequence in whatever state it is and frees its blocks; an unknown id does nothing."""
        sequence = self.sequences.pop(seq_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)
            self.block_manager.free(sequence)
            sequence.status = SequenceStatus.FINISHED
        return sequence

    def drop_cached_from(self, sequence: Sequence, block_index: int) -> None:
        """Makes a sequence's blocks from `block_index` on unfindable: their contents proved wrong."""
        for block_id in sequence.block_table[block_index:]:
            self.pool.unpublish(block_id)

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Runs one step; empty when nothing can run."""
        schedule = self.scheduler.schedule()
        start_ns = self._clock_ns()
        outputs: list[Output] = [SequencePreempted(sequence.seq_id, start_ns) for sequence in schedule.preempted]
        outputs += self._started(schedule.admitted, start_ns)
        if schedule.chunks:
            sampled = self._run(schedule.chunks)
            end_ns = self._clock_ns()
            self.num_steps += 1
            for chunk, result in zip(schedule.chunks, sampled, strict=True):
                outputs += self._process(chunk, result, start_ns, end_ns)
        return outputs

    def _started(self, admitted: list[Sequence], at_ns: int) -> list[Output]:
        first_time = [sequence for sequence in admitted if sequence.num_preemptions == 0]
        self._num_cached_tokens += sum(sequence.num_cached_tokens or 0 for sequence in first_time)
        return [SequenceStarted(sequence.seq_id, sequence.num_cached_tokens or 0, at_ns) for sequence in first_time]

    def _run(self, chunks: list[ScheduledChunk]) -> list[Sampled | None]:
        slices = [self._slice(chunk) for chunk in chunks]
        try:
            return self.runner.run(slices)
        except Exception:
            logger.exception("a step failed; its %d sequences are run one by one", len(slices))
        return [self._run_alone(one) for one in slices]

    def _run_alone(self, one: SequenceSlice) -> Sampled | None:
        """Runs one slice; what fails even alone is that sequence's fault and fails only it."""
        try:
            return self.runner.run([one])[0]
        except Exception as error:
            logger.exception("sequence %s failed", one.seq_id)
            return Sampled(None, f"the model failed on this sequence: {type(error).__name__}")

    def _slice(self, chunk: ScheduledChunk) -> SequenceSlice:
        sequence = chunk.sequence
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + chunk.num_tokens
        sample = None
        if chunk.reaches_end:
            sample = SampleRequest(
                sampling=sequence.sampling, position=sequence.num_tokens, num_output_tokens=sequence.num_output_tokens
            )
        return SequenceSlice(
            seq_id=sequence.seq_id,
            token_ids=sequence.token_ids[start:end],
            start=start,
            block_table=sequence.block_table,
            sample=sample,
        )

    def _process(self, chunk: ScheduledChunk, result: Sampled | None, start_ns: int, end_ns: int) -> list[Output]:
        sequence = chunk.sequence
        if result is not None and result.error is not None:
            self._retire(sequence)
            return [SequenceFailed(sequence.seq_id, Internal(result.error))]
        outputs: list[Output] = []
        is_prefill = sequence.num_computed_tokens < sequence.num_given_tokens
        sequence.num_computed_tokens += chunk.num_tokens
        self.block_manager.publish(sequence)
        if is_prefill:
            self._num_prefill_tokens += chunk.num_tokens
            outputs.append(
                ChunkComputed(sequence.seq_id, chunk.num_tokens, sequence.num_computed_tokens, start_ns, end_ns)
            )
        if result is not None and result.token_id is not None:
            outputs.append(self._append(sequence, result.token_id, end_ns))
        return outputs

    def _append(self, sequence: Sequence, token_id: int, at_ns: int) -> TokenSampled:
        self._num_sampled_tokens += 1
        sequence.token_ids.append(token_id)
        finish = sequence.sampling.finish_after(token_id, sequence.num_output_tokens)
        if finish is not None or sequence.hold_after_prefill:
            self._retire(sequence)
        return TokenSampled(sequence.seq_id, sequence.num_output_tokens - 1, token_id, finish, at_ns)

    def _retire(self, sequence: Sequence) -> None:
        """Ends a sequence's part in the batch; blocks that may be on their way out are kept until `remove`."""
        if sequence.hold_after_prefill:
            self.scheduler.remove(sequence)
            sequence.status = SequenceStatus.HELD
        else:
            self.remove(sequence.seq_id)

    # -- looking ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        counts = self.pool.counts
        return EngineStats(
            num_blocks=self.pool.num_blocks,
            num_free_blocks=counts.free,
            num_cached_blocks=counts.cached,
            num_used_blocks=counts.used,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_steps=self.num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            num_prefill_tokens=self._num_prefill_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_sampled_tokens=self._num_sampled_tokens,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is accounted for."""
        self.block_manager.check_integrity(self.sequences.values())
