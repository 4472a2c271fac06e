"""How far one choice is: the output that the client has, the tokens that wait for one before them, the reported end.

Tokens of a choice come from two streams, so they may be early, doubled or missing; `accept` puts them in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.sampling import Finish, TokenLogprob
from router.events import Emit


class ChoiceProgress:
    """Ordered output of one choice over all attempts.

    Args:
        choice: its number.
        max_tokens: most output tokens.
        token_ids: output that earlier attempts made.

    Attributes:
        is_over: its finish was told to the client.
    """

    def __init__(self, choice: int, max_tokens: int, token_ids: Iterable[int] = ()) -> None:
        self.choice = choice
        self.is_over = False
        self._max_tokens = max_tokens
        self._output = list(token_ids)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets what an earlier attempt reported and the client has not got."""
        self._base_index = len(self._output)  # index of the attempt's first token
        self._early: dict[int, tuple[int, TokenLogprob | None]] = {}  # tokens and log-probabilities by index
        self._finish: Finish | None = None  # reported, perhaps while tokens before it are missing
        self._finish_length = 0  # output tokens there are at that finish

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output that was emitted."""
        return tuple(self._output)

    @property
    def num_tokens(self) -> int:
        return len(self._output)

    @property
    def num_tokens_left(self) -> int:
        return self._max_tokens - len(self._output)

    @property
    def has_advanced(self) -> bool:
        """Whether this attempt gave a token."""
        return len(self._output) > self._base_index

    @property
    def reached_finish(self) -> Finish | None:
        """The reported finish, once every token before it was emitted."""
        return self._finish if not self._early and self._finish_length == len(self._output) else None

    @property
    def is_missing_tokens(self) -> bool:
        """Whether later tokens, or an end that is not reached, were reported."""
        return bool(self._early) or (self._finish is not None and self.reached_finish is None)

    def accept(
        self,
        token_index: int,
        token_ids: tuple[int, ...],
        finish: Finish | None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> list[Emit]:
        """Takes tokens in any order; gives those that are in order now. Doubled ones are dropped, early ones kept."""
        for place, token_id in enumerate(token_ids):
            index = token_index + place
            if len(self._output) <= index < self._max_tokens:
                self._early.setdefault(index, (token_id, logprobs[place] if logprobs else None))
        if finish is not None:
            self._finish, self._finish_length = finish, token_index + len(token_ids)
        return self._take_ordered()

    def _take_ordered(self) -> list[Emit]:
        start, logprobs = len(self._output), []
        while (index := len(self._output)) in self._early:
            token_id, logprob = self._early.pop(index)
            self._output.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        new = tuple(self._output[start:])
        return [Emit(start, new, self.choice, tuple(logprobs))] if new else []
