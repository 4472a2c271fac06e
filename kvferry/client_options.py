"""What a client asks for, and the messages that say so.

Values that a field cannot hold are refused here, by the name the server would use; limits are the server's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import cache_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant asked for in a message; `arguments` is an object in JSON."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model is told of; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        tool_calls: what the assistant asked for in it.
        tool_call_id: the call that it answers.
        name: of the function that answers, or of the speaker.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""

    def to_pb(self) -> inference_pb2.ChatMessage:
        """The message; raises ValueError or TypeError for a value its field cannot hold."""
        calls = [inference_pb2.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in self.tool_calls]
        return inference_pb2.ChatMessage(
            role=self.role, content=self.content, tool_calls=calls, tool_call_id=self.tool_call_id, name=self.name
        )


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request. None leaves a value to the server's default, which `Started` echoes.

    Attributes:
        tools: functions that a conversation's model is told of; its calls are text of the output.
        template_arguments: JSON, variables of the chat template.
        compact_json: whether constrained JSON has no white space between its parts.
        structural_tag: JSON, as `GenerateRequest.structural_tag`.
        kept_special_token_ids: special tokens that stay in the text, though others are left out.
    """

    prompt: Prompt
    tools: Sequence[Tool] = ()
    template_arguments: str = ""
    model: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    compact_json: bool | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    time_limit_s: float | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    kept_special_token_ids: Sequence[int] = ()
    tier: str = ""
    tenant: str = ""
    adapter: str = ""
    bypass_prefix_cache: bool | None = None
    cache_salt: str = ""
    shared_salt: str = ""
    request_id: str = ""
    session_id: str = ""

    def to_pb(self) -> inference_pb2.GenerateRequest:
        """The message; raises InvalidArgument for a value its field cannot hold."""
        request = inference_pb2.GenerateRequest()
        for name in _LABEL_FIELDS:
            set_field(request, name, getattr(self, name))
        set_prompt(request, self.prompt)
        _set_tools(request, self.tools)
        _set_template_arguments(request, self.template_arguments)
        set_field(request, "truncate_prompt_tokens", self.truncate_prompt_tokens)
        for name in _SAMPLING_FIELDS:
            set_field(request.sampling, f"sampling.{name}", getattr(self, name))
        _update(request.sampling.logit_bias, "sampling.logit_bias", self.logit_bias)
        set_list(request.sampling.allowed_token_ids, "sampling.allowed_token_ids", self.allowed_token_ids)
        set_list(request.sampling.bad_words, "sampling.bad_words", self.bad_words)
        _set_constraint(request, self)
        _set_beam_search(request, self)
        for name in _STOPPING_FIELDS:
            set_field(request.stopping, f"stopping.{name}", getattr(self, name))
        for name in _RESPONSE_FIELDS:
            set_field(request.response, f"response.{name}", getattr(self, name))
        set_list(request.response.logprob_token_ids, "response.logprob_token_ids", self.logprob_token_ids)
        kept = request.response.kept_special_token_ids
        set_list(kept, "response.kept_special_token_ids", self.kept_special_token_ids)
        for name in _CACHE_FIELDS:
            set_field(request.cache, f"cache.{name}", getattr(self, name) or None)
        set_list(request.stopping.stop, "stopping.stop", self.stop)
        set_list(request.stopping.stop_token_ids, "stopping.stop_token_ids", self.stop_token_ids)
        return request


_LABEL_FIELDS = ("model", "tier", "tenant", "adapter", "request_id", "session_id")
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "best_of",
)
_CONSTRAINT_FIELDS = ("json_schema", "json_object", "regex", "grammar", "structural_tag")
_STOPPING_FIELDS = ("max_tokens", "min_tokens", "include_stop_str_in_output", "ignore_eos", "time_limit_s")
_RESPONSE_FIELDS = ("logprobs", "prompt_logprobs", "echo", "skip_special_tokens")
_CACHE_FIELDS = ("bypass_prefix_cache", "cache_salt", "shared_salt")


@dataclass(frozen=True, slots=True)
class PinOptions:
    """A prefix to pin, as a request would begin; `tenant` is for administrators, who may act for others.

    A conversation is pinned up to the end of its last message, without the beginning of an answer; `tools` are those
    that its requests have.
    """

    name: str
    prompt: Prompt
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    shared_salt: str = ""
    tenant: str = ""
    tools: Sequence[Tool] = ()

    def to_pb(self) -> cache_pb2.PinPrefixRequest:
        """The message; raises InvalidArgument for a value its field cannot hold."""
        request = cache_pb2.PinPrefixRequest()
        for name in ("name", "model", "adapter", "tenant"):
            set_field(request, name, getattr(self, name))
        set_prompt(request, self.prompt)
        _set_tools(request, self.tools)
        if request.HasField("chat"):
            request.chat.add_generation_prompt = False
        for name in ("cache_salt", "shared_salt"):
            set_field(request.cache, f"cache.{name}", getattr(self, name) or None)
        return request


def set_prompt(
    request: inference_pb2.GenerateRequest | cache_pb2.PinPrefixRequest | inference_pb2.TokenizeRequest, prompt: Prompt
) -> None:
    """Sets the one of `prompt` that there is; raises InvalidArgument for a value its field cannot hold."""
    if isinstance(prompt, str):
        set_field(request, "prompt.text", prompt)
    elif prompt and isinstance(prompt[0], ChatMessage):
        # made while `set_list` watches: text that is not UTF-8 is found here
        messages = (message.to_pb() for message in prompt if isinstance(message, ChatMessage))
        set_list(request.chat.messages, "prompt.chat", messages)
    elif isinstance(request, inference_pb2.TokenizeRequest):
        raise InvalidArgument("prompt", "must be text or a conversation that is not empty")
    else:
        request.token_ids.SetInParent()
        set_list(request.token_ids.ids, "prompt.token_ids", prompt)


def _set_tools(request: inference_pb2.GenerateRequest | cache_pb2.PinPrefixRequest, tools: Sequence[Tool]) -> None:
    """The server cannot refuse what is not on its way: tools of a prompt that is no conversation."""
    if tools and not request.HasField("chat"):
        raise InvalidArgument("tools", "is only for a conversation")
    messages = (inference_pb2.Tool(name=t.name, description=t.description, parameters=t.parameters) for t in tools)
    if tools:
        set_list(request.chat.tools, "prompt.chat.tools", messages)


def _set_template_arguments(request: inference_pb2.GenerateRequest, arguments: str) -> None:
    if arguments and not request.HasField("chat"):
        raise InvalidArgument("template_arguments", "is only for a conversation")
    if arguments:
        set_field(request.chat, "prompt.chat.template_arguments", arguments)


def _set_constraint(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """At most one: the last would silently win."""
    named = [name for name in (*_CONSTRAINT_FIELDS, "choice") if getattr(options, name) not in (None, ())]
    if len(named) > 1:
        raise InvalidArgument(named[1], f"cannot be combined with {named[0]}")
    set_field(request, "compact_json", options.compact_json)
    for name in _CONSTRAINT_FIELDS:
        set_field(request, name, getattr(options, name))
    if options.choice:
        set_list(request.choice.choices, "choice", options.choice)


def _set_beam_search(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """A width makes it a beam search; the server refuses the other two without one."""
    for name, value in (
        ("width", options.beam_width),
        ("length_penalty", options.length_penalty),
        ("early_stopping", options.early_stopping),
    ):
        if value is not None:
            set_field(request.beam_search, f"beam_search.{name}", value)


def set_field(message: Any, path: str, value: object) -> None:
    """Sets the last part of `path`, which is the field's name in errors, as the server's are."""
    if value is None:
        return
    try:
        setattr(message, path.rpartition(".")[2], value)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"cannot be {value!r:.80}: {error}") from error


def set_list(target: Any, path: str, values: Iterable[object]) -> None:
    """Appends them to the repeated field `target`, which errors call `path`."""
    try:
        target.extend(values)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"holds a value it cannot: {error}") from error


def _update(target: Any, path: str, values: Mapping[int, float]) -> None:
    try:
        target.update(values)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"holds a value it cannot: {error}") from error
