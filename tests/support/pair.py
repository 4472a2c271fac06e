"""A pair of scripted workers in the test's loop, and what tests of their hand-off do with it."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine.scripted import ScriptConfig, reference_continuation
from kvferry.worker_process import RunningWorker
from kvtransfer.faults import Fault, FaultKind
from tests.support.pair_request import PairRequest
from tests.support.workers import (
    assert_idle,
    core_of,
    make_spec,
    running_pair,
    scripted_config,
    scripted_folder,
    set_faults,
    until,
)

PROMPT_TOKENS = 22
"""Five full blocks of four and a partial one."""
FULL_BLOCKS = PROMPT_TOKENS // 4
OUTPUT_TOKENS = 12


class Prompts:
    """Random prompts, each of its own so that no cache shortens its way; and what has to come out."""

    def __init__(self, script: ScriptConfig, seed: int = 0) -> None:
        self._script = script
        self._rng = random.Random(seed)
        self._numbers = itertools.count()

    def draw(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self._rng.randrange(self._script.vocab_size) for _ in range(num_tokens)]

    def next_id(self) -> str:
        return f"r{next(self._numbers)}"

    def continue_(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What has to come out, stop rules not applied."""
        return reference_continuation(token_ids, num_tokens, self._script)

    def is_right(self, request: PairRequest) -> bool:
        """EQ."""
        spec = request.spec
        num_tokens = spec.sampling.max_tokens - (len(spec.token_ids) - spec.num_prompt_tokens)
        return request.result.token_ids == self.continue_(spec.token_ids, num_tokens)


class Pair:
    """A prefill and a decode worker; `prompts` are for their script."""

    def __init__(self, prefill: RunningWorker, decode: RunningWorker, script: ScriptConfig) -> None:
        self.prefill, self.decode = prefill, decode
        self.prompts = Prompts(script)

    def begin(self, prompt: list[int] | None = None, max_tokens: int = OUTPUT_TOKENS, **spec: Any) -> PairRequest:
        """A request under way; `spec` as for `make_spec`."""
        made = make_spec(
            spec.pop("request_id", self.prompts.next_id()), prompt or self.prompts.draw(), max_tokens, **spec
        )
        return PairRequest(self.prefill.address, self.decode.address, made)

    async def check_serves(self, prompt: list[int] | None = None, **spec: Any) -> PairRequest:
        """LIVE and EQ: a whole request gets the right tokens."""
        request = self.begin(prompt, **spec)
        await request.finished()
        assert self.prompts.is_right(request)
        return request

    def set_faults(self, *faults: Fault) -> None:
        """What goes wrong in every shipment from the next one on."""
        set_faults(self.prefill, *faults)

    def delay_block(self, block_index: int, delay_s: float) -> None:
        self.set_faults(Fault(FaultKind.DELAY, block_index, delay_s=delay_s))

    async def has_computed(self, request: PairRequest, num_tokens: int) -> None:
        """Returns when prefill has computed so many tokens of the prompt."""
        sequences, seq_id = core_of(self.prefill).sequences, request.spec.id.seq_id
        await until(lambda: seq_id in sequences and sequences[seq_id].num_computed_tokens >= num_tokens)

    @property
    def num_arrived_blocks(self) -> int:
        """Blocks that decode received and verified since its start."""
        return self.decode.role.load().num_blocks_shipped

    def num_used_blocks(self, worker: RunningWorker) -> int:
        return worker.role.load().num_used_blocks

    @property
    def num_waiting_grants(self) -> int:
        return self.decode.role.load().num_waiting

    async def check_idle(self) -> None:
        """LEAK, on both sides."""
        await assert_idle(self.prefill, self.decode)


@asynccontextmanager
async def scripted_pair(
    folder: Path,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    prefill_transfer: dict[str, Any] | None = None,
    decode_transfer: dict[str, Any] | None = None,
    **script: Any,
) -> AsyncIterator[Pair]:
    """A pair whose engines are configured by `prefill` and `decode`, and how they ship by `prefill_transfer` and
    `decode_transfer`; a prompt is computed in chunks of one block."""
    scripted_folder(folder, **script)
    prefill_config = scripted_config(folder, **{"max_chunk_tokens": 4, **(prefill or {})})
    prefill_config = prefill_config.replace("transfer", **(prefill_transfer or {}))
    decode_config = scripted_config(folder, **(decode or {})).replace("transfer", **(decode_transfer or {}))
    async with running_pair(prefill_config, decode_config) as (sender, receiver, _):
        yield Pair(sender, receiver, ScriptConfig(**script))
