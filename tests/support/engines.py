"""Small engines over the scripted runner, and what has to come out of them, computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from engine.beam import BeamSearch, Hypothesis
from engine.core import EngineCore, EngineLimits
from engine.forward_batch import OnKvWritten, Sampled, SampledToken, SequenceSlice
from engine.outputs import Output
from engine.scripted import (
    DEFAULT_SCRIPT_CONFIG,
    SLOT_BYTES,
    ScriptConfig,
    ScriptedRunner,
    candidates_of_slots,
    next_slot,
    slots_of,
    token_of_slots,
)
from engine.sequence import Priority, Sequence
from kvferry.sampling import BeamParams, SamplingParams

BLOCK_SIZE = 4
POISON = b"\xee"


class BrokenStep(BaseException):
    """A step that no engine should ask for; not an `Exception`, which the engine would take for a failing model."""


class WatchedRunner(ScriptedRunner):
    """Checks what each step asks for: within the budget, every slot written by one sequence, no published block.

    With a window its token rule reads the last `window` slots only, as an attention window does.
    """

    def __init__(
        self, num_blocks: int, *, block_size: int = BLOCK_SIZE, window: int | None = None, max_tokens: int = 1 << 30
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size)
        self.window = window
        self.max_tokens = max_tokens
        self.published: Callable[[], Iterable[int]] = tuple
        self.num_tokens_run = 0

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        try:
            self._check(slices)
            sampled = super().run(slices, on_kv_written)
        except AssertionError as fault:
            raise BrokenStep(*fault.args) from fault
        self.num_tokens_run += sum(len(part.token_ids) for part in slices)
        return sampled

    def _check(self, slices: list[SequenceSlice]) -> None:
        num_tokens = sum(len(part.token_ids) for part in slices)
        assert 0 < num_tokens <= self.max_tokens, f"{num_tokens} tokens in a step of at most {self.max_tokens}"
        assert all(part.token_ids for part in slices), "a slice without tokens"
        assert len({part.seq_id for part in slices}) == len(slices), "a sequence twice in one step"
        published, written = set(self.published()), set[int]()
        size = self.layout.block_size
        for part in slices:
            blocks = part.block_table[part.start // size : -(-part.context_length // size)]
            assert not published.intersection(blocks), f"{part.seq_id} writes into a published block"
            assert not written.intersection(blocks), f"{part.seq_id} writes into another one's block"
            written.update(blocks)

    def _slots(self, block_table: SequenceOf[int], num_tokens: int) -> bytes:
        if self.window is None:
            return super()._slots(block_table, num_tokens)
        first = max(0, num_tokens - self.window)
        return b"".join(bytes(self._slot(block_table, position)) for position in range(first, num_tokens))


def make_core(
    num_blocks: int, limits: EngineLimits | None = None, *, block_size: int = BLOCK_SIZE, window: int | None = None
) -> EngineCore:
    """An engine over a `WatchedRunner`; its clock stands still."""
    limits = limits or EngineLimits(max_batched_tokens=64, max_running=8, max_chunk_tokens=16)
    runner = WatchedRunner(num_blocks, block_size=block_size, window=window, max_tokens=limits.max_batched_tokens)
    core = EngineCore(runner, limits, clock_ns=int)
    runner.published = core.pool.published_blocks
    return core


def make_sequence(
    core: EngineCore,
    name: str,
    prompt: SequenceOf[int],
    max_tokens: int,
    *,
    output: SequenceOf[int] = (),
    arrival: int = 0,
    tier_rank: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    tenant: str = "",
    shared_salt: str = "",
    choice: int = 0,
    num_choices: int = 1,
    beam: BeamParams | None = None,
    hold_after_prefill: bool = False,
    use_prefix_cache: bool = True,
) -> Sequence:
    """A sequence for `core`; `output` is what a resumed one made before."""
    return Sequence(
        name,
        [*prompt, *output],
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stop_token_ids),
        num_prompt_tokens=len(prompt),
        priority=Priority(tier_rank=tier_rank, arrival=arrival),
        hash_root=core.hash_root(tenant=tenant, shared_salt=shared_salt),
        hold_after_prefill=hold_after_prefill,
        use_prefix_cache=use_prefix_cache,
        choice=choice,
        num_choices=num_choices,
        beam=beam,
        tenant=tenant,
    )


def expected_tokens(
    prompt: SequenceOf[int], sampling: SamplingParams, choice: int = 0, *, window: int | None = None
) -> list[int]:
    """Output of one choice, stop rules and min_tokens applied."""
    slots, output = bytearray(slots_of(prompt)), list[int]()
    first = 0 if window is None else -window * SLOT_BYTES
    while not output or sampling.finish_after(output[-1], len(output)) is None:
        output.append(token_of_slots(bytes(slots[first:]), DEFAULT_SCRIPT_CONFIG, sampling, choice, len(output)))
        slots += next_slot(bytes(slots[-SLOT_BYTES:]), output[-1])
    return output


def expected_beams(
    prompt: SequenceOf[int], beam: BeamParams, sampling: SamplingParams, *, window: int | None = None
) -> tuple[Hypothesis, ...]:
    """Result of a beam search, from the slots of whole sequences."""
    config: ScriptConfig = DEFAULT_SCRIPT_CONFIG
    first = 0 if window is None else -window * SLOT_BYTES
    search = BeamSearch(beam, sampling, config.vocab_size)
    while not search.is_finished:
        slots = [slots_of([*prompt, *live])[first:] for live in search.live_token_ids]
        search.advance([candidates_of_slots(one, config, search.num_candidates) for one in slots])
    return search.results()


def first_tokens(prompt: SequenceOf[int], sequence: Sequence) -> list[SampledToken]:
    """What a prefill worker commits: a token a choice, or the candidates of a beam search."""
    if sequence.beam is not None:
        num = BeamSearch(sequence.beam, sequence.sampling, DEFAULT_SCRIPT_CONFIG.vocab_size).num_candidates
        found = candidates_of_slots(slots_of(prompt), DEFAULT_SCRIPT_CONFIG, num)
        return [SampledToken.told(one.token_id, one.logprob) for one in found]
    choices = range(sequence.choice, sequence.choice + sequence.num_choices)
    index = sequence.num_output_tokens
    return [SampledToken(expected_tokens(prompt, sequence.sampling, choice)[index]) for choice in choices]


def ship(core: EngineCore, sequence: Sequence) -> None:
    """Writes the KV of a reserved sequence into its blocks, as a shipment does; hits are left alone."""
    size = core.layout.block_bytes
    contents = slots_of(sequence.token_ids).ljust(len(sequence.block_table) * size, b"\0")
    first = sequence.num_computed_tokens // core.layout.block_size
    for index in range(first, core.layout.num_blocks_for(sequence.num_tokens)):
        core.runner.block_view(sequence.block_table[index])[:] = contents[index * size : (index + 1) * size]


def poison_free_blocks(core: EngineCore) -> None:
    """Free blocks get contents that belong to nothing, so that reading one shows."""
    published = set(core.pool.published_blocks())
    for block_id in range(core.pool.num_blocks):
        if core.pool.ref_count(block_id) == 0 and block_id not in published:
            core.runner.block_view(block_id)[:] = POISON * core.layout.block_bytes


def deny_room(core: EngineCore, is_denied: Callable[[], bool]) -> None:
    """Now and then a running sequence finds no room for its next token: lower ones, or itself, are preempted.

    Not a prompt that is held afterwards: its blocks were all given to it, and it cannot be preempted itself.
    """
    manager = core.block_manager
    prepare_write = manager.prepare_write

    def pressed(sequence: Sequence) -> bool:
        has_room = not is_denied() or sequence.hold_after_prefill
        return has_room and prepare_write(sequence)

    manager.prepare_write = pressed  # type: ignore[method-assign]


def run_to_end(core: EngineCore, *, max_steps: int = 5_000) -> list[Output]:
    """Steps until nothing is left, books checked after each; what came of it."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        if not core.has_work:
            return outputs
        poison_free_blocks(core)
        outputs += core.step()
        core.check_integrity()
    left = [(one.seq_id, one.status.value, one.num_tokens) for one in core.sequences.values()]
    raise AssertionError(f"not done after {max_steps} steps: {left}")
