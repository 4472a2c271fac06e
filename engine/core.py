"""The engine of one worker: schedule → move blocks → run → process outputs, over one runner and one block pool.

    add ──► waiting ──► running ──► finished           a worker that decodes
                          └──────► held ──► remove     a prefill worker: shipping reads the blocks until `remove`
    waiting ◄── recall ── parked ◄──┘                  its blocks were taken while it waited for its grant
    reserve ──► (KV arrives) ──► adopt ──► running     a decode worker that is shipped to
                                   └─ forks into its choices, or into a gang of beams

Everything here runs on one thread, between two steps; what a step brought about comes back as a list of `Output`s. No
clock but the one given, no threads, no sockets: the simulator drives this very class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from engine.attempts import Attempts, token_outputs
from engine.beam import BeamSearch
from engine.block_manager import BlockManager
from engine.block_pool import BlockPool, BlockQuota, Room
from engine.forward_batch import (
    Candidate,
    OnKvWritten,
    Sampled,
    SampledToken,
    SampleRequest,
    ScoreRequest,
    SequenceSlice,
)
from engine.gang import Gang
from engine.memory_ops import MemoryOp, SwapIn, SwapOut, perform
from engine.outputs import (
    BeamsFinished,
    CandidatesFound,
    ChunkComputed,
    Output,
    PromptScored,
    SequenceFailed,
    SequencePreempted,
    SequenceRestored,
    SequenceStarted,
)
from engine.preemption import RECOMPUTE, PreemptionPolicy
from engine.runner import Runner
from engine.scheduler import Preempted, ScheduledChunk, Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.speculation import NO_SPECULATION, SpeculationPolicy, Speculator
from engine.swap_space import SwapSpace
from kvferry.block_digest import block_digest
from kvferry.block_hash import hash_root
from kvferry.errors import FailedPrecondition, Internal, InvalidArgument, KvferryError, ResourceExhausted
from kvferry.sampling import TokenLogprob
from kvferry.stats import EngineStats, HitCounter, MemoryCounters
from kvferry.step_log import NoStepLog, StepLog

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
        num_swap_blocks: size of the host pool for swapped sequences; 0: none.
        preemption: recompute or swap.
        speculation: whether sequences speculate.
        quotas: blocks by tenant.
        digests: every full block gets a digest when it fills, for a worker that ships; hits are compared with theirs.
        check_integrity: check the books whenever nothing is left to run; a fault is logged and counted, no more.
    """

    max_batched_tokens: int = 512
    max_running: int = 64
    max_chunk_tokens: int | None = None
    num_watermark_blocks: int = 1
    prefix_caching: bool = True
    num_swap_blocks: int = 0
    preemption: PreemptionPolicy = RECOMPUTE
    speculation: SpeculationPolicy = NO_SPECULATION
    quotas: Mapping[str, BlockQuota] = field(default_factory=dict)
    digests: bool = False
    check_integrity: bool = False


class EngineCore:
    """One runner, its blocks and its sequences."""

    def __init__(self, runner: Runner, limits: EngineLimits, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.runner = runner
        self.layout = runner.layout
        self.pool = BlockPool(runner.num_blocks, limits.quotas)
        self.swap_space = SwapSpace(limits.num_swap_blocks, self.layout.block_bytes)
        self.memory = MemoryCounters()
        self.block_manager = BlockManager(
            self.pool,
            self.layout.block_size,
            self.swap_space,
            num_watermark_blocks=limits.num_watermark_blocks,
            prefix_caching=limits.prefix_caching,
            window=runner.window,
            is_sound=self._is_sound,
        )
        self.speculator = None if limits.speculation.mode == "none" else Speculator(limits.speculation)
        self.scheduler = Scheduler(
            self.block_manager,
            max_batched_tokens=limits.max_batched_tokens,
            max_running=limits.max_running,
            max_chunk_tokens=limits.max_chunk_tokens or limits.max_batched_tokens,
            preemption=limits.preemption,
            counters=self.memory,
            speculator=self.speculator,
        )
        self._attempts = Attempts(self.scheduler, self.block_manager)
        self._told_early: set[str] = set()  # sequences whose chunk of the present step is told already
        self.step_log: StepLog = NoStepLog()
        self.num_steps = 0
        self.is_blocked = False  # the last step could do nothing: only a command can change that
        self.num_integrity_faults = 0
        self._checks_integrity = limits.check_integrity
        self._makes_digests = limits.digests
        self._clock_ns = clock_ns
        self._num_prefill_tokens = 0
        self._num_cached_tokens = 0
        self._num_sampled_tokens = 0

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All living sequences by id."""
        return self._attempts.by_id

    # -- commands, between two steps ------------------------------------------------------------------------------

    def hash_root(self, *, adapter: str = "", cache_salt: str = "", tenant: str = "", shared_salt: str = "") -> bytes:
        return hash_root(self.layout, adapter=adapter, cache_salt=cache_salt, tenant=tenant, shared_salt=shared_salt)

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
        self._attempts.enter(sequence)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises as `add` does; on any thread, as long as the sequence belongs to it."""
        if not sequence.token_ids:
            raise InvalidArgument("token_ids", "the prompt has no tokens")
        if sequence.num_output_tokens >= sequence.sampling.max_tokens:
            raise InvalidArgument(
                "max_tokens", f"{sequence.sampling.max_tokens}, of which {sequence.num_output_tokens} are given already"
            )
        for field_name, token_ids in (
            ("token_ids", sequence.token_ids),
            ("sampling.rules", sequence.sampling.rules.token_ids),
            ("sampling.logprob_token_ids", sequence.sampling.logprob_token_ids),
        ):
            if max(token_ids, default=0) >= self.runner.vocab_size:
                raise InvalidArgument(
                    field_name, f"{max(token_ids)}, the vocabulary has {self.runner.vocab_size} tokens"
                )
        num_total = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        if num_total > self.runner.max_context:
            raise InvalidArgument(
                "max_tokens",
                f"prompt ({sequence.num_prompt_tokens}) + max_tokens ({sequence.sampling.max_tokens}) is beyond the "
                f"context of {self.runner.max_context} tokens",
            )
        num_needed = self.block_manager.max_blocks_for(sequence)
        if num_needed > self.pool.num_blocks:
            raise ResourceExhausted(
                f"the sequence needs up to {num_needed} blocks of {self.layout.block_size} tokens; "
                f"this worker's pool has {self.pool.num_blocks}"
            )
        quota = self.pool.max_used_blocks(sequence.tenant)
        if num_needed > quota:
            raise ResourceExhausted(
                f"the sequence needs up to {num_needed} blocks of {self.layout.block_size} tokens; "
                f"the quota of tenant {sequence.tenant!r} on this worker is {quota}"
            )
        if sequence.beam is not None and sequence.beam.width > self.scheduler.max_running:
            raise InvalidArgument(
                "beam_search.width",
                f"{sequence.beam.width} beams; this worker's batch has {self.scheduler.max_running} places",
            )

    def defers_to_prefix(self, sequence: Sequence) -> bool:
        """Whether the next block that a sequence to be reserved lacks is being shipped or computed for another one."""
        return self.scheduler.defers_to_prefix(sequence, sequence.num_tokens)

    def reserve(self, sequence: Sequence) -> Room:
        """Sets blocks aside for a registered sequence whose KV arrives from elsewhere; all, or nothing and why."""
        keep_watermark = bool(self.scheduler.running)
        room = self.block_manager.reserve(sequence, keep_watermark=keep_watermark)
        while room is not Room.ENOUGH and self.scheduler.park_one(sequence, room):
            room = self.block_manager.reserve(sequence, keep_watermark=keep_watermark)
        if room is not Room.ENOUGH:
            return room
        sequence.status = SequenceStatus.RESERVED
        self.scheduler.reserved.add(sequence)
        sequence.num_cached_tokens = sequence.num_computed_tokens
        return room

    def adopt(
        self, sequence: Sequence, first: list[SampledToken], digests: Mapping[int, bytes] = MappingProxyType({})
    ) -> list[Output]:
        """Lets a reserved sequence run: all its KV has arrived, and the sender sampled its first tokens.

        Args:
            first: one token a choice; for beam search the most likely ones, best first.
            digests: of the full blocks that arrived, by index.

        Returns:
            The result of a beam search that is over at once, else nothing: the first tokens are the sender's to tell.
        """
        assert sequence.status is SequenceStatus.RESERVED, sequence.status
        sequence.num_computed_tokens = sequence.num_tokens
        self._count_hits(sequence)
        self._keep_digests(sequence, digests)
        self.block_manager.publish(sequence)
        self.scheduler.start(sequence)
        sequence.was_started = True
        if sequence.beam is not None:
            return self._start_gang(sequence, [Candidate(one.token_id, _logprob_of(one)) for one in first])
        self._attempts.fork_choices(sequence, first, self._clock_ns())
        return []

    def release_reservation(self, sequence: Sequence, num_arrived_tokens: int) -> None:
        """Frees a reservation; leading full blocks that arrived stay cached, so a failed attempt is not lost work."""
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_arrived_tokens)
        self.block_manager.publish(sequence)
        self.block_manager.free(sequence)
        self.scheduler.reserved.discard(sequence)
        sequence.status = SequenceStatus.WAITING

    def recall(self, sequence: Sequence) -> None:
        """Queues a parked prompt again, to be computed and held anew; does nothing where it is queued, or removed."""
        if sequence.status is SequenceStatus.PARKED:
            self.scheduler.add(sequence)

    def remove(self, owner_id: str) -> list[Sequence]:
        """Ends all sequences of an attempt in whatever state they are; an unknown id does nothing."""
        return self._attempts.remove(owner_id)

    def remove_choice(self, owner_id: str, choice: int) -> list[Sequence]:
        """Ends one choice of an attempt, or keeps it from beginning; returns the sequences that ended."""
        return self._attempts.remove_choice(owner_id, choice)

    def drop_cached_from(self, sequence: Sequence, block_index: int) -> None:
        """Makes a sequence's blocks from `block_index` on unfindable: their contents proved wrong."""
        for block_id in sequence.block_table[block_index:]:
            self.pool.unpublish(block_id)

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self, tell: Callable[[list[Output]], None] | None = None) -> list[Output]:
        """Runs one step; empty when nothing can run.

        Where blocks are shipped, `tell` is given what is known when the KV of the step's tokens is written, so that the
        blocks can leave while the last layer and the sampling still compute; the rest is returned.
        """
        schedule = self.scheduler.schedule()
        self.is_blocked = not (schedule.chunks or schedule.admitted or schedule.preempted)
        start_ns = self._clock_ns()
        outputs: list[Output] = [_preempted(one, start_ns) for one in schedule.preempted]
        outputs += self._started(schedule.admitted, start_ns)
        self._move_blocks()
        if schedule.chunks:
            self.step_log.begin(self.num_steps + 1, start_ns, len(schedule.chunks), schedule.num_tokens)
            on_kv_written = None
            if tell is not None and self._makes_digests:
                on_kv_written = partial(self._tell_early, schedule.chunks, outputs, start_ns, tell)
            self._told_early.clear()
            sampled = self._run(schedule.chunks, on_kv_written)
            end_ns = self._clock_ns()
            self.num_steps += 1
            self.step_log.end(self.num_steps, end_ns)
            results = list(zip(schedule.chunks, sampled, strict=True))
            gangs = {id(gang): gang for chunk in schedule.chunks if (gang := chunk.sequence.gang)}  # before any begins
            for chunk, result in results:
                outputs += self._process(chunk, result, start_ns, end_ns)
            for gang in gangs.values():
                outputs += self._step_gang(gang, results)
        elif self.is_blocked and len(self.scheduler.waiting) and self.yield_pins():
            self.is_blocked = False
        if self._checks_integrity and not self.has_work:
            self._report_integrity()
        return outputs

    def _tell_early(
        self,
        chunks: list[ScheduledChunk],
        outputs: list[Output],
        start_ns: int,
        tell: Callable[[list[Output]], None],
    ) -> None:
        """The blocks of prompts are complete; what was to be told before goes first."""
        told, at_ns = list(outputs), self._clock_ns()
        outputs.clear()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.num_computed_tokens < sequence.num_given_tokens:
                num_computed = sequence.num_computed_tokens + chunk.num_tokens
                self._digest(sequence, num_computed)
                told.append(ChunkComputed(sequence.owner_id, chunk.num_tokens, num_computed, start_ns, at_ns))
                self._told_early.add(sequence.seq_id)
        if told:
            tell(told)

    def _report_integrity(self) -> None:
        """Says what is wrong with the books; wrong books are no reason to fail the requests of everybody."""
        try:
            self.check_integrity()
        except AssertionError as fault:
            self.num_integrity_faults += 1
            logger.error("the books of the pool are wrong: %s", fault)

    def yield_pins(self) -> bool:
        """Ends all pins where nothing else holds blocks, for something that waits; says whether there were any."""
        num_blocks = self.pool.yield_pins()
        if num_blocks:
            logger.warning("%d pinned blocks yield to work that needs more than they leave", num_blocks)
        return num_blocks > 0

    def _move_blocks(self) -> None:
        """Copies and swaps that the schedule asks for."""
        ops = self.block_manager.take_ops()
        if ops:
            begin_ns = self._clock_ns()
            perform(ops, self.runner, self.swap_space)
            self._count_ops(ops, (self._clock_ns() - begin_ns) / 1e9)

    def _count_ops(self, ops: list[MemoryOp], took_s: float) -> None:
        num_out = sum(isinstance(op, SwapOut) for op in ops)
        num_in = sum(isinstance(op, SwapIn) for op in ops)
        self.memory.num_blocks_swapped_out += num_out
        self.memory.num_blocks_swapped_in += num_in
        self.memory.num_blocks_copied += len(ops) - num_out - num_in
        self.memory.swap_s += took_s if num_out + num_in else 0.0

    def _started(self, admitted: list[Sequence], at_ns: int) -> list[Output]:
        first_time = [sequence for sequence in admitted if not sequence.was_started]
        for sequence in first_time:
            sequence.was_started = True
            self._count_hits(sequence)
        return [SequenceStarted(sequence.owner_id, sequence.num_cached_tokens or 0, at_ns) for sequence in first_time]

    def _count_hits(self, sequence: Sequence) -> None:
        num_hits = sequence.num_cached_tokens or 0
        self._num_cached_tokens += num_hits
        if sequence.num_given_tokens > sequence.num_prompt_tokens:
            return  # a resume, whose hits are its own tokens
        counter = self.memory.hits.setdefault(sequence.tenant, HitCounter())
        counter.num_queried_tokens += sequence.num_tokens
        counter.num_hit_tokens += num_hits

    def _run(self, chunks: list[ScheduledChunk], on_kv_written: OnKvWritten | None) -> list[Sampled | None]:
        slices = [self._slice(chunk) for chunk in chunks]
        try:
            return self.runner.run(slices, on_kv_written)
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
                sampling=sequence.sampling,
                position=sequence.num_tokens,
                num_output_tokens=sequence.num_output_tokens,
                choice=sequence.choice,
                num_choices=sequence.num_choices,
                num_candidates=self._search_of(sequence).num_candidates if sequence.beam is not None else 0,
                token_ids=sequence.token_ids,
                constraint=sequence.constraint,
            )
        return SequenceSlice(
            seq_id=sequence.seq_id,
            token_ids=[*sequence.token_ids[start:end], *chunk.draft],
            start=start,
            block_table=sequence.block_table,
            sample=sample,
            score=_score_request(sequence, start, end),
            num_draft_tokens=len(chunk.draft),
        )

    def _search_of(self, sequence: Sequence) -> BeamSearch:
        if sequence.gang is not None:
            return sequence.gang.search
        assert sequence.beam is not None
        return BeamSearch(sequence.beam, sequence.sampling, self.runner.vocab_size)

    def _process(self, chunk: ScheduledChunk, result: Sampled | None, start_ns: int, end_ns: int) -> list[Output]:
        sequence = chunk.sequence
        if sequence.status is SequenceStatus.FINISHED:
            return []  # another choice or beam of the attempt failed in this very step
        if result is not None and result.error is not None:
            error = FailedPrecondition(result.error) if result.is_final else Internal(result.error)
            return self._failed(sequence, error)
        outputs: list[Output] = []
        is_prefill = sequence.num_computed_tokens < sequence.num_given_tokens
        sequence.num_computed_tokens += chunk.num_tokens
        if self.speculator is not None and result is not None and result.token_id is not None:
            outputs += self._accept(self.speculator, chunk, result, end_ns)
        if self._makes_digests:
            self._digest(sequence, sequence.num_computed_tokens)
        self.block_manager.publish(sequence)
        if is_prefill:
            self._num_prefill_tokens += chunk.num_tokens
            if sequence.seq_id not in self._told_early:
                outputs.append(
                    ChunkComputed(sequence.owner_id, chunk.num_tokens, sequence.num_computed_tokens, start_ns, end_ns)
                )
        if sequence.hold.is_parked and sequence.num_uncomputed_tokens == 0:
            return [*outputs, self._restored(sequence, end_ns)]  # its first tokens were told before
        if result is not None and result.prompt_logprobs:
            outputs.append(_scored(sequence, result.prompt_logprobs))
        if result is None or sequence.gang is not None or sequence.num_uncomputed_tokens > 0:
            return outputs
        if sequence.beam is not None:
            return outputs + self._found(sequence, result.candidates, end_ns)
        return outputs + self._sampled(sequence, [_run_of(result)[-1], *result.others], end_ns)

    def _is_sound(self, block_id: int) -> bool:
        """Whether a cached block is as it was when it filled; without a digest nobody can know."""
        digest = self.pool.digest(block_id)
        return digest is None or digest == block_digest(self.runner.block_view(block_id))

    def _keep_digests(self, sequence: Sequence, digests: Mapping[int, bytes]) -> None:
        """Those of blocks that arrived are known; what the sender knew of them holds here, too."""
        if self._makes_digests:
            for index, digest in digests.items():
                self.pool.set_digest(sequence.block_table[index], digest)
            sequence.num_digested_blocks = sequence.num_computed_tokens // self.layout.block_size

    def _digest(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Makes the digests of blocks that have filled; what befalls a block later will not go unnoticed."""
        num_full = num_computed_tokens // self.layout.block_size
        for block_id in sequence.block_table[sequence.num_digested_blocks : num_full]:
            if self.pool.digest(block_id) is None:
                self.pool.set_digest(block_id, block_digest(self.runner.block_view(block_id)))
        sequence.num_digested_blocks = num_full

    def _accept(self, speculator: Speculator, chunk: ScheduledChunk, result: Sampled, at_ns: int) -> list[Output]:
        """Takes the tokens of a draft that were sampled so: their KV is computed; that of the others is given up.

        The last token of the run is left, which has no KV yet, as if it had been sampled alone.
        """
        sequence, outputs = chunk.sequence, list[Output]()
        *accepted, last = _run_of(result)
        for token in accepted:
            outputs += token_outputs(sequence, [token], at_ns)
            sequence.token_ids.append(token.token_id)
        sequence.num_computed_tokens += len(accepted)
        self._num_sampled_tokens += len(accepted)
        speculator.observe(sequence, chunk.draft, [one.token_id for one in (*accepted, last)])
        if chunk.draft:
            self.block_manager.truncate(sequence)
        return outputs

    def _sampled(self, sequence: Sequence, tokens: list[SampledToken], at_ns: int) -> list[Output]:
        """Takes a token a choice: a prefill worker holds the blocks, others fork and go on."""
        self._num_sampled_tokens += len(tokens)
        if sequence.hold_after_prefill:
            self.scheduler.hold(sequence)
            return list(token_outputs(sequence, tokens, at_ns))
        return list(self._attempts.fork_choices(sequence, tokens, at_ns))

    def _found(self, sequence: Sequence, candidates: tuple[Candidate, ...], at_ns: int) -> list[Output]:
        """Takes the candidates of a beam search's prompt."""
        if sequence.hold_after_prefill:
            self.scheduler.hold(sequence)
            return [CandidatesFound(sequence.owner_id, candidates, at_ns)]
        return self._start_gang(sequence, list(candidates))

    def _restored(self, sequence: Sequence, at_ns: int) -> SequenceRestored:
        self.scheduler.hold(sequence)
        sequence.hold.restore()
        return SequenceRestored(sequence.owner_id, at_ns)

    def _failed(self, sequence: Sequence, error: KvferryError) -> list[Output]:
        """One choice that cannot go on fails its attempt."""
        if sequence.hold_after_prefill:
            self.scheduler.hold(sequence)
        else:
            self.remove(sequence.owner_id)
        return [SequenceFailed(sequence.owner_id, error)]

    # -- beams ----------------------------------------------------------------------------------------------------

    def _start_gang(self, sequence: Sequence, candidates: list[Candidate]) -> list[Output]:
        return self._advance(Gang(self._search_of(sequence), [sequence]), [candidates])

    def _step_gang(self, gang: Gang, results: list[tuple[ScheduledChunk, Sampled | None]]) -> list[Output]:
        """Advances a gang if its beams all have their candidates."""
        found = {id(chunk.sequence): result for chunk, result in results if result is not None}
        is_over = gang.members[0].status is SequenceStatus.FINISHED
        if is_over or any(id(member) not in found for member in gang.members):
            return []
        return self._advance(gang, [found[id(member)].candidates for member in gang.members])

    def _advance(self, gang: Gang, candidates: SequenceOf[SequenceOf[Candidate]]) -> list[Output]:
        self._num_sampled_tokens += len(candidates)
        gang.advance(candidates, self._attempts)
        if not gang.search.is_finished:
            return []
        self.remove(gang.owner_id)
        found, num_wanted = gang.search.results(), gang.search.num_returned
        if len(found) < num_wanted:  # every further token is banned or impossible; another try finds no more
            error = FailedPrecondition(
                f"the beam search found {len(found)} of {num_wanted} hypotheses; there are no more"
            )
            return [SequenceFailed(gang.owner_id, error)]
        return [BeamsFinished(gang.owner_id, found, self._clock_ns())]

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
            num_evictions=self.pool.num_evictions,
            num_pinned_blocks=self.pool.num_pinned,
            num_integrity_faults=self.num_integrity_faults,
            num_unsound_hits=self.block_manager.num_unsound_hits,
            max_running=self.scheduler.max_running,
            memory=self.memory,
            **({} if self.speculator is None else self.speculator.counts()),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is accounted for."""
        self.block_manager.check_integrity(self.sequences.values())


def _run_of(result: Sampled) -> list[SampledToken]:
    """The tokens of the first choice in a row: one, and one more for each right token of a draft."""
    assert result.token_id is not None
    return [SampledToken(result.token_id, result.logprob), *result.further]


def _score_request(sequence: Sequence, start: int, end: int) -> ScoreRequest | None:
    """Which log-probabilities of the prompt's tokens a chunk of the tokens `start` … `end` - 1 brings."""
    scoring = sequence.scoring
    if scoring is None or scoring.first_index > end:
        return None
    assert start < scoring.first_index, "a token is computed before the one whose log-probability is wanted first"
    token_ids = sequence.token_ids[scoring.first_index : min(end + 1, sequence.num_prompt_tokens)]
    return ScoreRequest(scoring.first_index - 1 - start, token_ids, scoring.num_top_logprobs)


def _scored(sequence: Sequence, logprobs: tuple[TokenLogprob, ...]) -> PromptScored:
    assert sequence.scoring is not None
    output = PromptScored(sequence.owner_id, sequence.scoring.first_index, logprobs)
    sequence.told_scores(len(logprobs))
    return output


def _preempted(one: Preempted, at_ns: int) -> SequencePreempted:
    return SequencePreempted(one.sequence.owner_id, at_ns, one.sequence.choice, one.is_swapped)


def _logprob_of(token: SampledToken) -> float:
    assert token.logprob is not None, "checked on arrival: a beam search needs it"
    return token.logprob.logprob
