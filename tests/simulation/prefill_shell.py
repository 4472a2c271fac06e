"""A prefill worker: the real `PrefillTask` and engine in a shell that does, with callbacks, what `prefill_svc` does.

A Prefill call owns one attempt. Whatever ends the call first ends the shipment, which reads the blocks, and only then
has the engine free them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core import EngineCore
from engine.outputs import Output
from engine.sequence import Sequence
from engine.specs import sequence_from_spec
from kvferry.errors import DataLoss, KvferryError, Unavailable, WorkerDraining
from kvferry.spec import SequenceSpec
from kvtransfer.messages import Offer
from prefill_svc.task import (
    CancelShipment,
    FailAttempt,
    OpenShipment,
    PrefillTask,
    ReportDone,
    ReportFirstToken,
    ReportPromptComputed,
    ShipFirstTokens,
    ShipRestored,
    ShipTokens,
    TaskAction,
)
from router.events import FirstToken, PrefillDone, ShipTo
from tests.simulation.engine_host import EngineHost, PendingCommand
from tests.simulation.messages import PrefillStart
from tests.simulation.network import PROGRESS_TIMEOUT_NS, End, Life, Network, StreamHandler, refuse
from tests.simulation.oracle import BlockOracle
from tests.simulation.shipment import FrameFaults, Shipment


class PrefillCall:
    """One Prefill call."""

    def __init__(self, worker: PrefillWorker, end: End) -> None:
        self._worker = worker
        self._end = end
        self._spec: SequenceSpec | None = None
        self._target: ShipTo | None = None
        self._sequence: Sequence | None = None
        self._task: PrefillTask | None = None
        self._shipment: Shipment | None = None
        self._adding: PendingCommand | None = None
        self._block_ids: list[int] = []
        self._on_restored: Callable[[], None] | None = None
        self._first_tokens: ShipFirstTokens | None = None
        self._is_over = False

    def on_message(self, message: object) -> None:
        assert isinstance(message, PrefillStart)
        worker, spec, target = self._worker, message.spec, message.target
        refusal = worker.refusal(spec)
        if refusal is not None:
            self._is_over = True
            self._end.blame(refusal.message)
            self._end.close(refusal)
            return
        self._spec, self._target = spec, target
        has_target = target is not None
        sequence = sequence_from_spec(spec, worker.core, arrival=worker.next_arrival(), hold_after_prefill=has_target)
        self._sequence = sequence
        self._task = PrefillTask(
            has_target=has_target, received_ns=worker.life.world.now_ns, num_choices=spec.num_choices
        )
        worker.calls[spec.id.seq_id] = self
        self._adding = worker.engine.submit(lambda core: core.add(sequence), self._on_added)

    def on_end(self, error: KvferryError | None) -> None:
        self._leave()

    def take(self, output: Output) -> None:
        """The engine said something."""
        assert self._task is not None
        self._perform(self._task.on_output(output))

    def _on_added(self, result: object) -> None:
        if isinstance(result, KvferryError) and not self._is_over:
            self._on_failed(result)

    def _on_ship_failed(self, error: KvferryError) -> None:
        assert self._task is not None
        world = self._worker.life.world
        if isinstance(error, Unavailable) and not self._is_over and world.happens(self._worker.reship_probability):
            world.counts["shipped anew"] += 1
            self._open_shipment()
            self._resend()
            return
        self._perform(self._task.on_ship_failed(error))

    def _on_failed(self, error: KvferryError) -> None:
        assert self._task is not None
        self._perform(self._task.on_failed(error))

    def _perform(self, actions: list[TaskAction]) -> None:
        for action in actions:
            if not self._is_over:
                self._perform_one(action)

    def _perform_one(self, action: TaskAction) -> None:
        assert self._spec is not None
        attempt = self._spec.id.attempt
        match action:
            case OpenShipment():
                self._open_shipment()
            case ShipTokens(num_computed_tokens=num_tokens):
                if self._shipment is not None:
                    self._shipment.on_tokens_computed(num_tokens)
            case ShipFirstTokens():
                self._first_tokens = action
                if self._shipment is not None:
                    self._shipment.on_first_tokens(action.token_ids, action.logprobs)
            case ShipRestored():
                self._restored()
            case CancelShipment():
                pass  # the call ends with the next action, and the shipment with it
            case ReportPromptComputed():
                pass  # figures only: a beam search has no first tokens
            case ReportFirstToken():
                first = FirstToken(attempt, action.token_index, action.token_id, action.finish, action.choice)
                self._end.send(first)
            case ReportDone():
                self._worker.life.world.counts["moves with blocks"] += self._worker.is_moving
                self._end.send(PrefillDone(attempt))
                self._leave()
                self._end.close()
            case FailAttempt(error=error):
                self._leave(error)
                self._end.close(error)

    def _open_shipment(self) -> None:
        assert self._target is not None
        assert self._sequence is not None
        worker = self._worker
        self._shipment = Shipment(
            worker.life,
            worker.network,
            self._target.address,
            self._offer(self._target),
            secure=self._secure,
            read=self._read,
            faults=worker.faults,
            on_shipped=lambda summary: self._perform([] if self._task is None else self._task.on_shipped(summary)),
            on_failed=self._on_ship_failed,
        )

    def _resend(self) -> None:
        """Tells a second shipment what the first one knew."""
        assert self._task is not None
        assert self._shipment is not None
        self._shipment.on_tokens_computed(self._task.num_computed_tokens)
        if self._first_tokens is not None:
            self._shipment.on_first_tokens(self._first_tokens.token_ids, self._first_tokens.logprobs)

    def _offer(self, target: ShipTo) -> Offer:
        assert self._spec is not None
        assert self._sequence is not None
        layout, num_tokens = self._worker.core.layout, self._sequence.num_given_tokens
        hashes = self._sequence.block_hashes(num_tokens // layout.block_size, layout.block_size)
        return Offer(self._spec.id, target.epoch, layout, tuple(hashes), num_tokens, PROGRESS_TIMEOUT_NS / 1e9)

    def _secure(self, done: Callable[[], None]) -> None:
        """As `prefill_svc.service.PoolSource.secure`."""
        assert self._sequence is not None
        sequence = self._sequence
        if sequence.hold.secure():
            self._block_ids = sequence.block_table
            done()
            return
        self._worker.life.world.counts["recalls"] += 1
        self._on_restored = done
        self._worker.engine.submit(lambda core: core.recall(sequence))

    def _restored(self) -> None:
        assert self._sequence is not None
        assert self._on_restored is not None, "recalled for a shipment"
        self._block_ids = self._sequence.block_table
        self._on_restored()

    def _read(self, block_index: int, num_tokens: int) -> bytes | memoryview:
        assert self._sequence is not None
        runner = self._worker.core.runner
        block_id = self._block_ids[block_index]
        self._worker.engine.check_holds(self._sequence.seq_id, block_index, block_id)
        if num_tokens < runner.layout.block_size:
            return runner.copy_partial(block_id, num_tokens)
        return runner.block_view(block_id)

    def move(self) -> None:
        """The worker drains and waits no longer."""
        error = WorkerDraining(f"{self._worker.life.name} is draining")
        self._leave(error)
        self._end.close(error)

    def _leave(self, error: KvferryError | None = None) -> None:
        """The call has ended: first nothing is read any more, then the blocks are freed."""
        if self._is_over:
            return
        self._is_over = True
        if self._sequence is None:
            return
        worker, sequence = self._worker, self._sequence
        worker.life.world.counts["ended while parked"] += sequence.hold.is_parked
        del worker.calls[sequence.seq_id]
        if self._adding is not None:
            self._adding.cancel()
        self._end_shipment()
        if isinstance(error, DataLoss):
            worker.engine.submit(lambda core: core.drop_cached_from(sequence, 0))
        worker.engine.submit(lambda core: core.remove(sequence.seq_id))

    def _end_shipment(self) -> None:
        if self._shipment is not None:
            self._shipment.leave()


class PrefillWorker:
    """One life of a prefill worker; with an `engine` of somebody else's, the part of a decode worker that ships what
    that one let go of."""

    def __init__(
        self,
        life: Life,
        core: EngineCore,
        oracle: BlockOracle,
        network: Network,
        faults: FrameFaults,
        engine: EngineHost | None = None,
    ) -> None:
        self.life = life
        self.core = core
        self.network = network
        self.faults = faults
        self.engine = engine or EngineHost(life, core, oracle, before_step=list, deliver=self.deliver)
        self.is_moving = engine is not None
        self.refusal: Callable[[SequenceSpec], KvferryError | None] = lambda spec: None
        self.calls: dict[str, PrefillCall] = {}
        self.new_call: type[PrefillCall] = PrefillCall
        self.is_draining = False
        self.reship_probability = 0.0  # that a lost shipment is tried again: the receiver must bear it
        self._num_arrived = 0

    def move_calls(self) -> None:
        """Past the grace of a drain: what still runs goes on elsewhere."""
        for call in list(self.calls.values()):
            call.move()

    def accept(self, method: str, end: End) -> StreamHandler:
        """A new call."""
        assert method == "prefill"
        return refuse(end, self.life) if self.is_draining else self.new_call(self, end)

    def next_arrival(self) -> int:
        self._num_arrived += 1
        return self._num_arrived

    def leftovers(self) -> list[str]:
        """What should not be there when nothing runs any more."""
        return [f"calls: {list(self.calls)}"] if self.calls else []

    def deliver(self, outputs: list[Output]) -> None:
        """Hands what the engine says to the calls it is for."""
        for output in outputs:
            call = self.calls.get(output.seq_id)
            if call is not None:
                call.take(output)
