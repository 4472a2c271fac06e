"""Turns a stream of token ids into text, at the same cost for every token.

The bytes of each token (`token_bytes.py`) run through one incremental UTF-8 decoder, so half a character is held back
until it is whole. Joined, the stream is the decode of all its ids at once. Bytes that are not UTF-8 become replacement
marks, one for each maximal broken part, as soon as they cannot become a character any more; bytes still unfinished at
the very end become one mark.

One difference to `tokenizers`, which decodes `<0x..>` tokens run by run and replaces every byte of a run that has a
broken byte anywhere: here the whole characters of such a run stay, since a stream has already shown them.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Self

from router.text.token_bytes import TokenBytes

MOST_BYTES_OF_A_CHARACTER = 4


class Detokenizer:
    """Incremental decoder of one choice. Any sequence of ids is accepted; ids outside the vocabulary add no text."""

    __slots__ = ("_at_start", "_by_id", "_has_foreign_half", "_num_ids", "_skipped", "_start", "_strip_left", "_utf8")

    def __init__(
        self,
        table: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        kept_special_ids: frozenset[int] = frozenset(),
        continues_text: bool = False,
    ) -> None:
        """`continues_text`: the ids go on from a text, so the rule for the beginning (a dropped space) is off.

        `kept_special_ids` add their text though others are skipped.
        """
        self._by_id = table.by_id
        self._num_ids = len(table.by_id)
        self._skipped = table.special_ids - kept_special_ids if skip_special_tokens else frozenset[int]()
        self._start = table.start
        self._at_start = not continues_text and table.start.first_token is not None
        self._strip_left = 0 if continues_text else table.start.strip_count
        self._has_foreign_half = False  # what the decoder holds is the prompt's, not shown and not to be marked
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @classmethod
    def behind(
        cls,
        table: TokenBytes,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept_special_ids: frozenset[int] = frozenset(),
        marks_half: bool = False,
    ) -> Self:
        """The state behind a prompt: what is pushed next is what it adds to the prompt's text.

        Looks at the prompt's beginning, which may be the text's still, and at the end of it, which may be half a
        character. Where the output does not complete it, it is the prompt's affair; with `marks_half` its replacement
        mark stands in the output, since the prompt was shown without it.
        """
        state = cls(table, skip_special_tokens=skip_special_tokens, kept_special_ids=kept_special_ids)
        for token_id in takewhile(lambda _: state._is_at_beginning, token_ids):
            state.push(token_id)
        state._utf8.reset()
        state._utf8.decode(b"".join([*state._last_bytes(token_ids)][::-1]))
        state._has_foreign_half = not marks_half
        return state

    @property
    def _is_at_beginning(self) -> bool:
        return self._at_start or self._strip_left > 0

    def _last_bytes(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Bytes of the last tokens, backwards, as far as an unfinished character may reach."""
        num_bytes = 0
        for token_id in reversed(token_ids):
            data = self._bytes_of(token_id)
            num_bytes += len(data)
            yield data
            if num_bytes >= MOST_BYTES_OF_A_CHARACTER:
                return

    def copy(self) -> Detokenizer:
        """Another one in the same state."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        twin._utf8.setstate(self._utf8.getstate())
        return twin

    def push(self, token_id: int) -> str:
        """Text that is whole once `token_id` is added; often empty."""
        data = self._bytes_of(token_id)
        if not data:
            return ""
        if self._at_start:
            self._at_start = False
            assert self._start.first_token is not None
            data = self._start.first_token.get(token_id, data)
        if self._has_foreign_half:
            self._has_foreign_half = False
            if not self._goes_on_with(data):
                self._utf8.reset()
        text = self._utf8.decode(data)
        return self._strip(text) if self._strip_left and text else text

    def _goes_on_with(self, data: bytes) -> bool:
        """Whether the half character that is held can go on with these bytes."""
        strict = codecs.getincrementaldecoder("utf-8")()
        try:
            strict.decode(self._utf8.getstate()[0] + data[:1])
        except UnicodeDecodeError:
            return False
        return True

    def _bytes_of(self, token_id: int) -> bytes:
        is_shown = 0 <= token_id < self._num_ids and token_id not in self._skipped
        return self._by_id[token_id] if is_shown else b""

    def flush(self) -> str:
        """Ends the stream: one replacement mark if a character was left unfinished, else nothing."""
        if self._has_foreign_half:
            self._utf8.reset()
        text = self._utf8.decode(b"", final=True)
        self._strip_left = 0
        return text

    def _strip(self, text: str) -> str:
        while self._strip_left and text.startswith(self._start.strip_char):
            text = text[len(self._start.strip_char) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


def decode(table: TokenBytes, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """Text of all `token_ids` at once."""
    detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens)
    return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.flush()
