"""A runner without a model: its tokens follow from its KV bytes by a rule that can be computed by hand.

Simulator and tests use it, and real processes serve it from a folder that holds `kvferry_scripted.json` (beside a
tokenizer.json). It has real block memory. A slot is eight bytes, the digest of the slot before it and its token, so
equal prefixes have equal blocks, as with a model. When a token is asked for, all slots of the sequence are read through
its block table and their digest chooses the token: a lost, stale or swapped block anywhere changes what comes out, and
`reference_continuation` says what had to come out, `min_tokens` included; stop rules are not applied here.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.forward_batch import Candidate, OnKvWritten, Sampled, SampledToken, SampleRequest, SequenceSlice
from engine.speculation import sample_run
from kvferry.errors import FailedPrecondition
from kvferry.kv_layout import KvLayout
from kvferry.sampling import SamplingParams, TokenLogprob

SCRIPT_FILE = "kvferry_scripted.json"
SLOT_BYTES = 8
ROOT_SLOT = bytes(SLOT_BYTES)
"""What the first token of a sequence takes for the slot before it."""

Mode = Literal["digest", "script", "table"]


class ScriptConfig(BaseModel):
    """The contents of `kvferry_scripted.json`; every field has a default, unknown fields are refused.

    Attributes:
        vocab_size: tokens are below this.
        lowest_token_id: sampled tokens of mode "digest" are at least this, so that control tokens can be kept out.
        max_context: most tokens of one sequence.
        mode: "digest": the token follows from all KV bytes; "script": token number n of the output is `script[n]`, over
            and over; "table": the token after t is `table[t]`, or t itself.
        script: tokens of mode "script".
        table: next tokens of mode "table".
        step_delay_s: sleep in each step.
        token_delay_s: sleep for each computed token, so that long prompts take longer.
        nan_at_output_index: output indices (from 0) at which the logits count as non-finite.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(default=1024, ge=1)
    lowest_token_id: int = Field(default=0, ge=0)
    max_context: int = Field(default=4096, ge=1)
    mode: Mode = "digest"
    script: tuple[int, ...] = ()
    table: Mapping[int, int] = Field(default_factory=dict)
    step_delay_s: float = Field(default=0.0, ge=0.0)
    token_delay_s: float = Field(default=0.0, ge=0.0)
    nan_at_output_index: tuple[int, ...] = ()

    def model_post_init(self, _context: object) -> None:
        if self.lowest_token_id >= self.vocab_size:
            raise ValueError(f"lowest_token_id {self.lowest_token_id} is not below vocab_size {self.vocab_size}")
        if self.mode == "script" and not self.script:
            raise ValueError("mode 'script' needs at least one token in script")
        if any(not 0 <= token < self.vocab_size for token in (*self.script, *self.table.values())):
            raise ValueError(f"script and table hold token ids from 0 to {self.vocab_size - 1}")

    @property
    def fingerprint(self) -> str:
        """Equal for equal configurations, so that two workers with different scripts refuse each other."""
        return "scripted-" + hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32]


DEFAULT_SCRIPT_CONFIG = ScriptConfig()


def load_script_config(folder: Path) -> ScriptConfig:
    """Read the folder's script file; FailedPrecondition names the file and the field that is wrong."""
    path = folder / SCRIPT_FILE
    try:
        return ScriptConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FailedPrecondition(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = "".join(f"{part}: " for part in fault["loc"])
        raise FailedPrecondition(f"{path}: {where}{fault['msg']}") from error


def scripted_layout(config: ScriptConfig, block_size: int) -> KvLayout:
    """Layout of the scripted runner's blocks: a slot is two float32 values, the eight bytes of its digest."""
    return KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=block_size,
        dtype="float32",
        model_fingerprint=config.fingerprint,
        rope_digest="none",
    )


def open_scripted_runner(folder: Path, *, num_blocks: Callable[[KvLayout], int], block_size: int) -> ScriptedRunner:
    """The runner of a folder's script file; `num_blocks` is asked with the layout."""
    config = load_script_config(folder)
    return ScriptedRunner(config, num_blocks=num_blocks(scripted_layout(config, block_size)), block_size=block_size)


def next_slot(previous: bytes, token_id: int) -> bytes:
    """The slot of a token whose predecessor's slot is `previous`."""
    return hashlib.blake2b(previous + struct.pack("<q", token_id), digest_size=SLOT_BYTES).digest()


def slots_of(token_ids: Sequence[int]) -> bytes:
    """The slots of a whole sequence, one after the other."""
    slots = bytearray()
    previous = ROOT_SLOT
    for token_id in token_ids:
        previous = next_slot(previous, token_id)
        slots += previous
    return bytes(slots)


def token_of_slots(
    slots: bytes, config: ScriptConfig, sampling: SamplingParams | None, choice: int, num_output_tokens: int
) -> int:
    """The "digest" rule: the digest of all slots, and of seed and choice unless greedy, modulo the vocabulary.

    Before `min_tokens` output tokens an ending one gives way to the next id that ends nothing.
    """
    noise = b"" if sampling is None or sampling.is_greedy else struct.pack("<QQ", sampling.seed, choice)
    state = int.from_bytes(hashlib.blake2b(slots + noise, digest_size=8).digest(), "little")
    num_ids = config.vocab_size - config.lowest_token_id
    barred = () if sampling is None or num_output_tokens >= sampling.min_tokens else sampling.ending_token_ids
    ids = (config.lowest_token_id + (state + step) % num_ids for step in range(num_ids))
    return next((token_id for token_id in ids if token_id not in barred), config.lowest_token_id)


def scripted_logprob(token_id: int) -> float:
    """The log-probability said of a sampled token: -1, -1.25 … -2.75, by its id."""
    return -1.0 - (token_id % 8) / 4


def candidates_of_slots(slots: bytes, config: ScriptConfig, num_candidates: int) -> tuple[Candidate, ...]:
    """The most likely tokens for beam search: ids from the digest of all slots on, ever less likely."""
    num_ids = config.vocab_size - config.lowest_token_id
    state = int.from_bytes(hashlib.blake2b(slots, digest_size=8).digest(), "little")
    gap = 1.0 + (state >> 32) % 64 / 64  # from one candidate to the next; differs from beam to beam
    return tuple(
        Candidate(config.lowest_token_id + (state + rank) % num_ids, -gap * (rank + 1) / 4)
        for rank in range(min(num_candidates, num_ids))
    )


def scripted_next_token(
    token_ids: Sequence[int],
    config: ScriptConfig = DEFAULT_SCRIPT_CONFIG,
    sampling: SamplingParams | None = None,
    choice: int = 0,
) -> int:
    """Oracle of mode "digest": the first token after the prompt `token_ids` (greedy where `sampling` is None)."""
    return token_of_slots(slots_of(token_ids), config, sampling, choice, 0)


def reference_continuation(
    token_ids: Sequence[int],
    num_tokens: int,
    config: ScriptConfig = DEFAULT_SCRIPT_CONFIG,
    sampling: SamplingParams | None = None,
    choice: int = 0,
) -> list[int]:
    """Oracle of mode "digest": the first `num_tokens` tokens after a prompt, stop rules not applied."""
    slots = bytearray(slots_of(token_ids))
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(token_of_slots(bytes(slots), config, sampling, choice, len(output)))
        slots += next_slot(bytes(slots[-SLOT_BYTES:]), output[-1])
    return output


class ScriptedRunner:
    """A `Runner` (`engine/runner.py`) over a bytearray of blocks."""

    def __init__(
        self,
        config: ScriptConfig = DEFAULT_SCRIPT_CONFIG,
        *,
        num_blocks: int,
        block_size: int = 16,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.layout = scripted_layout(config, block_size)
        assert self.layout.bytes_per_token == SLOT_BYTES
        self.max_context = config.max_context
        self.vocab_size = config.vocab_size
        self.num_blocks = num_blocks
        self.window: int | None = None
        self.suits_drafts = False  # its steps cost what it is told; it takes drafts where they are asked for
        self._sleep = sleep
        pool = memoryview(bytearray(num_blocks * self.layout.block_bytes))
        size = self.layout.block_bytes
        self._blocks = [pool[start : start + size] for start in range(0, len(pool), size)]

    def run(self, slices: list[SequenceSlice], on_kv_written: OnKvWritten | None = None) -> list[Sampled | None]:
        delay_s = self.config.step_delay_s + self.config.token_delay_s * sum(len(part.token_ids) for part in slices)
        if delay_s:
            self._sleep(delay_s)
        for part in slices:
            self._compute(part)
        if on_kv_written is not None:
            on_kv_written()
        return [self._answer(part) for part in slices]

    def block_view(self, block_id: int) -> memoryview:
        return self._blocks[block_id]

    def copy_partial(self, block_id: int, num_tokens: int) -> bytes:
        assert 0 <= num_tokens <= self.layout.block_size
        kept = bytes(self._blocks[block_id][: num_tokens * SLOT_BYTES])
        return kept.ljust(self.layout.block_bytes, b"\0")

    def populate(self) -> None:
        """Its blocks are tiny, and written when they are made."""

    def _compute(self, part: SequenceSlice) -> None:
        assert part.token_ids
        assert len(part.block_table) >= self.layout.num_blocks_for(part.context_length)
        previous = ROOT_SLOT if part.start == 0 else bytes(self._slot(part.block_table, part.start - 1))
        for position, token_id in enumerate(part.token_ids, part.start):
            previous = next_slot(previous, token_id)
            self._slot(part.block_table, position)[:] = previous

    def _answer(self, part: SequenceSlice) -> Sampled | None:
        sampled = None
        if part.sample is not None:
            assert part.sample.position == part.context_length - part.num_draft_tokens
            sampled = sample_run(partial(self._sample, part), part.sample, part.draft)
        if part.score is None:
            return sampled
        assert 0 <= part.score.first_row < len(part.token_ids)
        assert len(part.score.token_ids) <= len(part.token_ids) - part.score.first_row
        told = [self._logprob(token_id, part.score.num_top_logprobs) for token_id in part.score.token_ids]
        return Sampled(None, prompt_logprobs=tuple(told)).joined(sampled)

    def _sample(self, part: SequenceSlice, place: int, request: SampleRequest) -> Sampled:
        if request.num_output_tokens in self.config.nan_at_output_index:
            return Sampled(None, f"non-finite logits for sequence {part.seq_id!r} at position {request.position}")
        slots = self._slots(part.block_table, request.position) if self.config.mode == "digest" else b""
        if request.num_candidates:
            return Sampled(None, candidates=candidates_of_slots(slots, self.config, request.num_candidates))
        choices = range(request.choice, request.choice + request.num_choices)
        last = part.token_ids[len(part.token_ids) - 1 - part.num_draft_tokens + place]
        first, *others = (self._token(last, request, slots, choice) for choice in choices)
        return Sampled(first.token_id, logprob=first.logprob, others=tuple(others))

    def _token(self, last: int, request: SampleRequest, slots: bytes, choice: int) -> SampledToken:
        if self.config.mode == "script":
            token_id = self.config.script[request.num_output_tokens % len(self.config.script)]
        elif self.config.mode == "table":
            token_id = self.config.table.get(last, last)
        else:
            token_id = token_of_slots(slots, self.config, request.sampling, choice, request.num_output_tokens)
        sampling = request.sampling
        if not sampling.logprobs:
            return SampledToken(token_id)
        return SampledToken(token_id, self._logprob(token_id, sampling.num_top_logprobs, sampling.logprob_token_ids))

    def _logprob(self, token_id: int, num_top: int, chosen: Sequence[int] = ()) -> TokenLogprob:
        """With the ids above it in the place of the most likely ones."""
        top = [(token_id + place) % self.config.vocab_size for place in range(num_top)]
        others = (TokenLogprob(other, scripted_logprob(other), 1) for other in top or chosen)
        return TokenLogprob(token_id, scripted_logprob(token_id), 1, tuple(others))

    def _slot(self, block_table: Sequence[int], position: int) -> memoryview:
        block, offset = divmod(position, self.layout.block_size)
        return self._blocks[block_table[block]][offset * SLOT_BYTES : (offset + 1) * SLOT_BYTES]

    def _slots(self, block_table: Sequence[int], num_tokens: int) -> bytes:
        """The first `num_tokens` slots of a sequence, read through its block table."""
        count = self.layout.num_blocks_for(num_tokens)
        return b"".join(self._blocks[block] for block in block_table[:count])[: num_tokens * SLOT_BYTES]
