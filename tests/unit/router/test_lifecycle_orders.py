"""Random orders of everything that can happen to one request, against the invariants of the lifecycle.

`World` plays both workers and the caller: each worker's messages come in the order it sent them, but how the two
streams interleave, how tokens are grouped, what is repeated, what fails and when the caller leaves is drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import Cancelled, DataLoss, FailedPrecondition, Unavailable
from kvferry.sampling import Finish, FinishKind
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
from router.lifecycle import RequestLifecycle

PROMPT = (1, 2, 3)
MAX_TOKENS = 8


class Call:
    """One open call: what it will still deliver, in order."""

    def __init__(self, attempt: int, base: int) -> None:
        self.attempt = attempt
        self.base = base
        self.queue: deque[Event] = deque()
        self.open = True


class World:
    """Both workers and the caller of one request whose true output is `truth`."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int], *, length: int, local: bool) -> None:
        self.draw = draw
        self.truth = tuple(100 + index for index in range(length))
        eos = Finish(FinishKind.END_OF_SEQUENCE, token_id=self.truth[-1])
        self.finish = Finish(FinishKind.LENGTH) if length == MAX_TOKENS else eos
        self.life = RequestLifecycle(PROMPT, MAX_TOKENS, local_prefill=local)
        self.local = local
        self.output: list[int] = []
        self.ends: list[Action] = []
        self.prefills: list[Call] = []
        self.decodes: list[Call] = []
        self.sent: list[Event] = []
        self.choosing = False

    def run(self) -> None:
        self.perform(self.life.start())
        for _ in range(400):
            if self.life.ended:
                break
            self.step()
        self.settle()

    def settle(self) -> None:
        """Nothing more goes wrong: the request must end by itself."""
        while not self.life.ended:
            calls = [call for call in (*self.prefills, *self.decodes) if call.open and call.queue]
            assert calls or self.choosing, "the request waits for nothing that could come"
            self.feed(WorkersChosen("p", "d") if self.choosing else self.deliver(calls[0]))
        for event in (*self.sent, Abort(), TimeLimit(), ClientGone(Cancelled("again"))):
            assert self.life.handle(event) == [], "an action after the end"

    def step(self) -> None:
        moves: list[Callable[[], Event | None]] = [self.repeat, self.disturb]
        if self.choosing:
            moves += [self.choose] * 4
        for calls in (self.prefills, self.decodes):
            moves += [partial(self.deliver, call) for call in calls if call.open and call.queue] * 4
            moves += [partial(self.break_call, call) for call in calls if call.open]
        event = moves[self.draw(st.integers(0, len(moves) - 1))]()
        if event is not None:
            self.feed(event)

    def feed(self, event: Event) -> None:
        self.sent.append(event)
        self.perform(self.life.handle(event))

    # --- what can happen ---

    def choose(self) -> Event:
        if self.draw(st.integers(0, 30)) == 0:
            return NoWorkers(Unavailable("nobody is there"))
        return WorkersChosen("p", "d")

    def deliver(self, call: Call) -> Event:
        event = call.queue.popleft()
        if isinstance(event, PrefillDone) or (isinstance(event, Tokens) and event.finish is not None):
            call.open = False
        return event

    def break_call(self, call: Call) -> Event:
        call.open = False
        kind = self.draw(st.integers(0, 20))
        error = FailedPrecondition("no") if kind == 0 else DataLoss("bad") if kind == 1 else Unavailable("gone")
        make = PrefillFailed if call in self.prefills else DecodeFailed
        return make(call.attempt, error)

    def repeat(self) -> Event | None:
        """A message that came before comes again: a token message, or anything of an older attempt."""
        again = [
            event
            for event in self.sent
            if isinstance(event, Tokens | FirstToken)
            or getattr(event, "attempt", self.life.attempt) < self.life.attempt
        ]
        return again[self.draw(st.integers(0, len(again) - 1))] if again else None

    def disturb(self) -> Event | None:
        kind = self.draw(st.integers(0, 60))
        wanted = max(1, len(self.output))
        events: dict[int, Event] = {
            0: Abort(),
            1: TimeLimit(),
            2: ClientGone(Cancelled("left")),
            3: StopFound(wanted, Finish(FinishKind.STOP_STRING, stop_string="x")),
        }
        return None if kind == 3 and not self.output else events.get(kind)

    # --- what the lifecycle does ---

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.ends, "an action after the end"
            self.perform_one(action)

    def perform_one(self, action: Action) -> None:
        match action:
            case ChooseWorkers():
                assert not any(call.open for call in (*self.prefills, *self.decodes)), "an attempt's call left open"
                self.choosing = True
            case OpenDecode(attempt, _, token_ids, local_prefill):
                assert token_ids == (*PROMPT, *self.truth[: len(self.output)])
                self.choosing = False
                self.open_decode(attempt, local_prefill)
            case OpenPrefill(attempt, _, token_ids, target):
                assert token_ids == (*PROMPT, *self.truth[: len(self.output)])
                self.choosing = False
                self.open_prefill(attempt, ships=target is not None)
            case CancelPrefill(attempt):
                self.close(self.prefills, attempt)
            case CancelDecode(attempt):
                self.close(self.decodes, attempt)
            case SendStop(attempt):
                self.close(self.decodes, attempt)
            case Emit(token_index, token_ids):
                assert token_index == len(self.output)
                self.output.extend(token_ids)
                assert tuple(self.output) == self.truth[: len(self.output)]
            case Finished() | Failed():
                self.ends.append(action)

    def open_decode(self, attempt: int, local: bool) -> None:
        call = Call(attempt, len(self.output))
        call.queue.append(Registered(attempt, 5, "d:9"))
        if local:
            call.queue.extend(self.token_messages(attempt, call.base))
        self.decodes.append(call)

    def open_prefill(self, attempt: int, *, ships: bool) -> None:
        base = len(self.output)
        call = Call(attempt, base)
        is_last = base + 1 == len(self.truth)
        call.queue.append(FirstToken(attempt, base, self.truth[base], self.finish if is_last else None))
        call.queue.append(PrefillDone(attempt))
        self.prefills.append(call)
        if ships and not is_last:
            decode = self.decodes[-1]
            decode.queue.append(Committed(attempt))
            decode.queue.extend(self.token_messages(attempt, base + 1))

    def token_messages(self, attempt: int, start: int) -> list[Event]:
        messages: list[Event] = []
        while start < len(self.truth):
            end = start + self.draw(st.integers(1, len(self.truth) - start))
            messages.append(
                Tokens(attempt, start, self.truth[start:end], self.finish if end == len(self.truth) else None)
            )
            start = end
        return messages

    def close(self, calls: list[Call], attempt: int) -> None:
        assert calls[-1].attempt == attempt
        assert calls[-1].open, "cancelled a call that had ended"
        calls[-1].open = False


@settings(max_examples=400, deadline=None)
@given(data=st.data(), length=st.integers(1, MAX_TOKENS), local=st.booleans())
def test_any_order_keeps_the_invariants(data: st.DataObject, length: int, local: bool) -> None:
    world = World(data.draw, length=length, local=local)
    world.run()
    assert len(world.ends) == 1
    end = world.ends[0]
    if isinstance(end, Finished) and end.finish.kind in (FinishKind.LENGTH, FinishKind.END_OF_SEQUENCE):
        assert end.finish == world.finish
        assert tuple(world.output) == world.truth, "a clean end that is no end"
    if isinstance(end, Failed):
        assert not any(call.open for call in (*world.prefills, *world.decodes))
