"""The simulator finds bugs: each one planted here, in the product's own classes or in the shells, must show.

The numbers of seeds allowed are a few times those it takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from decode_svc.admission import DecodeAdmission, Reservation
from engine.block_manager import BlockManager
from engine.core import EngineCore
from engine.hold import Hold
from engine.outputs import Output, SequenceRestored
from engine.scheduler import ScheduledChunk
from engine.sequence import Sequence
from kvferry.errors import KvferryError
from kvferry.sampling import Finish, TokenLogprob
from kvtransfer import receiver
from prefill_svc.task import PrefillTask
from router.events import (
    Action,
    ChooseWorkers,
    Committed,
    DecodeEnded,
    DecodeFailed,
    Event,
    FirstToken,
    PrefillDone,
    PrefillFailed,
    Registered,
    SplitChoices,
    Tokens,
)
from router.lifecycle import RequestLifecycle
from tests.simulation.cluster import Parts
from tests.simulation.decode_shell import DecodeHost
from tests.simulation.oracle import BLOCK_SIZE
from tests.simulation.prefill_shell import PrefillCall
from tests.simulation.router_shell import LifecycleRun
from tests.simulation.sweep import first_failure


class ForgetsLastToken(RequestLifecycle):
    """A retry begins without the last output token."""

    @property
    def _known_token_ids(self) -> tuple[int, ...]:
        known = super()._known_token_ids
        return known[:-1] if self.num_emitted_tokens else known


class LosesTokenBeforeLast(RequestLifecycle):
    """A retry leaves a token out in the middle."""

    @property
    def _known_token_ids(self) -> tuple[int, ...]:
        known = super()._known_token_ids
        return (*known[:-2], known[-1]) if self.num_emitted_tokens > 1 else known


class TakesOldAttempts(RequestLifecycle):
    """Events of earlier attempts count for the current one."""

    def handle(self, event: Event) -> list[Action]:
        return super().handle(_renumbered(event, self.attempt))


def _renumbered(event: Event, attempt: int) -> Event:
    match event:
        case Registered() | FirstToken() | PrefillDone() | PrefillFailed():
            return dataclasses.replace(event, attempt=attempt)
        case Committed() | Tokens() | DecodeEnded() | DecodeFailed():
            return dataclasses.replace(event, attempt=attempt)
    return event


class IgnoresIndices(RequestLifecycle):
    """Tokens are taken in the order they come."""

    def _accept(
        self,
        choice: int,
        token_index: int,
        token_ids: tuple[int, ...],
        finish: Finish | None,
        logprobs: tuple[TokenLogprob, ...],
    ) -> list[Action]:
        return super()._accept(choice, self._progress[choice].num_tokens, token_ids, finish, logprobs)


class WaitsForEver(RequestLifecycle):
    """A lost decode call is not noticed."""

    def _on_decode_failed(self, error: KvferryError) -> list[Action]:
        return []


class MixesChoices(RequestLifecycle):
    """After a split every choice goes on with the output of the first."""

    def _split(self, cause: KvferryError) -> SplitChoices:
        choices = super()._split(cause).choices
        return SplitChoices(tuple(dataclasses.replace(one, token_ids=choices[0].token_ids) for one in choices))


class RepeatsAsGroup(RequestLifecycle):
    """Choices whose tokens went out are repeated together."""

    def _split(self, cause: KvferryError) -> ChooseWorkers:  # type: ignore[override]
        (choose,) = self._next_attempt(cause)
        assert isinstance(choose, ChooseWorkers)
        return choose


class CountsOutputFromTheResume(LifecycleRun):
    """A resumed request's output so far counts as prompt: what depends on the number of output tokens goes wrong."""

    def _num_prompt_tokens(self, token_ids: tuple[int, ...]) -> int:
        return len(token_ids)


class MistakesTheBoundary(LifecycleRun):
    """A resume counts one token of the prompt as output; only min_tokens and max_tokens can show it."""

    def _num_prompt_tokens(self, token_ids: tuple[int, ...]) -> int:
        num_prompt_tokens = super()._num_prompt_tokens(token_ids)
        return num_prompt_tokens - 1 if len(token_ids) > num_prompt_tokens > 1 else num_prompt_tokens


class TakesLateBlocks(DecodeHost):
    """A shipment of an attempt that has ended still gets its blocks written, and is verified against the old table."""

    def _block(self, block_index: int) -> memoryview:
        assert self._reservation is not None
        return self.worker.core.runner.block_view(self._reservation.block_ids[block_index])

    def _check_open(self) -> None:
        pass


class WritesAfterClose(DecodeHost):
    """Blocks are freed while the receiver still writes."""

    def close(self) -> None:
        pass


class TrustsDigests(DecodeHost):
    """Digests are not verified."""

    def verify(self, block_index: int, digest: bytes) -> bool:
        super().verify(block_index, digest)
        self._digests[block_index] = digest
        return True


class CountsOneBlockTooMany(DecodeHost):
    """A shipment that ends early leaves a block in the cache that never arrived."""

    def _num_arrived_tokens(self, reservation: Reservation | None) -> int:
        num_full = self._num_tokens // BLOCK_SIZE * BLOCK_SIZE
        return min(super()._num_arrived_tokens(reservation) + BLOCK_SIZE, num_full)


class ShipsAfterEnd(PrefillCall):
    """Blocks are freed while the shipment still reads."""

    def _end_shipment(self) -> None:
        pass


class ShipsWhatWasGivenUp(PrefillCall):
    """A parked prompt is shipped as though its blocks were still there."""

    def _secure(self, done: Callable[[], None]) -> None:
        assert self._sequence is not None
        self._block_ids = self._sequence.block_table
        done()


class KeepsOldTable(PrefillCall):
    """A parked prompt that was computed again is shipped from the blocks it had before."""

    def _open_shipment(self) -> None:
        super()._open_shipment()
        assert self._sequence is not None
        self._block_ids = self._sequence.block_table

    def _secure(self, done: Callable[[], None]) -> None:
        block_ids = self._block_ids

        def ship() -> None:
            self._block_ids = block_ids
            done()

        super()._secure(ship)


@pytest.mark.parametrize(
    ("parts", "num_seeds", "message"),
    [
        pytest.param(Parts(new_lifecycle=ForgetsLastToken), 50, "no fault had touched|right are", id="last token lost"),
        pytest.param(
            Parts(new_lifecycle=LosesTokenBeforeLast), 100, "no fault had touched|right are|published", id="token lost"
        ),
        pytest.param(Parts(new_lifecycle=TakesOldAttempts), 150, "no fault had touched|right are", id="old attempts"),
        pytest.param(Parts(new_lifecycle=IgnoresIndices), 100, "right are", id="indices ignored"),
        pytest.param(Parts(new_lifecycle=WaitsForEver), 50, "never ended", id="failure ignored"),
        pytest.param(Parts(new_lifecycle=MixesChoices), 150, "right are|token . after", id="choices mixed"),
        pytest.param(
            Parts(new_lifecycle=RepeatsAsGroup), 150, "right are|token . after|never|published", id="no split"
        ),
        pytest.param(
            Parts(new_lifecycle_run=CountsOutputFromTheResume),
            10,
            "no fault had touched|right are|never",
            id="output counted as prompt",
        ),
        pytest.param(
            Parts(new_lifecycle_run=MistakesTheBoundary),
            10,
            "no fault had touched|right are|never",
            id="wrong boundary",
        ),
        pytest.param(Parts(new_decode_host=TakesLateBlocks), 200, "is published|right are", id="late block accepted"),
        pytest.param(Parts(new_decode_host=WritesAfterClose), 100, "which was freed", id="writes freed blocks"),
        pytest.param(Parts(new_decode_host=TrustsDigests), 100, "is published|right are", id="digest ignored"),
        pytest.param(
            Parts(new_decode_host=CountsOneBlockTooMany), 100, "contents are wrong", id="missing block cached"
        ),
        pytest.param(
            Parts(new_prefill_call=ShipsAfterEnd), 50, "was freed|still holds|IndexError", id="reads freed blocks"
        ),
        pytest.param(Parts(new_prefill_call=ShipsWhatWasGivenUp), 50, "IndexError|was freed", id="ships parked blocks"),
        pytest.param(Parts(new_prefill_call=KeepsOldTable), 50, "was freed", id="ships from an old table"),
    ],
)
def test_planted_part_is_found(parts: Parts, num_seeds: int, message: str) -> None:
    _assert_found(parts, num_seeds, message)


def test_blocks_published_before_they_are_computed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = BlockManager.publish

    def publish_early(self: BlockManager, sequence: Sequence) -> None:
        computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = min(computed + self.block_size, sequence.num_tokens)
        publish(self, sequence)
        sequence.num_computed_tokens = computed

    monkeypatch.setattr(BlockManager, "publish", publish_early)
    _assert_found(Parts(), 10, "contents are wrong")


def test_a_block_that_is_freed_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks that somebody else still holds; of others the pool itself would complain."""
    remove = EngineCore.remove

    def remove_twice(self: EngineCore, seq_id: str) -> list[Sequence]:
        sequence = self.sequences.get(seq_id)
        held = [] if sequence is None else list(sequence.held_blocks)
        removed = remove(self, seq_id)
        self.pool.free([block_id for block_id in held if self.pool.ref_count(block_id)])
        return removed

    monkeypatch.setattr(EngineCore, "remove", remove_twice)
    _assert_found(Parts(), 100, "holders|freed more often|was freed")


def test_a_reservation_that_is_never_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeAdmission, "unregister", lambda self, seq_id: None)
    _assert_found(Parts(), 10, "never ended|still holds|no fault had touched")


def test_a_receiver_that_never_gives_up_a_bad_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver.ShipReceiver, "on_block_written", lambda self, block_index, *, digest_ok: [])
    _assert_found(Parts(), 10, "never ended|still holds|no fault had touched")


def test_a_refusal_that_fails_the_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: NOT_FOUND of a receiver that had lost the attempt reached the client."""
    monkeypatch.setattr(PrefillTask, "on_ship_failed", PrefillTask.on_failed)
    _assert_found(Parts(), 150, "an error that misleads its client")


def test_parking_what_is_being_shipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def park(self: Hold) -> bool:
        return not self.is_parked

    monkeypatch.setattr(Hold, "park", park)
    _assert_found(Parts(), 50, "IndexError|was freed")


def test_shipping_a_parked_prompt_before_it_is_computed_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said to be restored when it has blocks again, in which there is something else yet."""
    process = EngineCore._process

    def process_early(self: EngineCore, chunk: ScheduledChunk, *args: object) -> list[Output]:
        outputs = process(self, chunk, *args)  # type: ignore[arg-type]
        is_recalled = chunk.sequence.hold.is_parked and not any(isinstance(one, SequenceRestored) for one in outputs)
        return [*outputs, SequenceRestored(chunk.sequence.owner_id, 0)] if is_recalled else outputs

    monkeypatch.setattr(EngineCore, "_process", process_early)
    _assert_found(Parts(), 100, "contents are wrong|right are|no fault had touched")


def test_preempted_beams_that_share_too_much_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that are computed again take the first one's blocks beyond where they parted."""

    def share_all(self: BlockManager, first: Sequence, other: Sequence) -> int:
        return (min(first.num_tokens, other.num_tokens) - 1) // self.block_size

    monkeypatch.setattr(BlockManager, "_num_common_blocks", share_all)
    _assert_found(Parts(), 400, "is published|right are")


def _assert_found(parts: Parts, num_seeds: int, message: str) -> None:
    found = first_failure(num_seeds, parts)
    assert found is not None, f"not found in {num_seeds} seeds"
    assert found.violation is not None
    assert found.trace
    assert re.search(message, found.violation), found.violation
