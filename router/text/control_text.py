"""Keeps control markers that a user typed from becoming control tokens.

A user who writes `<|im_end|>` must not end his own turn. Where no content holds the text of a control token (nearly
always) the rendered chat is encoded in one go and this module only looks. Else:

1. The tokenizer itself says where it sees control tokens in a content; each is put between two marks, then the template
   renders. Marks are not white space and wrap whole control texts, so templates that trim, compare or split contents
   work as before; a mark that lost its partner (a template cut the content there) is dropped.
2. What is not marked was written by the template. Again the tokenizer says what of it is control tokens.
3. Each of these is replaced by one guard character, the marks are dropped, and the whole text is encoded in one go by a
   second tokenizer that knows the guard as a token and no control token. So user text merges with its neighbours as any
   text does, and cannot give a control token.
4. The guard tokens become the control tokens again, in order.

Control tokens are the special tokens, except the one for unknown text, and other added tokens that the template's
source writes, except white space.
A role is part of the template's grammar: control text in a role is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tokenizers import AddedToken, Tokenizer

from kvferry.errors import InvalidArgument
from router.text.chat_template import FIELD, ChatMessage, ChatTemplate

# Unicode noncharacters: never assigned, not meant for interchange, in no vocabulary.
OPEN, CLOSE, GUARD = "\ufdd0", "\ufdd1", "\ufdd2"


_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")


@dataclass(frozen=True, slots=True)
class _Span:
    """A control token that the tokenizer sees in a text: its id and the characters it covers."""

    token_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Text with a guard for each control token, and their ids in order."""

    text: str
    control_ids: list[int]


class ControlText:
    """Finds control text in chats and encodes chats that hold it. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        unknown = _unknown_token(tokenizer)
        self._controls = {
            token_id: token.content
            for token_id, token in added.items()
            if (token.special or (token.content.strip() and template.writes(token.content)))
            and token.content != unknown
        }
        # Such tokens are looked for in normalised text, so other text than their own may give them.
        self._may_hide = tokenizer.normalizer is not None and any(added[i].normalized for i in self._controls)
        self._plain = self._without_controls()
        guard_id = self._plain.token_to_id(GUARD)
        assert guard_id is not None
        self._guard_id = guard_id

    def mark(self, messages: Sequence[ChatMessage]) -> list[ChatMessage] | None:
        """The messages with every control text in a content between marks; None where there is none to mark.

        Raises InvalidArgument for control text in a role, and for control text beside the marks' own characters.
        """
        for index, message in enumerate(messages):
            if self._suspects(message.role) and self._spans(message.role):
                raise InvalidArgument(FIELD, f"messages[{index}].role holds the text of a control token")
        spans = [self._spans(message.content) if self._suspects(message.content) else [] for message in messages]
        if not any(spans):
            return None
        for index, message in enumerate(messages):
            if any(mark in message.content for mark in (OPEN, CLOSE, GUARD)):
                raise InvalidArgument(
                    FIELD, f"messages[{index}].content holds a noncharacter (U+FDD0 to U+FDD2) beside control text"
                )
        return [ChatMessage(m.role, _mark(m.content, found)) for m, found in zip(messages, spans, strict=True)]

    def encode_marked(self, rendered: str) -> list[int]:
        """Ids of a chat rendered from marked messages."""
        pieces = _MARKED.split(rendered)  # written, marked, written, marked …; None: a mark without its partner
        written = [self._guard_controls(piece) for piece in pieces[::2]]
        marked = [piece or "" for piece in pieces[1::2]]
        text = "".join(part for pair in zip_longest((w.text for w in written), marked, fillvalue="") for part in pair)
        controls = [token_id for piece in written for token_id in piece.control_ids]
        ids = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._controls.keys().isdisjoint(ids) or ids.count(self._guard_id) != len(controls):
            raise InvalidArgument(FIELD, "a content holds control text that the tokenizer cannot encode as plain text")
        following = iter(controls)
        return [next(following) if token_id == self._guard_id else token_id for token_id in ids]

    def _guard_controls(self, text: str) -> _Guarded:
        spans = self._spans(text)
        parts, done = [], 0
        for span in spans:
            parts += [text[done : span.start], GUARD]
            done = span.end
        return _Guarded("".join([*parts, text[done:]]), [span.token_id for span in spans])

    def _suspects(self, text: str) -> bool:
        return self._may_hide or any(control in text for control in self._controls.values())

    def _spans(self, text: str) -> list[_Span]:
        """Where the tokenizer sees control tokens in `text`."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [_Span(token_id, start, end) for token_id, (start, end) in found if token_id in self._controls]

    def _without_controls(self) -> Tokenizer:
        """The tokenizer without control tokens and with the guard. Takes half a second, so it is made at the start."""
        config = json.loads(self._tokenizer.to_str())
        for token in config["added_tokens"]:
            token["special"] = token["id"] in self._controls
        plain = Tokenizer.from_str(json.dumps(config))
        plain.encode_special_tokens = True  # special tokens are not looked for in the text
        plain.add_tokens([AddedToken(GUARD, normalized=False, special=False)])
        return plain


def _mark(text: str, spans: Sequence[_Span]) -> str:
    parts, done = [], 0
    for span in spans:
        parts += [text[done : span.start], OPEN, text[span.start : span.end], CLOSE]
        done = span.end
    return "".join([*parts, text[done:]])


def _unknown_token(tokenizer: Tokenizer) -> str | None:
    """The token that stands for text outside the vocabulary: any text may give it."""
    match json.loads(tokenizer.to_str())["model"]:
        case {"unk_token": str(text)}:
            return text
        case {"unk_id": int(index), "vocab": [*entries]}:
            return str(entries[index][0])
    return None
