"""The routers: real `RequestLifecycle`s in a shell like `router/lifecycle_run.py`, and what the client sees of it all.

A request has one lifecycle, or after a split one for each choice that is not over. What workers send becomes an event a
little later, so events of an attempt may arrive after it was given up. When its router crashes, the client goes on at
another one with the tokens that reached it, as `kvferry.AsyncClient` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import Cancelled, FailedPrecondition, KvferryError, NotFound, Unavailable
from kvferry.sampling import Finish, FinishKind
from kvferry.spec import AttemptId, SequenceSpec
from router.events import (
    Abort,
    Action,
    BeamsFound,
    CancelDecode,
    CancelPrefill,
    ChooseWorkers,
    ClientGone,
    Committed,
    DecodeEnded,
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
    SplitChoice,
    SplitChoices,
    StopFound,
    TimeLimit,
    Tokens,
    WorkersChosen,
)
from router.lifecycle import DEFAULT_MAX_ATTEMPTS, RequestLifecycle
from tests.simulation.messages import DecodeStart, DecodeStop, PrefillStart
from tests.simulation.network import PROGRESS_TIMEOUT_NS, End, Life, Network
from tests.simulation.workload import MIN_MOVED_TOKENS, Interruption, RequestPlan
from tests.simulation.world import MS, InvariantViolation

PATIENCE_NS = 2_000 * MS
"""How long an attempt waits for a pair of workers; every crashed worker is back long before."""

RETRY_NS = 10 * MS

NewLifecycle = Callable[..., RequestLifecycle]


class Parts(Protocol):
    """What of a router tests replace to plant bugs."""

    @property
    def new_lifecycle(self) -> NewLifecycle: ...

    @property
    def new_lifecycle_run(self) -> type[LifecycleRun]: ...


class Membership:
    """Which workers a router believes to be there: right, but late."""

    def __init__(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
        self.prefill = prefill
        self.decode = decode
        self._down: set[str] = set()

    def set_up(self, name: str, *, is_up: bool) -> None:
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


class Router:
    """One router: its present life and what it believes of the workers. It keeps nothing of a request."""

    def __init__(self, life: Life, membership: Membership) -> None:
        self.life = life
        self.membership = membership
        self.runs: list[RequestRun] = []  # of all its lives, over or not

    def crash(self) -> None:
        """Its streams break; clients learn of it."""
        self.life.crash(is_noticed=True)
        for run in self.runs:
            run.on_router_lost(self)


class WorkerCall:
    """One call of an attempt: messages become events; an end before the finish is told as a failure."""

    def __init__(self, run: LifecycleRun, attempt: int, failed: Callable[[int, KvferryError], Event]) -> None:
        self.end: End | None = None
        self._run = run
        self._attempt = attempt
        self._failed = failed
        self._has_finish = False  # of one choice, or of prefill
        self._is_stopped = False

    def on_message(self, message: object) -> None:
        assert isinstance(message, Registered | FirstToken | PrefillDone | Committed | Tokens | BeamsFound)
        is_end = isinstance(message, Tokens) and message.finish is not None
        if is_end or isinstance(message, PrefillDone | BeamsFound):
            self._has_finish = True
        self._run.post(message)

    def on_end(self, error: KvferryError | None) -> None:
        self._run.forget(self)
        if error is not None or not (self._has_finish or self._is_stopped):
            self._run.post(self._failed(self._attempt, error or Unavailable("ended before its finish")))
        elif self._failed is DecodeFailed:
            self._run.post(DecodeEnded(self._attempt))

    def stop(self, action: SendStop) -> None:
        """Asks decode to end a choice."""
        assert self.end is not None
        self._is_stopped = True
        self.end.send(DecodeStop(action.num_wanted_tokens, action.choice))

    def cancel(self) -> None:
        """Ends the call; no event follows."""
        assert self.end is not None
        self.end.close(Cancelled("the router cancelled"), is_abrupt=True)
        self._run.forget(self)


class RequestRun:
    """One request from its arrival to its end, and everything its client got.

    Attributes:
        received: output tokens the client got, by choice.
        finishes: how choices ended.
        logprobs: log-probabilities that came with them.
        error: how the request ended, if not well.
        ended_at_ns: when.
    """

    def __init__(
        self,
        plan: RequestPlan,
        routers: tuple[Router, ...],
        network: Network,
        outages: Outages,
        parts: Parts,
    ) -> None:
        self.plan = plan
        self.network = network
        self.outages = outages
        self.new_lifecycle = parts.new_lifecycle
        self.new_lifecycle_run = parts.new_lifecycle_run
        self._routers = routers
        self._router: Router | None = None  # that serves it now
        self._num_routers_lost = 0
        self._num_fresh: list[int] = [0 for _ in plan.choices]  # tokens of the last emission, which may be lost
        self.attempts = itertools.count(1)
        self.started_at_ns: dict[int, int] = {}  # by attempt
        self.received: list[list[int]] = [[] for _ in plan.choices]
        self.finishes: dict[int, Finish] = {}
        self.logprobs: dict[int, float] = {}
        self.error: KvferryError | None = None
        self.ended_at_ns = 0
        self.is_interrupted = False
        self._world = network.world
        self._parts: list[LifecycleRun] = []
        self._clear_at_ns = 0
        self._stops_told: set[int] = set()

    @property
    def has_ended(self) -> bool:
        return self.error is not None or len(self.finishes) == len(self.plan.choices)

    @property
    def num_open_calls(self) -> int:
        return sum(part.num_open_calls for part in self._parts)

    @property
    def num_attempts(self) -> int:
        return len(self.started_at_ns)

    @property
    def router(self) -> Router | None:
        """The one that serves it; None while the client looks for one."""
        return self._router

    @property
    def served_by(self) -> Router:
        assert self._router is not None, "a lifecycle runs on a router"
        return self._router

    @property
    def router_made_id(self) -> str:
        """Every router makes its own."""
        return f"{self.plan.request_id}.{self._num_routers_lost}" if self._num_routers_lost else self.plan.request_id

    def start(self) -> None:
        """The client asks some router that is there; again a little later where none is."""
        if self.error is not None:
            return
        there = [router for router in self._routers if router.life.is_alive]
        if not there:
            self._world.after(RETRY_NS, self.start)
            return
        self._router = there[self._world.below(len(there))]
        self._router.runs.append(self)
        self._router.life.run(self._begin, self._router.life)

    def _begin(self, life: Life) -> None:
        """The router takes the request, or what the client says is left of it."""
        if self._router is None or life is not self._router.life or self._parts:
            return  # that router is gone
        tokens_so_far = {
            choice: tuple(received) for choice, received in enumerate(self.received) if choice not in self.finishes
        }
        if not self.finishes and not any(tokens_so_far.values()):
            self._parts = [self.new_lifecycle_run(self)]
        else:
            self._parts = [self._resumed(choice, tokens) for choice, tokens in tokens_so_far.items()]
        for part in tuple(self._parts):
            part.start()

    def _resumed(self, choice: int, tokens: tuple[int, ...]) -> LifecycleRun:
        lost = Unavailable("the router before is gone")
        return self.new_lifecycle_run(self, SplitChoice(choice, tokens, frozenset(), lost))

    def on_router_lost(self, router: Router) -> None:
        """What went out last may not have reached the client, which learns of it and goes on elsewhere."""
        if router is not self._router:
            return
        self._router, self._parts = None, []
        if self.has_ended:
            return
        self._world.counts["routers lost"] += 1
        self._num_routers_lost += 1
        for choice, received in enumerate(self.received):
            num_lost = self._world.below(self._num_fresh[choice] + 1)
            if num_lost and choice not in self.finishes:
                del received[len(received) - num_lost :]
        self._stops_told.clear()
        self._world.after(self._world.below(PROGRESS_TIMEOUT_NS), self.start)

    def split(self, choices: tuple[SplitChoice, ...], history: list[int]) -> None:
        """Each of these goes on by itself."""
        self._world.counts["splits"] += 1
        parts = [self.new_lifecycle_run(self, choice, history) for choice in choices]
        self._parts += parts
        for part in parts:
            part.start()

    def interrupt(self) -> None:
        """The client cancels, or somebody cuts the request short."""
        if self.has_ended:
            return
        self.is_interrupted = True
        if not self._parts:  # it looks for a router
            self.fail(Cancelled("the client left"))
            return
        match self.plan.interruption:
            case Interruption.CLIENT_GONE:
                self._tell_all(ClientGone(Cancelled("the client left")))
            case Interruption.ABORT:
                self._tell_all(Abort())
            case Interruption.TIME_LIMIT:
                self._tell_all(TimeLimit())

    def when_clear(self, call: Callable[[Event], None], event: Event) -> None:
        """Has an event from a worker handled a little later, in the order of arrival."""
        self._clear_at_ns = max(self._world.now_ns + int(500_000 * self._world.random() ** 4), self._clear_at_ns)
        self._world.at(self._clear_at_ns, self.served_by.life.run, call, event)

    def _tell_all(self, event: Event) -> None:
        for part in tuple(self._parts):
            part.handle(event)

    # -- the client --------------------------------------------------------------------------------------------------

    def emit(self, action: Emit) -> None:
        """Tokens go out: they must be the next ones of their choice, and right."""
        name, received = f"{self.plan.request_id}, choice {action.choice}", self.received[action.choice]
        if self.error is not None or action.choice in self.finishes:
            raise InvariantViolation(f"{name}: tokens after the end")
        if action.token_index != len(received):
            raise InvariantViolation(f"{name}: token {action.token_index} after {len(received)}")
        received.extend(action.token_ids)
        self._num_fresh[action.choice] = len(action.token_ids)
        due = self.plan.choices[action.choice].expected[: len(received)]
        if tuple(received) != due:
            raise InvariantViolation(f"{name}: emitted {received}, right are {list(due)}")
        self._world.counts["tokens"] += len(action.token_ids)
        self.look_for_stop(action.choice)

    def finish(self, choice: int, finish: Finish, cumulative_logprob: float | None) -> None:
        """A choice ends."""
        if self.error is not None or choice in self.finishes:
            raise InvariantViolation(f"{self.plan.request_id}, choice {choice}, ended twice: then {finish}")
        if self._has_stop(choice):
            finish = self._stop_finish()  # the text wins over the worker's word for the same or a later token
            del self.received[choice][self.plan.choices[choice].stop_after :]
        self.finishes[choice] = finish
        if cumulative_logprob is not None:
            self.logprobs[choice] = cumulative_logprob
        self.ended_at_ns = self._world.now_ns

    def fail(self, error: KvferryError) -> None:
        """The request ends, all its choices with it."""
        if self.error is not None:
            return  # the others of its lifecycles end with the same
        if self.has_ended:
            raise InvariantViolation(f"{self.plan.request_id} ended twice: then {error}")
        self.error = error
        self.ended_at_ns = self._world.now_ns
        self._tell_all(ClientGone(error))

    def look_for_stop(self, choice: int) -> None:
        """The text plane finds the stop string at once, or somewhat later."""
        if not self._has_stop(choice) or choice in self._stops_told:
            return
        self._stops_told.add(choice)
        delay_ns = 0 if self._world.happens(0.5) else self._world.below(3 * MS)
        self.served_by.life.after(delay_ns, self._tell_stop, choice)

    def _has_stop(self, choice: int) -> bool:
        stop_after = self.plan.choices[choice].stop_after
        return stop_after is not None and len(self.received[choice]) >= stop_after

    def _tell_stop(self, choice: int) -> None:
        stop_after = self.plan.choices[choice].stop_after
        assert stop_after is not None
        serving = [part for part in self._parts if part.serves(choice)]
        if serving:
            serving[0].handle(StopFound(stop_after, self._stop_finish(), choice))

    def _stop_finish(self) -> Finish:
        return Finish(FinishKind.STOP_STRING, stop_string="stop")


class LifecycleRun:
    """One lifecycle with all its calls.

    Args:
        run: the request.
        resumes: the choice to go on with, of a split.
        history: attempts before the split.
    """

    def __init__(self, run: RequestRun, resumes: SplitChoice | None = None, history: list[int] | None = None) -> None:
        self._run = run
        self._plan = run.plan
        self._life = run.served_by.life
        self._world = self._life.world
        self._network = run.network
        self._membership = run.served_by.membership
        self._request_id = run.router_made_id
        self._resumes = resumes
        self._history = list(history or ())  # all attempts that served its choices
        self._num_before = len(self._history)
        self._lifecycle = run.new_lifecycle(
            run.plan.prompt,
            run.plan.sampling.max_tokens,
            num_choices=len(run.plan.choices),
            is_beam_search=run.plan.beam is not None,
            resumes=resumes,
            attempts=run.attempts,
            local_prefill=not self._membership.prefill,
            min_moved_tokens=MIN_MOVED_TOKENS,
        )
        self._calls: dict[WorkerCall, None] = {}
        self._prefill: dict[int, WorkerCall] = {}  # by attempt
        self._decode: dict[int, WorkerCall] = {}

    def start(self) -> None:
        """Begins; a choice whose end did not reach the client ends at once."""
        if self._lifecycle.ended:
            return
        if self._resumes is not None:
            choice, token_ids = self._resumes.choice, self._resumes.token_ids
            finish = self._plan.sampling.finish_after(token_ids[-1], len(token_ids)) if token_ids else None
            if finish is not None:
                self._run.finish(choice, finish, None)
                return
        self._perform(self._lifecycle.start())
        for choice in self._lifecycle.choices:
            if not self._lifecycle.ended:
                self._run.look_for_stop(choice)

    def post(self, event: Event) -> None:
        """Takes an event from a call."""
        self._run.when_clear(self.handle, event)

    def handle(self, event: Event) -> None:
        self._world.note(self._plan.request_id, "event", event)
        self._perform(self._lifecycle.handle(event))

    def forget(self, call: WorkerCall) -> None:
        """The call has ended."""
        self._calls.pop(call, None)

    @property
    def num_open_calls(self) -> int:
        return len(self._calls)

    def serves(self, choice: int) -> bool:
        """Whether the choice, unless it is over, is this lifecycle's."""
        return not self._lifecycle.ended and choice in self._lifecycle.choices

    # -- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._world.note(self._plan.request_id, "action", action)
            self._perform_one(action)

    def _perform_one(self, action: Action) -> None:
        match action:
            case Emit():
                self._run.emit(action)
            case ChooseWorkers():
                self._begin_attempt(action)
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
            case SendStop(attempt=attempt):
                self._decode[attempt].stop(action)
            case Finished(finish=finish, choice=choice, cumulative_logprob=logprob):
                self._run.finish(choice, finish, logprob)
            case SplitChoices(choices=choices):
                self._check_fault(self._history[-1])
                self._run.split(choices, self._history)
            case Failed(error=error):
                if self._run.error is None:
                    self._check_failure(error)
                self._run.fail(error)

    def _begin_attempt(self, action: ChooseWorkers) -> None:
        if self._history:
            self._check_fault(self._history[-1])
        self._history.append(action.attempt)
        self._run.started_at_ns[action.attempt] = self._world.now_ns
        self._choose(action, self._world.now_ns + PATIENCE_NS)

    def _spec(self, attempt: int, token_ids: tuple[int, ...]) -> SequenceSpec:
        plan, choices = self._plan, self._lifecycle.choices
        return SequenceSpec(
            AttemptId(self._request_id, attempt),
            token_ids,
            self._num_prompt_tokens(token_ids),
            plan.sampling,
            tier_rank=plan.tier_rank,
            cache_salt=plan.cache_salt,
            choice=choices[0],
            num_choices=len(choices) if plan.beam is None else 1,
            beam=plan.beam,
        )

    def _num_prompt_tokens(self, token_ids: tuple[int, ...]) -> int:
        """Where the output begins, in a resume too."""
        return len(self._plan.prompt)

    def _open(
        self, worker: str, method: str, attempt: int, message: object, failed: Callable[[int, KvferryError], Event]
    ) -> WorkerCall:
        call = WorkerCall(self, attempt, failed)
        call.end = self._network.connect(self._life, worker, method, call, self._seq_id(attempt))
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
            if action.source is not None and chosen.decode != action.source.worker:
                chosen = WorkersChosen(action.source.worker, chosen.decode)
            self._life.after(self._world.below(200_000), self._handle_if_attempt, action.attempt, chosen)
        elif self._world.now_ns > until_ns:
            self.handle(NoWorkers(Unavailable("no pair of workers")))
        else:
            self._world.counts["waits for workers"] += 1
            self._life.after(RETRY_NS, self._choose, action, until_ns)

    def _one_of(self, names: list[str]) -> str | None:
        return names[self._world.below(len(names))] or None

    def _handle_if_attempt(self, attempt: int, event: Event) -> None:
        if self._lifecycle.attempt == attempt:
            self.handle(event)

    # -- what may fail -----------------------------------------------------------------------------------------------

    def _seq_id(self, attempt: int) -> str:
        return AttemptId(self._request_id, attempt).seq_id

    def _check_fault(self, attempt: int) -> None:
        """An attempt that failed was touched by a fault."""
        if self._seq_id(attempt) not in self._network.faulted:
            raise InvariantViolation(f"attempt {self._seq_id(attempt)} failed though no fault had touched it")

    def _check_failure(self, error: KvferryError) -> None:
        """A request fails because its client left, or after as many failures in a row as are allowed, all by faults."""
        name = self._plan.request_id
        if self._run.is_interrupted and self._plan.interruption is Interruption.CLIENT_GONE:
            return
        if isinstance(error, Cancelled | FailedPrecondition | NotFound):
            raise InvariantViolation(f"{name} failed with an error that misleads its client: {error!r}")
        for attempt in self._history[-DEFAULT_MAX_ATTEMPTS:]:
            self._check_fault(attempt)
        num_attempts = len(self._history) - self._num_before
        if num_attempts < DEFAULT_MAX_ATTEMPTS:
            raise InvariantViolation(f"{name} failed after {num_attempts} attempts: {error!r}")
        if not any(self._seq_id(attempt) in self._network.unlucky for attempt in self._history):
            before = self._history[-DEFAULT_MAX_ATTEMPTS - 1 :][0]  # whom that one blamed, the others avoided
            self._check_no_healthy_pair(self._run.started_at_ns[before], error)

    def _check_no_healthy_pair(self, since_ns: int, error: KvferryError) -> None:
        """Workers alone made it fail: then more than one was sick, or no pair was well all the time."""
        prefill, decode = self._membership.prefill, self._membership.decode
        healthy = [name for name in (*prefill, *decode) if self._run.outages.is_well(name, since_ns)]
        num_sick = len(prefill) + len(decode) - len(healthy)
        has_pair = any(name in healthy for name in decode) and (not prefill or any(name in healthy for name in prefill))
        if has_pair and num_sick <= 1:
            raise InvariantViolation(
                f"{self._plan.request_id} failed though {', '.join(healthy)} were well throughout: {error!r}"
            )
