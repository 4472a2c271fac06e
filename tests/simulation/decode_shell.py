"""A decode worker: the real `DecodeAdmission` and engine in a shell that does, with callbacks, what `decode_svc` does.

A Decode call owns one attempt. Whatever ends the call first closes the attempt's receiving host, so that nothing is
written any more, and only then has the engine free the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from decode_svc.admission import DecodeAdmission, Reservation
from engine.core import EngineCore
from engine.forward_batch import SampledToken
from engine.outputs import BeamsFinished, GrantMade, Output, SequenceCommitted, SequenceFailed, TokenSampled
from engine.specs import sequence_from_spec
from kvferry.block_digest import block_digest
from kvferry.errors import FailedPrecondition, KvferryError, NotFound, Unavailable, WorkerDraining
from kvferry.moves import is_worth_moving
from kvferry.spec import SequenceSpec
from kvtransfer.messages import Offer
from kvtransfer.transport import CommitOutcome, Grant
from router.events import BeamsFound, Committed, Hypothesis, Registered, Tokens
from tests.simulation.engine_host import Command, EngineHost, PendingCommand
from tests.simulation.messages import DecodeStart, DecodeStop
from tests.simulation.network import PROGRESS_TIMEOUT_NS, End, Life, Network, StreamHandler, refuse
from tests.simulation.oracle import BlockOracle
from tests.simulation.prefill_shell import PrefillWorker
from tests.simulation.receipt import ShipReceipt
from tests.simulation.shipment import FrameFaults
from tests.simulation.workload import MIN_MOVED_TOKENS


class DecodeHost:
    """The receiving side of one attempt, as `decode_svc.attempt.DecodeAttempt`."""

    def __init__(self, worker: DecodeWorker, spec: SequenceSpec) -> None:
        self.worker = worker
        self.seq_id = spec.id.seq_id
        self.is_closed = False
        self._num_tokens = len(spec.token_ids)
        self._reservation: Reservation | None = None
        self._digests: dict[int, bytes] = {}  # of verified blocks
        self._is_shipping = False
        self._pending: PendingCommand | None = None
        self._on_grant: Callable[[Grant | KvferryError], None] | None = None
        self._is_offered = False
        self._is_granted = False

    def open_shipment(self) -> None:
        self._check_open()
        if self._is_shipping:
            raise FailedPrecondition(f"attempt {self.seq_id} is being shipped already")
        self._is_shipping = True

    def grant(self, offer: Offer, done: Callable[[Grant | KvferryError], None]) -> None:
        """Reserves room; `done` gets the grant once there is some."""
        self._on_grant = done
        self._is_offered = self._is_granted = False
        admission, seq_id, hashes = self.worker.admission, self.seq_id, list(offer.block_hashes)
        self._submit(lambda core: admission.offer(seq_id, hashes, offer.num_tokens), self._on_offered)

    def on_grant_made(self) -> None:
        if self._on_grant is not None:
            self._is_granted = True
            self._look_up_reservation()

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        self._block(block_index)[offset : offset + len(payload)] = payload

    def verify(self, block_index: int, digest: bytes) -> bool:
        is_right = block_digest(self._block(block_index)) == digest
        if is_right:
            self._digests[block_index] = digest
        return is_right

    def commit(
        self,
        first_token_ids: tuple[int, ...],
        first_logprobs: tuple[float, ...],
        done: Callable[[CommitOutcome | KvferryError], None],
    ) -> None:
        self._check_open()
        admission, seq_id = self.worker.admission, self.seq_id
        first = [SampledToken.told(*one) for one in zip_longest(first_token_ids, first_logprobs)]
        num_full_blocks = self._num_tokens // self.worker.core.layout.block_size
        digests = {index: digest for index, digest in self._digests.items() if index < num_full_blocks}

        def on_committed(result: object) -> None:
            assert isinstance(result, CommitOutcome | KvferryError)
            if isinstance(result, CommitOutcome):
                self._is_shipping = False
            done(result)

        self._submit(lambda core: admission.commit(seq_id, first, digests), on_committed)

    def release(self) -> None:
        """The shipment ended without a commit."""
        if self._pending is not None:
            self._pending.cancel()
        self._on_grant = None
        reservation, self._reservation = self._reservation, None
        self._is_shipping = False
        if self.is_closed:
            return
        num_arrived_tokens = self._num_arrived_tokens(reservation)
        self._digests.clear()
        admission, seq_id = self.worker.admission, self.seq_id
        self.worker.life.world.counts["withdrawals"] += 1
        self.worker.engine.submit(lambda core: admission.withdraw(seq_id, num_arrived_tokens))

    def close(self) -> None:
        """Nothing is written any more. Must come before the engine frees the blocks."""
        self.is_closed = True
        if self._on_grant is not None and not self._is_granted:
            self._finish_grant(self._gone())

    def _num_arrived_tokens(self, reservation: Reservation | None) -> int:
        block_size = self.worker.core.layout.block_size
        num_full_blocks = self._num_tokens // block_size
        missing = set(reservation.wanted if reservation else range(num_full_blocks)) - self._digests.keys()
        leading = min((index for index in missing if index < num_full_blocks), default=num_full_blocks)
        return leading * block_size

    def _on_offered(self, result: object) -> None:
        if isinstance(result, KvferryError):
            self._finish_grant(result)
        elif not result:
            self._finish_grant(Grant(already_committed=True))
        else:
            self._is_offered = True
            self._look_up_reservation()

    def _look_up_reservation(self) -> None:
        if not (self._is_offered and self._is_granted):
            return
        if self.is_closed:
            self._finish_grant(self._gone())
            return
        admission, seq_id = self.worker.admission, self.seq_id
        self._submit(lambda core: admission.reservation(seq_id), self._on_reserved)

    def _on_reserved(self, result: object) -> None:
        if isinstance(result, KvferryError):
            self._finish_grant(result)
        elif self.is_closed:
            self._finish_grant(self._gone())
        else:
            assert isinstance(result, Reservation)
            self._reservation = result
            self._finish_grant(Grant(result.wanted))

    def _finish_grant(self, result: Grant | KvferryError) -> None:
        on_grant, self._on_grant = self._on_grant, None
        if on_grant is not None:
            on_grant(result)

    def _submit(self, command: Command, done: Callable[[object], None]) -> None:
        self._pending = self.worker.engine.submit(command, done)

    def _block(self, block_index: int) -> memoryview:
        self._check_open()
        assert self._reservation is not None, "frames come after the grant"
        block_id = self._reservation.block_ids[block_index]
        self.worker.engine.check_holds(self.seq_id, block_index, block_id)
        return self.worker.core.runner.block_view(block_id)

    def _check_open(self) -> None:
        if self.is_closed:
            raise self._gone()

    def _gone(self) -> Unavailable:
        return Unavailable(f"attempt {self.seq_id} has ended on this worker")


class DecodeCall:
    """One Decode call."""

    def __init__(self, worker: DecodeWorker, end: End) -> None:
        self._worker = worker
        self._end = end
        self._spec: SequenceSpec | None = None
        self.host: DecodeHost | None = None
        self._registering: PendingCommand | None = None
        self._mailbox: list[Output] = []
        self._choices: set[int] = set()  # that have not ended
        self._num_told: dict[int, int] = {}  # output tokens by choice
        self._is_over = False

    def on_message(self, message: object) -> None:
        if isinstance(message, DecodeStop):
            self._stop(message.choice)
        else:
            assert isinstance(message, DecodeStart)
            self._start(message)

    def on_end(self, error: KvferryError | None) -> None:
        self._leave()

    def take(self, output: Output) -> None:
        """The engine said something; it is reported now or, with more, a little later."""
        self._mailbox.append(output)
        if len(self._mailbox) == 1:
            world = self._worker.life.world
            self._worker.life.after(0 if world.happens(0.7) else world.below(2_000_000), self._report)

    def _stop(self, choice: int) -> None:
        assert self._spec is not None
        seq_id, admission = self._spec.id.seq_id, self._worker.admission
        self._worker.engine.submit(lambda _: admission.stop_choice(seq_id, choice))
        self._end_choice(choice)

    def _end_choice(self, choice: int) -> None:
        """The call ends with its last choice."""
        self._choices.discard(choice)
        if not self._choices:
            self._finish()

    def _start(self, start: DecodeStart) -> None:
        worker, spec = self._worker, start.spec
        self._choices = set(range(spec.choice, spec.choice + spec.num_choices))
        seq_id = spec.id.seq_id
        if seq_id in worker.calls:
            self._finish(FailedPrecondition(f"attempt {seq_id} is registered already"))
            return
        self._spec = spec
        self.host = worker.new_host(worker, spec)
        worker.calls[seq_id] = worker.mailboxes[seq_id] = self
        sequence = sequence_from_spec(spec, worker.core, arrival=worker.next_arrival())
        if start.local_prefill:
            self._registering = worker.engine.submit(lambda core: core.add(sequence), self._on_registered)
        else:
            admission = worker.admission
            self._registering = worker.engine.submit(lambda core: admission.register(sequence), self._on_registered)

    def _on_registered(self, result: object) -> None:
        if self._is_over:
            return
        if isinstance(result, KvferryError):
            self._finish(result)
            return
        assert self._spec is not None
        life = self._worker.life
        self._end.send(Registered(self._spec.id.attempt, life.epoch, life.name, self._keeps_blocks))

    @property
    def _keeps_blocks(self) -> bool:
        assert self._spec is not None
        return self._worker.core.block_manager.prefix_caching and self._spec.beam is None

    def _report(self) -> None:
        """One message for all tokens of a choice that are there, as `DecodeReporter`."""
        outputs, self._mailbox = self._mailbox, []
        tokens: list[TokenSampled] = []
        for output in outputs:
            if self._is_over:
                return
            if isinstance(output, TokenSampled):
                tokens.append(output)
            else:
                self._report_other(output, tokens)
        if not self._is_over:
            self._send(tokens)

    def _report_other(self, output: Output, tokens: list[TokenSampled]) -> None:
        assert self._spec is not None
        assert self.host is not None
        if isinstance(output, GrantMade):
            self.host.on_grant_made()
        elif isinstance(output, SequenceCommitted):
            self._end.send(Committed(self._spec.id.attempt))
            self._choices &= set(output.choices)
        elif isinstance(output, BeamsFinished):
            found = tuple(Hypothesis(one.token_ids, one.finish, one.cumulative_logprob) for one in output.beams)
            self._end.send(BeamsFound(self._spec.id.attempt, found))
            self._finish()
        elif isinstance(output, SequenceFailed):
            self._send(tokens)
            if not self._is_over:
                self._finish(output.error)

    def _send(self, tokens: list[TokenSampled]) -> None:
        by_choice: dict[int, list[TokenSampled]] = {}
        for token in tokens:
            by_choice.setdefault(token.choice, []).append(token)
        for choice, own in by_choice.items():
            self._send_choice(choice, own)

    def _send_choice(self, choice: int, tokens: list[TokenSampled]) -> None:
        assert self._spec is not None
        token_ids, finish = tuple(token.token_id for token in tokens), tokens[-1].finish
        self._end.send(Tokens(self._spec.id.attempt, tokens[0].token_index, token_ids, finish, choice))
        self._num_told[choice] = tokens[-1].token_index + 1
        if finish is not None:
            self._end_choice(choice)

    def move(self) -> None:
        """The worker drains and waits no longer; what is worth it is kept."""
        if self._spec is not None and self._keeps_blocks:
            for choice in self._choices & self._num_told.keys():
                if is_worth_moving(self._num_told[choice], self._spec.sampling.max_tokens, MIN_MOVED_TOKENS):
                    self._worker.keep(self._spec.id.request_id, choice)
        self._finish(WorkerDraining(f"{self._worker.life.name} is draining"))

    def _finish(self, error: KvferryError | None = None) -> None:
        self._end.close(error)
        self._leave()

    def _leave(self) -> None:
        """The call has ended: first nothing writes any more, then the blocks are freed."""
        if self._is_over:
            return
        self._is_over = True
        if self._spec is None or self.host is None:
            return
        self.host.close()
        if self._registering is not None:
            self._registering.cancel()
        seq_id, admission = self._spec.id.seq_id, self._worker.admission
        del self._worker.mailboxes[seq_id]
        # Until then outputs may be on their way, which another call of this name must not get.
        calls = self._worker.calls
        self._worker.engine.submit(lambda core: admission.unregister(seq_id), lambda _: calls.pop(seq_id))


class DecodeWorker:
    """One life of a decode worker."""

    def __init__(
        self, life: Life, core: EngineCore, oracle: BlockOracle, network: Network, faults: FrameFaults
    ) -> None:
        self.life = life
        self.core = core
        self.admission = DecodeAdmission(core)
        self.engine = EngineHost(life, core, oracle, before_step=self._poll, deliver=self._deliver)
        self.mover = PrefillWorker(life, core, oracle, network, faults, self.engine)
        self.mover.refusal = self._claim
        self._kept: set[tuple[str, int]] = set()
        self.calls: dict[str, DecodeCall] = {}
        self.mailboxes: dict[str, DecodeCall] = {}  # those that still listen to the engine
        self.new_host: type[DecodeHost] = DecodeHost
        self.is_draining = False
        self._num_arrived = 0

    def move_calls(self) -> None:
        """Past the grace of a drain: what still runs goes on elsewhere."""
        for call in list(self.mailboxes.values()):
            call.move()

    def keep(self, request_id: str, choice: int) -> None:
        """As `kvferry.moves.MovedSequences`."""
        self.life.world.counts["kept to be moved"] += 1
        self._kept.add((request_id, choice))
        self.life.after(PROGRESS_TIMEOUT_NS, self._kept.discard, (request_id, choice))

    def _claim(self, spec: SequenceSpec) -> KvferryError | None:
        key = (spec.id.request_id, spec.choice)
        if key not in self._kept:
            return FailedPrecondition(f"{self.life.name} keeps nothing of {key}")
        self._kept.remove(key)
        return None

    def accept(self, method: str, end: End) -> StreamHandler:
        """A new call; shipments for what runs here still come in while it drains, and what it let go of leaves."""
        if method == "prefill":
            return self.mover.new_call(self.mover, end)
        if self.is_draining and method == "decode":
            return refuse(end, self.life)
        return DecodeCall(self, end) if method == "decode" else ShipReceipt(self.life, self.core, end, self.open_host)

    def open_host(self, offer: Offer) -> DecodeHost:
        """The registration an offer belongs to; raises NotFound when there is none."""
        call = self.calls.get(offer.id.seq_id)
        if call is None or call.host is None:
            raise NotFound(f"attempt {offer.id.seq_id} is not registered with worker {self.life.name}")
        call.host.open_shipment()
        return call.host

    def next_arrival(self) -> int:
        self._num_arrived += 1
        return self._num_arrived

    def leftovers(self) -> list[str]:
        """What should not be there when nothing runs any more."""
        found = self.mover.leftovers()
        found += [f"calls: {list(self.calls)}"] if self.calls else []
        if self.admission.num_waiting or self.admission._committed:
            found.append(f"{self.admission.num_waiting} waiting grants, committed {self.admission._committed}")
        return found

    def _poll(self) -> list[Output]:
        outputs = self.admission.poll()
        if self.admission.num_waiting:
            self.life.world.counts["steps with a waiting grant"] += 1
        return outputs

    def _deliver(self, outputs: list[Output]) -> None:
        self.mover.deliver(outputs)
        for output in outputs:
            call = self.mailboxes.get(output.seq_id)
            if call is not None:
                call.take(output)
