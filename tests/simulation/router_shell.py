"""The router: one real `RequestLifecycle` a request, in a shell like `router/run.py`, and what the client sees of it.

What workers send becomes an event a little later, so events of an attempt may arrive after it was given up.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.errors import Cancelled, FailedPrecondition, KvferryError, NotFound, Unavailable
from kvferry.sampling import Finish, FinishKind
from kvferry.spec import AttemptId, SequenceSpec
from router.events import (
    Abort,
    Action,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Committed,
    DecodeFailed,
    Emit,
    Event,
    Failed,
    Finished,
    FirstToken,
    NoWorkers,
    OpenDecode,
    OpenPrefill,
    PrefillDone,
    PrefillFailed,
    Registered,
    SendStop,
    StopFound,
    TimeLimit,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import DEFAULT_MAX_ATTEMPTS, RequestLifecycle
from tests.simulation.messages import DecodeStart, DecodeStop, PrefillStart
from tests.simulation.network import End, Life, Network
from tests.simulation.workload import Interruption, RequestPlan
from tests.simulation.world import MS, InvariantViolation

PATIENCE_NS = 2_000 * MS
"""How long an attempt waits for a pair of workers; every crashed worker is back long before."""

RETRY_NS = 10 * MS

NewLifecycle = Callable[..., RequestLifecycle]


class Membership:
    """Which workers the router believes to be there: right, but late."""

    def __init__(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
        self.prefill = prefill
        self.decode = decode
        self._down: set[str] = set()

    def set_up(self, name: str, is_up: bool) -> None:
        (self._down.discard if is_up else self._down.add)(name)

    def ready(self, names: tuple[str, ...], excluding: frozenset[str]) -> list[str]:
        """Workers to choose from: not the excluded ones where there are others."""
        up = [name for name in names if name not in self._down]
        return [name for name in up if name not in excluding] or up


class Outages:
    """When which process was not well, as far as the router could know: crashed and not seen back, or frozen."""

    def __init__(self) -> None:
        self._ends_ns: dict[str, int] = {}

    def add(self, name: str, until_ns: int) -> None:
        """The process is sick from now on."""
        self._ends_ns[name] = max(until_ns, self._ends_ns.get(name, 0))

    def is_well(self, name: str, since_ns: int) -> bool:
        """Whether the process was never sick since then."""
        return self._ends_ns.get(name, -1) < since_ns


class WorkerCall:
    """One call of an attempt: messages become events; an end before the finish is told as a failure."""

    def __init__(self, run: RequestRun, attempt: int, failed: Callable[[int, KvferryError], Event]) -> None:
        self.end: End | None = None
        self._run = run
        self._attempt = attempt
        self._failed = failed
        self._is_finished = False

    def on_message(self, message: object) -> None:
        assert isinstance(message, Registered | FirstToken | PrefillDone | Committed | Tokens)
        if isinstance(message, PrefillDone) or (isinstance(message, Tokens) and message.finish is not None):
            self._is_finished = True
        self._run.post(message)

    def on_end(self, error: KvferryError | None) -> None:
        self._run.forget(self)
        if error is not None or not self._is_finished:
            self._run.post(self._failed(self._attempt, error or Unavailable("ended before its finish")))

    def cancel(self) -> None:
        """Ends the call; no event follows."""
        assert self.end is not None
        self.end.close(Cancelled("the router cancelled"), is_abrupt=True)
        self._run.forget(self)


class RequestRun:
    """One request from its arrival to its end, with all its calls and everything its client got.

    Attributes:
        received: output tokens the client got.
        outcome: how it ended; None while it has not.
        ended_at_ns: when.
    """

    def __init__(
        self,
        plan: RequestPlan,
        life: Life,
        network: Network,
        membership: Membership,
        outages: Outages,
        new_lifecycle: NewLifecycle,
    ) -> None:
        self.plan = plan
        self.received: list[int] = []
        self.outcome: Finish | KvferryError | None = None
        self.ended_at_ns = 0
        self.is_interrupted = False
        self._life = life
        self._world = life.world
        self._network = network
        self._membership = membership
        self._outages = outages
        self._started_at_ns: dict[int, int] = {}  # by attempt
        self._local_prefill = not membership.prefill
        self._lifecycle = new_lifecycle(plan.prompt, plan.sampling.max_tokens, local_prefill=self._local_prefill)
        self._calls: dict[WorkerCall, None] = {}
        self._prefill: dict[int, WorkerCall] = {}  # by attempt
        self._decode: dict[int, WorkerCall] = {}
        self._clear_at_ns = 0
        self._is_stop_told = False

    def start(self) -> None:
        """The client asks."""
        self._perform(self._lifecycle.start())

    def interrupt(self) -> None:
        """The client cancels, or somebody cuts the request short."""
        if self.outcome is not None:
            return
        self.is_interrupted = True
        match self.plan.interruption:
            case Interruption.CLIENT_GONE:
                self._handle(ClientGone(Cancelled("the client left")))
            case Interruption.ABORT:
                self._handle(Abort())
            case Interruption.TIME_LIMIT:
                self._handle(TimeLimit())

    def post(self, event: Event) -> None:
        """Takes an event from a call; it is handled a little later, in order."""
        self._clear_at_ns = max(self._world.now_ns + int(500_000 * self._world.random() ** 4), self._clear_at_ns)
        self._world.at(self._clear_at_ns, self._life.run, self._handle, event)

    def forget(self, call: WorkerCall) -> None:
        """The call has ended."""
        self._calls.pop(call, None)

    @property
    def num_open_calls(self) -> int:
        return len(self._calls)

    @property
    def num_attempts(self) -> int:
        return self._lifecycle.attempt

    def seq_id(self, attempt: int) -> str:
        return AttemptId(self.plan.request_id, attempt).seq_id

    # -- the lifecycle -----------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self._world.note(self.plan.request_id, "event", event)
        self._perform(self._lifecycle.handle(event))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._world.note(self.plan.request_id, "action", action)
            self._perform_one(action)

    def _perform_one(self, action: Action) -> None:
        match action:
            case Emit(token_index=token_index, token_ids=token_ids):
                self._emit(token_index, token_ids)
            case ChooseWorkers():
                self._check_fault(action.attempt - 1)
                self._started_at_ns[action.attempt] = self._world.now_ns
                self._choose(action, self._world.now_ns + PATIENCE_NS)
            case OpenDecode():
                start = DecodeStart(self._spec(action.attempt, action.token_ids), action.local_prefill)
                self._decode[action.attempt] = self._open(action.worker, "decode", action.attempt, start, DecodeFailed)
            case OpenPrefill():
                request = PrefillStart(self._spec(action.attempt, action.token_ids), action.target)
                call = self._open(action.worker, "prefill", action.attempt, request, PrefillFailed)
                self._prefill[action.attempt] = call
            case CancelPrefill(attempt=attempt):
                self._prefill[attempt].cancel()
            case CancelDecode(attempt=attempt):
                self._decode[attempt].cancel()
            case SendStop():
                self._send_stop(action)
            case Finished(finish=finish):
                self._end(finish)
            case Failed(error=error):
                self._check_failure(error)
                self._end(error)

    def _send_stop(self, action: SendStop) -> None:
        end = self._decode[action.attempt].end
        assert end is not None
        end.send(DecodeStop(action.num_wanted_tokens))

    def _spec(self, attempt: int, token_ids: tuple[int, ...]) -> SequenceSpec:
        plan = self.plan
        return SequenceSpec(
            AttemptId(plan.request_id, attempt),
            token_ids,
            len(plan.prompt),
            plan.sampling,
            tier_rank=plan.tier_rank,
            cache_salt=plan.cache_salt,
        )

    def _open(
        self, worker: str, method: str, attempt: int, message: object, failed: Callable[[int, KvferryError], Event]
    ) -> WorkerCall:
        call = WorkerCall(self, attempt, failed)
        call.end = self._network.connect(self._life, worker, method, call, self.seq_id(attempt))
        call.end.send(message)
        self._calls[call] = None
        return call

    def _choose(self, action: ChooseWorkers, until_ns: int) -> None:
        """Answers with a pair once there is one."""
        if self._lifecycle.ended or self._lifecycle.attempt != action.attempt:
            return
        prefill = self._membership.ready(self._membership.prefill, action.excluding) if action.needs_prefill else [""]
        decode = self._membership.ready(self._membership.decode, action.excluding) if action.needs_decode else [""]
        if prefill and decode:
            chosen = WorkersChosen(self._one_of(prefill), self._one_of(decode))
            self._life.after(self._world.below(200_000), self._handle_if_attempt, action.attempt, chosen)
        elif self._world.now_ns > until_ns:
            self._handle(NoWorkers(Unavailable("no pair of workers")))
        else:
            self._world.counts["waits for workers"] += 1
            self._life.after(RETRY_NS, self._choose, action, until_ns)

    def _one_of(self, names: list[str]) -> str | None:
        return names[self._world.below(len(names))] or None

    def _handle_if_attempt(self, attempt: int, event: Event) -> None:
        if self._lifecycle.attempt == attempt:
            self._handle(event)

    def _check_fault(self, attempt: int) -> None:
        """An attempt that failed was touched by a fault."""
        if attempt >= 1 and self.seq_id(attempt) not in self._network.faulted:
            raise InvariantViolation(f"attempt {self.seq_id(attempt)} failed though no fault had touched it")

    def _check_failure(self, error: KvferryError) -> None:
        """A request fails because its client left, or after as many failures in a row as are allowed, all by faults."""
        if self.is_interrupted and self.plan.interruption is Interruption.CLIENT_GONE:
            return
        if isinstance(error, Cancelled | FailedPrecondition | NotFound):
            raise InvariantViolation(f"{self.plan.request_id} failed with an error that misleads its client: {error!r}")
        last = self._lifecycle.attempt
        attempts = range(max(1, last - DEFAULT_MAX_ATTEMPTS + 1), last + 1)
        for attempt in attempts:
            self._check_fault(attempt)
        if last < DEFAULT_MAX_ATTEMPTS:
            raise InvariantViolation(f"{self.plan.request_id} failed after {last} attempts: {error!r}")
        if not any(self.seq_id(attempt) in self._network.unlucky for attempt in range(1, last + 1)):
            before = max(1, attempts[0] - 1)  # whom that one blamed, the others avoided
            self._check_no_healthy_pair(self._started_at_ns[before], error)

    def _check_no_healthy_pair(self, since_ns: int, error: KvferryError) -> None:
        """Workers alone made it fail: then more than one was sick, or no pair was well all the time."""
        prefill, decode = self._membership.prefill, self._membership.decode
        healthy = [name for name in (*prefill, *decode) if self._outages.is_well(name, since_ns)]
        num_sick = len(prefill) + len(decode) - len(healthy)
        has_pair = any(name in healthy for name in decode) and (not prefill or any(name in healthy for name in prefill))
        if has_pair and num_sick <= 1:
            raise InvariantViolation(
                f"{self.plan.request_id} failed though {', '.join(healthy)} were well throughout: {error!r}"
            )

    # -- the client --------------------------------------------------------------------------------------------------

    def _emit(self, token_index: int, token_ids: tuple[int, ...]) -> None:
        """Tokens go out: they must be the next ones, and right."""
        if self.outcome is not None:
            raise InvariantViolation(f"{self.plan.request_id}: tokens after the end")
        if token_index != len(self.received):
            raise InvariantViolation(
                f"{self.plan.request_id}: token {token_index} emitted when {len(self.received)} was next"
            )
        self.received.extend(token_ids)
        due = self.plan.expected[: len(self.received)]
        if tuple(self.received) != due:
            raise InvariantViolation(f"{self.plan.request_id}: emitted {self.received}, right are {list(due)}")
        self._world.counts["tokens"] += len(token_ids)
        self._look_for_stop()

    def _look_for_stop(self) -> None:
        """The text plane finds the stop string at once, or somewhat later."""
        if not self._has_stop or self._is_stop_told:
            return
        self._is_stop_told = True
        delay_ns = 0 if self._world.happens(0.5) else self._world.below(3 * MS)
        self._life.after(delay_ns, self._tell_stop)

    @property
    def _has_stop(self) -> bool:
        return self.plan.stop_after is not None and len(self.received) >= self.plan.stop_after

    def _tell_stop(self) -> None:
        assert self.plan.stop_after is not None
        if self.outcome is None:
            self._handle(StopFound(self.plan.stop_after, self._stop_finish()))

    def _stop_finish(self) -> Finish:
        return Finish(FinishKind.STOP_STRING, stop_string="stop")

    def _end(self, outcome: Finish | KvferryError) -> None:
        if self.outcome is not None:
            raise InvariantViolation(f"{self.plan.request_id} ended twice: {self.outcome}, then {outcome}")
        if isinstance(outcome, Finish) and self._has_stop:
            outcome = self._stop_finish()  # the text wins over the worker's word for the same or a later token
            del self.received[self.plan.stop_after :]
        self.outcome = outcome
        self.ended_at_ns = self._world.now_ns
