"""Random orders of everything that can happen to one request, against the invariants of the lifecycle.

`World` plays both workers and the caller: each worker's messages come in the order it sent them, but how the two
streams interleave, how tokens of choices are grouped, what is repeated, what fails and when the caller leaves is drawn.
A request of several choices may split; its parts then live side by side, as `router/request_run.py` has them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import Cancelled, DataLoss, FailedPrecondition, KvferryError, Unavailable
from kvferry.sampling import Finish, FinishKind
from router.events import (
    Abort,
    Action,
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
from router.lifecycle import Phase, RequestLifecycle

PROMPT = (1, 2, 3)
MAX_TOKENS = 8

Draw = Callable[[st.SearchStrategy[int]], int]


class Call:
    """One open call: what it will still deliver, in order, and the choices it has to end."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.queue: deque[Event] = deque()
        self.open = True
        self.unfinished: set[int] = set()

    @property
    def is_needed(self) -> bool:
        """Whether it would not end by itself."""
        return self.open and bool(self.unfinished)


class Part:
    """One lifecycle and its calls."""

    def __init__(self, world: World, resumes: SplitChoice | None = None) -> None:
        self.world = world
        self.life = RequestLifecycle(
            PROMPT,
            MAX_TOKENS,
            num_choices=len(world.truths),
            resumes=resumes,
            attempts=world.attempts,
            local_prefill=world.local,
        )
        self.prefills: list[Call] = []
        self.decodes: list[Call] = []
        self.choosing = False

    @property
    def calls(self) -> list[Call]:
        return [*self.prefills, *self.decodes]

    def feed(self, event: Event) -> None:
        self.world.sent.append((self, event))
        self.perform(self.life.handle(event))

    # --- what can happen ---

    def moves(self) -> list[Callable[[], Event]]:
        moves: list[Callable[[], Event]] = [self.choose] * 4 if self.choosing else []
        for call in self.calls:
            if call.open:
                moves += [partial(self.deliver, call)] * 4 if call.queue else []
                moves.append(partial(self.break_call, call))
        return moves

    def choose(self) -> Event:
        if self.world.draw(st.integers(0, 30)) == 0:
            return NoWorkers(Unavailable("nobody is there"))
        return WorkersChosen("p", "d")

    def deliver(self, call: Call) -> Event:
        event = call.queue.popleft()
        if isinstance(event, PrefillDone | DecodeEnded):
            call.open = False
        if isinstance(event, Tokens) and event.finish is not None:
            call.unfinished.discard(event.choice)
        return event

    def break_call(self, call: Call) -> Event:
        call.open = False
        kind = self.world.draw(st.integers(0, 20))
        error = FailedPrecondition("no") if kind == 0 else DataLoss("bad") if kind == 1 else Unavailable("gone")
        make = PrefillFailed if call in self.prefills else DecodeFailed
        return make(call.attempt, error)

    # --- what the lifecycle does ---

    def perform(self, actions: list[Action]) -> None:
        has_ended = False
        for action in actions:
            assert not has_ended, "an action after the end"
            has_ended = isinstance(action, Failed | SplitChoices)
            self.perform_one(action)
        if self.life.phase is Phase.DONE:
            assert all(choice in self.world.finishes for choice in self.life.choices)
        if self.life.phase is Phase.SPLIT:
            assert not any(call.is_needed for call in self.calls)

    def perform_one(self, action: Action) -> None:
        match action:
            case ChooseWorkers():
                assert not any(call.is_needed for call in self.calls), "an attempt's call left open"
                self.choosing = True
            case OpenDecode(attempt, _, token_ids, local_prefill):
                self.check_known(token_ids)
                self.open_decode(attempt, local_prefill)
            case OpenPrefill(attempt, _, token_ids, target):
                self.check_known(token_ids)
                self.open_prefill(attempt, ships=target is not None)
            case CancelPrefill(attempt):
                self.close(self.prefills, attempt)
            case CancelDecode(attempt):
                self.close(self.decodes, attempt)
            case SendStop(attempt, choice=choice):
                self.stop(attempt, choice)
            case Emit() | Finished() | SplitChoices() | Failed():
                self.world.take(action)

    def check_known(self, token_ids: tuple[int, ...]) -> None:
        self.choosing = False
        outputs = {tuple(self.world.outputs[choice]) for choice in self.unfinished}
        assert {token_ids} == {(*PROMPT, *output) for output in outputs}, "one attempt for different outputs"

    @property
    def unfinished(self) -> list[int]:
        return [choice for choice in self.life.choices if choice not in self.world.finishes]

    def open_decode(self, attempt: int, local: bool) -> None:
        call = Call(attempt)
        call.unfinished = set(self.unfinished)
        call.queue.append(Registered(attempt, 5, "d:9"))
        if local:
            starts = {choice: len(self.world.outputs[choice]) for choice in self.unfinished}
            call.queue.extend(self.world.token_messages(attempt, starts))
        self.decodes.append(call)

    def open_prefill(self, attempt: int, *, ships: bool) -> None:
        call, world = Call(attempt), self.world
        call.unfinished = {-1}  # it ends with its last message
        starts: dict[int, int] = {}
        for choice in self.unfinished:
            base, truth = len(world.outputs[choice]), world.truths[choice]
            is_last = base + 1 == len(truth)
            finish = world.finish_of(choice) if is_last else None
            call.queue.append(FirstToken(attempt, base, truth[base], finish, choice))
            if not is_last:
                starts[choice] = base + 1
        call.queue.append(PrefillDone(attempt))
        self.prefills.append(call)
        if ships and starts:
            decode = self.decodes[-1]
            decode.unfinished = set(starts)
            decode.queue.append(Committed(attempt))
            decode.queue.extend(world.token_messages(attempt, starts))

    def stop(self, attempt: int, choice: int) -> None:
        """Decode makes no more of the choice; what it has sent may still come."""
        call = self.decodes[-1]
        assert call.attempt == attempt
        assert call.open and choice in call.unfinished, "a stop for what has ended"
        call.unfinished.discard(choice)
        if self.world.draw(st.booleans()):
            call.queue = deque(
                event for event in call.queue if not (isinstance(event, Tokens) and event.choice == choice)
            )

    def close(self, calls: list[Call], attempt: int) -> None:
        assert calls[-1].attempt == attempt
        assert calls[-1].open, "cancelled a call that had ended"
        calls[-1].open = False


class World:
    """Both workers and the caller of one request whose choices' true outputs are `truths`."""

    def __init__(self, draw: Draw, *, lengths: list[int], local: bool) -> None:
        self.draw = draw
        self.local = local
        self.truths = [tuple(100 * choice + index for index in range(length)) for choice, length in enumerate(lengths)]
        self.attempts = itertools.count(1)
        self.outputs: list[list[int]] = [[] for _ in lengths]
        self.finishes: dict[int, Finish] = {}
        self.error: KvferryError | None = None
        self.sent: list[tuple[Part, Event]] = []
        self.parts = [Part(self)]

    @property
    def ended(self) -> bool:
        return self.error is not None or len(self.finishes) == len(self.truths)

    def finish_of(self, choice: int) -> Finish:
        truth = self.truths[choice]
        eos = Finish(FinishKind.END_OF_SEQUENCE, token_id=truth[-1])
        return Finish(FinishKind.LENGTH) if len(truth) == MAX_TOKENS else eos

    def run(self) -> None:
        self.parts[0].perform(self.parts[0].life.start())
        for _ in range(400 * len(self.truths)):
            if self.ended:
                break
            self.step()
        self.settle()

    def settle(self) -> None:
        """Nothing more goes wrong: the request must end by itself."""
        while not self.ended:
            part = next(part for part in self.parts if not part.life.ended)
            calls = [call for call in part.calls if call.open and call.queue]
            assert calls or part.choosing, "the request waits for nothing that could come"
            part.feed(WorkersChosen("p", "d") if part.choosing else part.deliver(calls[0]))
        for part, event in self.sent:
            assert part.life.handle(event) == [], "an action after the end"
        for part in self.parts:
            for event in (Abort(), TimeLimit(), ClientGone(Cancelled("again"))):
                assert part.life.handle(event) == [], "an action after the end"

    def step(self) -> None:
        moves: list[Callable[[], None]] = [self.repeat, self.disturb]
        for part in self.parts:
            moves += [partial(self.move, part, move) for move in part.moves()]
        moves[self.draw(st.integers(0, len(moves) - 1))]()

    def move(self, part: Part, move: Callable[[], Event]) -> None:
        part.feed(move())

    def repeat(self) -> None:
        """A message that came before comes again: a token message, or anything of an older attempt."""
        again = [
            (part, event)
            for part, event in self.sent
            if isinstance(event, Tokens | FirstToken)
            or getattr(event, "attempt", part.life.attempt) < part.life.attempt
        ]
        if again:
            part, event = again[self.draw(st.integers(0, len(again) - 1))]
            part.feed(event)

    def disturb(self) -> None:
        kind = self.draw(st.integers(0, 60))
        outside: dict[int, Event] = {0: Abort(), 1: TimeLimit(), 2: ClientGone(Cancelled("left"))}
        if kind in outside:
            for part in tuple(self.parts):
                part.feed(outside[kind])
        elif kind < 3 + len(self.truths) and self.outputs[kind - 3]:
            self.find_stop(kind - 3)

    def find_stop(self, choice: int) -> None:
        stop = StopFound(len(self.outputs[choice]), Finish(FinishKind.STOP_STRING, stop_string="x"), choice)
        part = next((part for part in self.parts if not part.life.ended and choice in part.life.choices), None)
        if part is not None:
            part.feed(stop)

    def token_messages(self, attempt: int, starts: dict[int, int]) -> list[Event]:
        """Decode's tokens from these on; choices take turns as drawn."""
        messages: list[Event] = []
        while starts:
            choice = sorted(starts)[self.draw(st.integers(0, len(starts) - 1))]
            start, truth = starts.pop(choice), self.truths[choice]
            end = start + self.draw(st.integers(1, len(truth) - start))
            finish = self.finish_of(choice) if end == len(truth) else None
            messages.append(Tokens(attempt, start, truth[start:end], finish, choice))
            if finish is None:
                starts[choice] = end
        return [*messages, DecodeEnded(attempt)]

    def take(self, action: Action) -> None:
        """What the client gets, or a split."""
        match action:
            case Emit(token_index, token_ids, choice):
                assert choice not in self.finishes, "tokens after the finish"
                assert token_index == len(self.outputs[choice])
                self.outputs[choice].extend(token_ids)
                assert tuple(self.outputs[choice]) == self.truths[choice][: len(self.outputs[choice])]
            case Finished(finish, choice):
                assert choice not in self.finishes, "finished twice"
                self.finishes[choice] = finish
            case SplitChoices(choices):
                assert any(self.outputs), "split though nothing had gone out"
                assert [choice.choice for choice in choices] == [
                    choice for choice in range(len(self.truths)) if choice not in self.finishes
                ]
                parts = [Part(self, choice) for choice in choices]
                self.parts += parts
                for part in parts:
                    part.perform(part.life.start())
            case Failed(error):
                self.error = error
                for part in self.parts:
                    part.feed(ClientGone(error))


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    lengths=st.one_of(
        st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=1),
        st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=4),
    ),
    local=st.booleans(),
)
def test_any_order_keeps_the_invariants(data: st.DataObject, lengths: list[int], local: bool) -> None:
    world = World(data.draw, lengths=lengths, local=local)
    world.run()
    for choice, finish in world.finishes.items():
        if finish.kind in (FinishKind.LENGTH, FinishKind.END_OF_SEQUENCE):
            assert finish == world.finish_of(choice)
            assert tuple(world.outputs[choice]) == world.truths[choice], "a clean end that is no end"
    if world.error is not None:
        failed = [part for part in world.parts if part.life.phase is not Phase.DONE]
        assert not any(call.is_needed for part in failed for call in part.calls)
    numbers = [call.attempt for part in world.parts for call in part.decodes]
    assert len(numbers) == len(set(numbers)), "two attempts with one number"
