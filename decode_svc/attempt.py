"""One registered attempt on the event loop's side: its mailbox, its grant and its receiving end.

The pool is written by the event loop's thread (frames) and by the engine's thread (steps), never the same block: a
block belongs to an attempt's shipment from the grant until `close`, and `close` happens on the event loop before the
engine is told to free the blocks. So a frame that comes late finds a closed attempt, not somebody else's block.
"""

from __future__ import annotations

import asyncio
from itertools import zip_longest

from opentelemetry import trace

from decode_svc.admission import DecodeAdmission, Reservation
from engine.forward_batch import SampledToken
from engine.loop import EngineLoop
from engine.outputs import Output
from engine.runner import Runner
from kvferry.block_digest import block_digest
from kvferry.errors import FailedPrecondition, Unavailable
from kvferry.spec import AttemptId
from kvferry.stats import ShipCounters
from kvferry.telemetry import Attributes, SpanNames, Telemetry
from kvtransfer.messages import Offer
from kvtransfer.transport import CommitOutcome, Grant


class DecodeAttempt:
    """The host of one attempt's shipment (`kvtransfer.transport.ReceiverHost`), owned by its Decode call.

    Args:
        attempt_id: which attempt.
        num_tokens: tokens whose KV is to arrive.
        engine: the step loop.
        admission: grants; touched on the engine's thread only.
        outputs: the sequence's mailbox.
        counters: of the worker.
        telemetry: spans of grant and commit, below the Ship call's.
    """

    def __init__(
        self,
        attempt_id: AttemptId,
        num_tokens: int,
        engine: EngineLoop,
        admission: DecodeAdmission,
        outputs: asyncio.Queue[Output],
        counters: ShipCounters,
        telemetry: Telemetry,
    ) -> None:
        self.id = attempt_id
        self.outputs = outputs
        self._num_tokens = num_tokens
        self._engine = engine
        self._admission = admission
        self._counters = counters
        self._telemetry = telemetry
        self._runner: Runner = engine.core.runner
        self._reservation: Reservation | None = None
        self._grant_made: asyncio.Future[None] | None = None
        self._digests: dict[int, bytes] = {}  # of verified blocks
        self._is_shipping = False  # a shipment is under way: at most one at a time
        self._is_closed = False

    # -- the receiving end of a shipment ------------------------------------------------------------------------------

    def open_shipment(self, offer: Offer) -> DecodeAttempt:
        """The host for a new shipment; raises FailedPrecondition while another one is under way."""
        self._check_open()
        if self._is_shipping:
            raise FailedPrecondition(f"attempt {offer.id.seq_id} is being shipped already")
        self._is_shipping = True
        return self

    async def grant(self, offer: Offer) -> Grant:
        """Reserves room; waits, holding nothing, while there is none. Raises the errors of `DecodeAdmission.offer`."""
        self._check_open()
        with self._telemetry.span(SpanNames.GRANT) as span:
            self._grant_made = asyncio.get_running_loop().create_future()
            seq_id, hashes, num_tokens = self.id.seq_id, list(offer.block_hashes), offer.num_tokens
            if not await self._engine.run(lambda core: self._admission.offer(seq_id, hashes, num_tokens)):
                return Grant(already_committed=True)
            await self._grant_made
            self._check_open()
            self._reservation = await self._engine.run(lambda core: self._admission.reservation(seq_id))
            self._check_open()
            span.set_attribute(Attributes.NUM_BLOCKS, len(self._reservation.wanted))
            return Grant(self._reservation.wanted)

    def on_grant_made(self) -> None:
        """The engine's word that room is reserved."""
        if self._grant_made is not None and not self._grant_made.done():
            self._grant_made.set_result(None)

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        """Writes a piece of a wanted block into the pool; raises Unavailable once the attempt is closed."""
        self._block(block_index)[offset : offset + len(payload)] = payload

    def verify(self, block_index: int, digest: bytes, num_tokens: int) -> bool:
        """Compares the digest of what was written."""
        is_right = block_digest(self._block(block_index)) == digest
        if is_right:
            self._digests[block_index] = digest
            self._counters.num_blocks += 1
            self._counters.num_bytes += self._runner.layout.block_bytes
        else:
            self._counters.num_nacks += 1
            trace.get_current_span().add_event("digest_mismatch", {Attributes.BLOCK_INDEX: block_index})
        return is_right

    def _block(self, block_index: int) -> memoryview:
        self._check_open()
        assert self._reservation is not None, "frames come after the grant"
        return self._runner.block_view(self._reservation.block_ids[block_index])

    async def commit(self, first_token_ids: tuple[int, ...], first_logprobs: tuple[float, ...]) -> CommitOutcome:
        """Lets the sequence run; raises NotFound when the attempt or its reservation is gone."""
        self._check_open()
        seq_id, num_full_blocks = self.id.seq_id, self._num_tokens // self._runner.layout.block_size
        first = [SampledToken.told(*one) for one in zip_longest(first_token_ids, first_logprobs)]
        digests = {index: digest for index, digest in self._digests.items() if index < num_full_blocks}
        with self._telemetry.span(SpanNames.COMMIT):
            outcome = await self._engine.run(lambda core: self._admission.commit(seq_id, first, digests))
        self._is_shipping = False
        return outcome

    def release(self) -> None:
        """The shipment ended without a commit: gives back what it held. Called once a shipment."""
        reservation, self._reservation = self._reservation, None
        self._is_shipping = False
        if self._is_closed:
            return
        num_arrived_tokens = self._num_arrived_tokens(reservation)
        self._digests.clear()
        seq_id = self.id.seq_id
        self._engine.submit(lambda core: self._admission.withdraw(seq_id, num_arrived_tokens))

    def _num_arrived_tokens(self, reservation: Reservation | None) -> int:
        """Tokens of the leading full blocks that were verified or were here before."""
        block_size = self._runner.layout.block_size
        num_full_blocks = self._num_tokens // block_size
        missing = set(reservation.wanted if reservation else range(num_full_blocks)) - self._digests.keys()
        leading = min((index for index in missing if index < num_full_blocks), default=num_full_blocks)
        return leading * block_size

    # -- the owner --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing is written any more; a grant that waits ends. Must come before the engine frees the blocks."""
        self._is_closed = True
        if self._grant_made is not None and not self._grant_made.done():
            self._grant_made.set_exception(self._gone())
            self._grant_made.exception()  # whoever waited learns of it; nobody need have waited

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._gone()

    def _gone(self) -> Unavailable:
        return Unavailable(f"attempt {self.id.seq_id} has ended on this worker")
