"""What a client asks for, and the messages that say so.

Values that a field cannot hold are refused here, by the name the server would use; limits are the server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.client_chat import ChatMessage, Tool, message_to_pb, tool_to_pb
from kvferry.client_fields import check_list, json_text, set_field, set_list, set_mapping
from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import cache_pb2, inference_pb2

Prompt = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, Any]]
"""Text, token ids, or a conversation: `ChatMessage`s, or dicts as {"role": "user", "content": "Hello"}."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request. None leaves a value to the server's default, which `Started` echoes.

    docs/client.md has every field with the one of `GenerateRequest` that it sets, whose limits are in docs/api.md. A
    value that its field cannot hold is refused when the request is made: a text where a list belongs, too.

    Attributes:
        prompt: text as it is, token ids, or a conversation, which the model's chat template makes a text of.
        tools: functions that a conversation's model is told of; its calls are text of the output.
        template_arguments: variables of the chat template, a dict or its JSON.
        compact_json: whether constrained JSON has no white space between its parts.
        max_tokens: most tokens of one choice; None is what fits the context.
        temperature: 0 is greedy; None is 1, which samples.
        allowed_token_ids: no other token may come; None for any.
        json_schema: the output satisfies it; a dict, or its JSON. Of this, `json_object`, `regex`, `choice`, `grammar`
            and `structural_tag` at most one may be set.
        choice: the output is one of these; None for any output.
        structural_tag: JSON or a dict, as `GenerateRequest.structural_tag`.
        stop: texts that end the output, or one.
        time_limit_s: ends the output well, with what there is then.
        logprobs: of each token of the output, and of this many likely ones; 0 is the output's alone.
        kept_special_token_ids: special tokens that stay in the text, though others are left out.
        request_id: label in the server's logs, by which `abort` ends it.
    """

    prompt: Prompt
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    template_arguments: str | Mapping[str, Any] | None = None
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
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    compact_json: bool | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop: str | Sequence[str] = ()
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
        set_tools(request, self.tools)
        _set_template_arguments(request, json_text("template_arguments", self.template_arguments))
        set_field(request, "truncate_prompt_tokens", self.truncate_prompt_tokens)
        for name in _SAMPLING_FIELDS:
            set_field(request.sampling, f"sampling.{name}", getattr(self, name))
        set_mapping(request.sampling.logit_bias, "sampling.logit_bias", self.logit_bias)
        _set_only(request.sampling.allowed_token_ids, "sampling.allowed_token_ids", self.allowed_token_ids)
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
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        set_list(request.stopping.stop, "stopping.stop", stop)
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
    tools: Sequence[Tool | Mapping[str, Any]] = ()

    def to_pb(self) -> cache_pb2.PinPrefixRequest:
        """The message; raises InvalidArgument for a value its field cannot hold."""
        request = cache_pb2.PinPrefixRequest()
        for name in ("name", "model", "adapter", "tenant"):
            set_field(request, name, getattr(self, name))
        set_prompt(request, self.prompt)
        set_tools(request, self.tools)
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
        return set_field(request, "prompt.text", prompt)
    check_list("prompt", prompt, "text, token ids or messages")
    if isinstance(prompt, Set):
        raise InvalidArgument("prompt", "must be in an order, got a set")
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], ChatMessage | Mapping):
        request.chat.messages.extend(
            message_to_pb(message, f"prompt.chat.messages[{place}]") for place, message in enumerate(items)
        )
    elif isinstance(request, inference_pb2.TokenizeRequest):
        raise InvalidArgument("prompt", "must be text or a conversation that is not empty")
    else:
        request.token_ids.SetInParent()
        set_list(request.token_ids.ids, "prompt.token_ids", items)


def conversation(messages: str | Sequence[ChatMessage | Mapping[str, Any]]) -> Prompt:
    """`messages`, or the one of a user; raises InvalidArgument for what is no conversation."""
    if isinstance(messages, str):
        return [ChatMessage("user", messages)]
    check_list("messages", messages, "text or messages")
    if not len(messages) or not isinstance(messages[0], ChatMessage | Mapping):
        raise InvalidArgument("messages", "must be a text, or a list of messages that is not empty")
    return messages


def options_of(options: GenerateOptions | Prompt, fields: Mapping[str, Any]) -> GenerateOptions:
    """`options`, or those of a prompt, with `fields` set."""
    if isinstance(options, GenerateOptions):
        return replace(options, **fields)
    return GenerateOptions(prompt=options, **fields)


def set_tools(
    request: inference_pb2.GenerateRequest | cache_pb2.PinPrefixRequest | inference_pb2.TokenizeRequest,
    tools: Sequence[Tool | Mapping[str, Any]],
) -> None:
    """The server cannot refuse what is not on its way: tools of a prompt that is no conversation."""
    check_list("tools", tools)
    if len(tools) and not request.HasField("chat"):
        raise InvalidArgument("tools", "is only for a conversation")
    if len(tools):
        made = (tool_to_pb(tool, f"prompt.chat.tools[{place}]") for place, tool in enumerate(tools))
        request.chat.tools.extend(made)


def _set_only(target: Any, path: str, values: Sequence[object] | None) -> None:
    """A list of all that may come: an empty one would read as none, which lets everything through."""
    if values is None:
        return
    set_list(target, path, values)
    if not target:
        raise InvalidArgument(path, "is empty: nothing could come; leave it None for no limit")


def _set_template_arguments(request: inference_pb2.GenerateRequest, arguments: object) -> None:
    if arguments and not request.HasField("chat"):
        raise InvalidArgument("template_arguments", "is only for a conversation")
    if arguments:
        set_field(request.chat, "prompt.chat.template_arguments", arguments)


def _set_constraint(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """At most one: the last would silently win."""
    named = [name for name in (*_CONSTRAINT_FIELDS, "choice") if getattr(options, name) is not None]
    if len(named) > 1:
        raise InvalidArgument(named[1], f"cannot be combined with {named[0]}")
    set_field(request, "compact_json", options.compact_json)
    for name in _CONSTRAINT_FIELDS:
        set_field(request, name, json_text(name, getattr(options, name)))
    _set_only(request.choice.choices, "choice", options.choice)


def _set_beam_search(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """A width makes it a beam search; the server refuses the other two without one."""
    for name, value in (
        ("width", options.beam_width),
        ("length_penalty", options.length_penalty),
        ("early_stopping", options.early_stopping),
    ):
        if value is not None:
            set_field(request.beam_search, f"beam_search.{name}", value)
