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

Tools, calls of them and arguments of the template are marked text by text, keys of their JSON included. Templates
write them as JSON, which leaves marks and control texts as they are; where one escapes them, the chat is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvferry.errors import InvalidArgument
from router.text.chat_template import FIELD, NO_ARGUMENTS, ChatMessage, ChatTemplate, JsonObject, Tool, ToolCall

# Unicode noncharacters: never assigned, not meant for interchange, in no vocabulary.
OPEN, CLOSE, GUARD = "\ufdd0", "\ufdd1", "\ufdd2"


_ESCAPED_MARK = re.compile(r"\\+u\{?fdd[012]", re.IGNORECASE)
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

    def mark(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), arguments: JsonObject = NO_ARGUMENTS
    ) -> tuple[list[ChatMessage], list[Tool], JsonObject] | None:
        """The same with every control text of the caller between marks; None where there is none to mark.

        Raises InvalidArgument for control text in a role, and for control text beside the marks' own characters.
        """
        for index, message in enumerate(messages):
            if self._suspects(message.role) and self._spans(message.role):
                raise InvalidArgument(FIELD, f"messages[{index}].role holds the text of a control token")
        if not any(self._suspects(text) and self._spans(text) for _, text in _texts(messages, tools, arguments)):
            return None
        for place, text in _texts(messages, tools, arguments):
            if any(mark in text for mark in (OPEN, CLOSE, GUARD)):
                raise InvalidArgument(FIELD, f"{place} holds a noncharacter (U+FDD0 to U+FDD2) beside control text")
        marked = {name: _mapped(value, self._mark) for name, value in arguments.items()}  # names are the template's own
        return [_marked_message(m, self._mark) for m in messages], [_marked_tool(t, self._mark) for t in tools], marked

    def encode_marked(self, rendered: str) -> list[int]:
        """Ids of a chat rendered from marked messages."""
        if _ESCAPED_MARK.search(rendered):
            raise InvalidArgument(
                FIELD, "a tool, a call or an argument of the template holds control text that the chat template escapes"
            )
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

    def _mark(self, text: str) -> str:
        parts, done = [], 0
        for span in self._spans(text) if self._suspects(text) else ():
            parts += [text[done : span.start], OPEN, text[span.start : span.end], CLOSE]
            done = span.end
        return "".join([*parts, text[done:]])

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


def _texts(messages: Sequence[ChatMessage], tools: Sequence[Tool], arguments: JsonObject) -> Iterator[tuple[str, str]]:
    """Every text of the caller that a template may write, but roles, and where it is."""
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        yield f"{place}.content", message.content
        yield f"{place}.tool_call_id", message.tool_call_id
        yield f"{place}.name", message.name
        for number, call in enumerate(message.tool_calls):
            for text in (call.id, call.name, *_strings(call.arguments)):
                yield f"{place}.tool_calls[{number}]", text
    for index, tool in enumerate(tools):
        for text in (tool.name, tool.description or "", *_strings(tool.parameters)):
            yield f"tools[{index}]", text
    for name, value in arguments.items():
        for text in _strings(value):
            yield f"template_arguments.{name}", text


def _strings(value: object) -> Iterator[str]:
    """All of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON value with all its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list) else value


def _marked_message(message: ChatMessage, mark: Callable[[str], str]) -> ChatMessage:
    calls = (ToolCall(mark(c.id), mark(c.name), _mapped(c.arguments, mark)) for c in message.tool_calls)
    return replace(
        message,
        content=mark(message.content),
        tool_calls=tuple(calls),
        tool_call_id=mark(message.tool_call_id),
        name=mark(message.name),
    )


def _marked_tool(tool: Tool, mark: Callable[[str], str]) -> Tool:
    description = None if tool.description is None else mark(tool.description)
    return Tool(mark(tool.name), description, _mapped(tool.parameters, mark))


def _unknown_token(tokenizer: Tokenizer) -> str | None:
    """The token that stands for text outside the vocabulary: any text may give it."""
    match json.loads(tokenizer.to_str())["model"]:
        case {"unk_token": str(text)}:
            return text
        case {"unk_id": int(index), "vocab": [*entries]}:
            return str(entries[index][0])
    return None
