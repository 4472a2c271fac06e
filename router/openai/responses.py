"""Messages of GenerateResponse → the JSON of completions and of chat, whole or chunk by chunk.

    Form (which of the two) ─► ResponseText (one HTTP call) ─► Choice (one choice)

Choices are numbered through all prompts of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from kvferry.sampling import Finish, FinishKind
from kvferry.wire import finish_from_pb
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2
from router.openai.calls import Calls
from router.openai.tools import Calling

FINISH_REASONS: Mapping[FinishKind, str] = MappingProxyType(
    {
        FinishKind.END_OF_SEQUENCE: "stop",
        FinishKind.STOP_TOKEN: "stop",
        FinishKind.STOP_STRING: "stop",
        FinishKind.LENGTH: "length",
        FinishKind.DEADLINE: "length",
        FinishKind.CANCELLED: "abort",
    }
)
"""In OpenAI's words, and vLLM's for an abort; `stop_reason` says more."""
TIME_LIMIT = "time_limit"


class Logprobs(Protocol):
    """One of `logprobs.py`."""

    def of(self, logprobs: Iterable[types_pb2.TokenLogprob]) -> dict[str, Any]:
        """The next tokens."""


@dataclass(frozen=True, slots=True)
class Form:
    """What tells completions and chat apart.

    Attributes:
        id_prefix: of response ids; the id the router gave the first prompt's request follows.
        whole, chunk: names of the objects.
        is_chat: text goes into messages, and streams open them.
        new_logprobs: makes a choice's; None where none are asked for.
        shows_ids: token ids beside the text (vLLM's `return_token_ids`).
        echoes: of completions, whether log-probabilities begin with the prompt's, as the text does.
        calling: of chats with tools, how calls are read; None where there are none.
    """

    id_prefix: str
    whole: str
    chunk: str
    is_chat: bool
    new_logprobs: Callable[[], Logprobs] | None
    shows_ids: bool
    echoes: bool = False
    calling: Calling | None = None


@dataclass(slots=True)
class Choice:
    """One choice: what came so far that was not told."""

    form: Form
    index: int
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[types_pb2.TokenLogprob] = ()
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    told: list[types_pb2.TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: Logprobs | None = None
    is_open: bool = False
    has_echoed: bool = False  # the prompt's log-probabilities are told
    calls: Calls | None = None

    def __post_init__(self) -> None:
        if self.form.new_logprobs is not None:
            self.logprobs = self.form.new_logprobs()
        if self.form.calling is not None:
            self.calls = Calls(self.form.calling)

    def add(self, delta: pb.ChoiceDelta) -> None:
        """More of it."""
        self.text.append(delta.text if self.calls is None else self.calls.push(delta.text))
        self.token_ids.extend(delta.token_ids)
        self.told.extend(delta.logprobs)

    def end(self, finish: Finish) -> None:
        """No more of it."""
        self.finish = finish
        if self.calls is not None:
            self.text.append(self.calls.finish())

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell: text may be held back until it is known what it is."""
        has_calls = self.calls is not None and self.calls.has_news
        return has_calls or any(self.text) or bool(self.token_ids or self.told) or self.finish is not None

    def take(self, *, is_chunk: bool) -> dict[str, Any]:
        """What there is now, as it is told; it is forgotten."""
        text = "".join(self.text)
        content: dict[str, Any] = {"index": self.index, **self._content(text, is_chunk=is_chunk)}
        content["logprobs"] = None if self.logprobs is None else self._logprobs(is_chunk=is_chunk)
        content["finish_reason"] = None if self.finish is None else self._finish_reason(self.finish)
        content["stop_reason"] = None if self.finish is None else _stop_reason(self.finish)
        if self.form.shows_ids:
            content["token_ids"] = list(self.token_ids)
            if not is_chunk:
                content["prompt_token_ids"] = list(self.prompt_token_ids)
        self.text.clear()
        self.token_ids.clear()
        self.told.clear()
        return content

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat's choice: who speaks."""
        self.is_open = True
        delta = {"role": "assistant", "content": "" if self.calls is None else None}
        ids = {"prompt_token_ids": list(self.prompt_token_ids)} if self.form.shows_ids else {}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None, **ids}

    def _content(self, text: str, *, is_chunk: bool) -> dict[str, Any]:
        if not self.form.is_chat:
            return {"text": text}
        if self.calls is not None:
            return self._content_with_calls(text, self.calls, is_chunk=is_chunk)
        if is_chunk:
            return {"delta": {"content": text} if text or self.token_ids or self.told else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _content_with_calls(self, text: str, calls: Calls, *, is_chunk: bool) -> dict[str, Any]:
        if is_chunk:
            pieces = calls.take_pieces()
            return {"delta": ({"content": text} if text else {}) | ({"tool_calls": pieces} if pieces else {})}
        whole = calls.take_whole()
        content = text or (None if whole else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        return {"message": message | ({"tool_calls": whole} if whole else {})}

    def _finish_reason(self, finish: Finish) -> str:
        """Calls that the client is to make are why a choice ended, unless it was cut."""
        reason = FINISH_REASONS[finish.kind]
        return "tool_calls" if reason == "stop" and self.calls is not None and self.calls.are_whole else reason

    def _logprobs(self, *, is_chunk: bool) -> dict[str, Any] | None:
        assert self.logprobs is not None
        if is_chunk and not self.told:
            return None
        if self.form.echoes and not self.has_echoed:
            self.has_echoed = True
            return self._echoed(self.logprobs)
        return self.logprobs.of(self.told)

    def _echoed(self, logprobs: Logprobs) -> dict[str, Any]:
        """The prompt's and those behind them; the prompt's first token is there and has none."""
        first = types_pb2.TokenLogprob(token_id=self.prompt_token_ids[0])
        told = logprobs.of([first, *self.prompt_logprobs, *self.told])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told


def _stop_reason(finish: Finish) -> str | int | None:
    """vLLM's: the stop string or id that ended it."""
    if finish.kind is FinishKind.DEADLINE:
        return TIME_LIMIT
    return finish.stop_string or (finish.token_id if finish.kind is FinishKind.STOP_TOKEN else None)


class ResponseText:
    """One HTTP call's response, of several requests with `num_choices` choices each."""

    def __init__(self, form: Form, *, num_choices: int) -> None:
        self.form = form
        self._num_choices = num_choices
        self._created_s = int(time.time())
        self._started: dict[int, pb.Started] = {}
        self._usages: list[pb.Usage] = []
        self._choices: dict[int, Choice] = {}
        self._prompt_logprobs: dict[int, list[types_pb2.TokenLogprob]] = {}

    def _choice(self, prompt: int, index: int) -> Choice:
        """That of a prompt's request."""
        number = prompt * self._num_choices + index
        if number not in self._choices:
            scores = self._prompt_logprobs.setdefault(prompt, [])
            self._choices[number] = Choice(self.form, number, self._started[prompt].prompt_token_ids, scores)
        return self._choices[number]

    def take(self, prompt: int, message: pb.GenerateResponse) -> Choice | None:
        """Takes a message of a prompt's request; returns the choice that has something new to tell."""
        match message.WhichOneof("event"):
            case "started":
                self._started[prompt] = message.started
            case "prompt_logprobs":
                self._prompt_logprobs.setdefault(prompt, []).extend(message.prompt_logprobs.logprobs)
            case "delta":
                choice = self._choice(prompt, message.delta.index)
                choice.add(message.delta)
                return choice
            case "finish":
                choice = self._choice(prompt, message.finish.index)
                choice.end(finish_from_pb(message.finish.finish))
                return choice
            case "completed":
                self._usages.append(message.completed.usage)
        return None

    @property
    def num_started(self) -> int:
        """Requests that were accepted."""
        return len(self._started)

    def whole(self) -> dict[str, Any]:
        """Everything at once."""
        choices = [self._choices[number].take(is_chunk=False) for number in sorted(self._choices)]
        return {**self._head(self.form.whole), "choices": choices, "usage": self.usage()}

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """A chunk with these choices."""
        return {**self._head(self.form.chunk), "choices": list(choices)}

    def usage(self) -> dict[str, Any]:
        """Of all prompts together."""
        num_prompt = sum(usage.prompt_tokens for usage in self._usages)
        num_output = sum(usage.completion_tokens for usage in self._usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in self._usages)},
        }

    def _head(self, name: str) -> dict[str, Any]:
        first = self._started[0]
        return {
            "id": self.form.id_prefix + first.server_request_id,
            "object": name,
            "created": self._created_s,
            "model": first.model,
            "service_tier": first.tier,
        }
