"""Finds stop strings in a growing text without ever showing part of one.

All stop strings are compiled into one automaton (Aho-Corasick): each character of output is looked at once, so the cost
of a token depends on its own length only, and memory on the total length of the stop strings. The automaton's state is
the longest end of the text that may still become a stop string; exactly that much is held back.

Which match counts, when text arrives token by token: the one that completes first; among those that complete in the
same token the one that starts first; among those the one that completes first. So the result does not depend on how
tokens are grouped into messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that completed: its place in the text looked at, in characters."""

    start: int
    end: int
    stop_string: str


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one piece of text led to: text that may be shown now and, at the end of a choice, the match."""

    text: str
    match: StopMatch | None = None


class StopStrings:
    """The stop strings of one request, compiled; shared by its choices and never changed."""

    __slots__ = ("_ends", "_fail", "_hold", "_next")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: not empty strings; their number and lengths are bounded by the caller."""
        assert all(stops), "an empty stop string is refused before"
        self._next: list[dict[str, int]] = [{}]
        self._ends: list[str | None] = [None]  # node → the longest stop string that ends there
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)  # node → node of its longest proper end
        self._hold = [0] * len(self._next)  # node → characters that may still begin a longer match
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, node: int, char: str) -> int:
        """The state after `char`; 0 is the state of an empty text."""
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def ends_at(self, node: int) -> str | None:
        """The longest stop string that ends in this state."""
        return self._ends[node]

    def num_held_chars(self, node: int) -> int:
        """Length of the end of the text that may still become a stop string."""
        return self._hold[node]

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._ends.append(None)
            node = child
        self._ends[node] = stop

    def _link(self) -> None:
        """Breadth first, so that shorter ends are linked before longer ones need them."""
        queue = deque((child, 0, char, 1) for char, child in self._next[0].items())
        while queue:
            node, parent, char, depth = queue.popleft()
            fail = self.step(self._fail[parent], char) if parent else 0
            self._fail[node] = fail
            self._ends[node] = self._ends[node] or self._ends[fail]
            self._hold[node] = depth if self._next[node] else self._hold[fail]
            queue.extend((child, node, next_char, depth + 1) for next_char, child in self._next[node].items())


class StopMatcher:
    """State of the search for one choice."""

    __slots__ = ("_held", "_include", "_node", "_stops")

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        """`include_stop`: the stop string itself stays in the text."""
        self._stops = stops
        self._include = include_stop
        self._node = 0
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> StopScan:
        """Takes the text of one token.

        With `may_match` off, a stop string that completes in this text is ordinary text: it is shown and never matches
        later. After a match the matcher is done.
        """
        if not text:
            return StopScan("")
        buffer = self._held + text
        match = self._scan(buffer, len(self._held))
        if match is not None and may_match:
            self._held = ""
            return StopScan(buffer[: match.end if self._include else match.start], match)
        num_shown = len(buffer) - self._stops.num_held_chars(self._node)
        self._held = buffer[num_shown:]
        return StopScan(buffer[:num_shown])

    def flush(self) -> str:
        """Ends the text: what was held back is ordinary text."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _scan(self, buffer: str, start: int) -> StopMatch | None:
        stops, node = self._stops, self._node
        found: StopMatch | None = None
        for index in range(start, len(buffer)):
            node = stops.step(node, buffer[index])
            stop = stops.ends_at(node)
            if stop is not None and (found is None or index + 1 - len(stop) < found.start):
                found = StopMatch(index + 1 - len(stop), index + 1, stop)
        self._node = node
        return found
