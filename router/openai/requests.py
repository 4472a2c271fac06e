"""Bodies of `/v1/completions` and `/v1/chat/completions`, and the GenerateRequests that they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvferry.errors import InvalidArgument, UnsupportedField
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2
from router.openai.body import AtFirstFault, Body, Ids, Strings, UInt, told
from router.openai.constraints import Json
from router.openai.fields import GenerationFields
from router.openai.tools import BodyToolCall, ToolBody, ToolFields
from router.response_parts import MAX_LOGPROBS
from router.text.chat_template import ChatTemplate

MAX_PROMPTS = 128
"""Prompts of one call: each is a request of its own, admitted like any other."""
ROLES = ("system", "developer", "user", "assistant", "tool")
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, of completions alone."""


class CompletionBody(GenerationFields):
    """`/v1/completions`."""

    prompt: str | Ids | Strings | Annotated[tuple[Ids, ...], AtFirstFault()]
    max_tokens: UInt | None = told("Most output tokens.", default=DEFAULT_COMPLETION_TOKENS, least=1)
    logprobs: UInt | None = told("Alternatives a token.", least=0, most=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None

    def requests(self, label: str) -> tuple[pb.GenerateRequest, ...]:
        """One for each prompt, in order."""
        if self.suffix:
            raise UnsupportedField("suffix")
        common = self._common(label)
        if self.max_tokens is None:
            common.stopping.max_tokens = DEFAULT_COMPLETION_TOKENS
        if self.logprobs is not None:
            common.response.logprobs = self.logprobs
        if self.echo:
            common.response.echo = True
            if self.logprobs is not None:  # as OpenAI's: of the prompt, too
                common.response.prompt_logprobs = self.logprobs
                common.response.prompt_token_ids = True
        return tuple(_with_prompt(common, prompt) for prompt in self._prompts())

    def names(self, prompt: int = 0) -> Mapping[str, str]:
        """With the place of the prompt among several."""
        names = super().names(prompt)
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return names
        place = f"prompt[{prompt}]"
        return {**names, "prompt": place, "prompt.text": place, "prompt.token_ids": place}

    def _prompts(self) -> Sequence[str | Ids]:
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if not self.prompt:
            raise InvalidArgument("prompt", "is empty; at least one token is needed")
        if isinstance(self.prompt[0], int):
            return (self.prompt,)  # ids throughout, as it was checked
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidArgument("prompt", f"has {len(self.prompt)} prompts; at most {MAX_PROMPTS} are allowed")
        return self.prompt  # texts throughout, or lists of ids


def _with_prompt(common: pb.GenerateRequest, prompt: str | Ids) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.CopyFrom(common)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(types_pb2.TokenIds(ids=prompt))
    return message


class ContentPart(Body):
    """Text; what else there may be is not for a language model."""

    type: Literal["text"]
    text: str


class ChatBodyMessage(Body):
    """One turn. What responses have besides and is null here may be sent back as it came."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[tuple[ContentPart, ...], AtFirstFault()] | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[BodyToolCall, ...], AtFirstFault()] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """Parts are lines, as in vLLM."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def to_pb(self, place: str) -> pb.ChatMessage:
        """As gRPC's clients send it. Raises InvalidArgument for a turn without content that calls nothing."""
        if self.content is None and not self.tool_calls:
            raise InvalidArgument(f"{place}.content", "is missing; only a turn with tool_calls can do without")
        if self.tool_calls and self.role != "assistant":
            raise InvalidArgument(f"{place}.tool_calls", "is only for the role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidArgument(f"{place}.tool_call_id", "is only for the role tool")
        calls = [
            pb.ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        return pb.ChatMessage(
            role=self.role,
            content=self.text,
            tool_calls=calls,
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


ChatMessages = Annotated[tuple[ChatBodyMessage, ...], AtFirstFault()]


def chat_of(
    messages: ChatMessages,
    add_generation_prompt: bool | None,
    tools: Sequence[ToolBody] | None = None,
    arguments: Json | None = None,
) -> pb.Chat:
    """A conversation as gRPC's clients send it."""
    turns = [message.to_pb(f"messages[{index}]") for index, message in enumerate(messages)]
    offered = [tool.to_pb() for tool in tools or ()]
    return pb.Chat(
        messages=turns,
        add_generation_prompt=add_generation_prompt,
        tools=offered,
        template_arguments=json.dumps(arguments, ensure_ascii=False) if arguments else "",
    )


def fit_roles(chat: pb.Chat, template: ChatTemplate) -> None:
    """Makes `developer` `system` where the template does not name it. Raises InvalidArgument for an unknown role."""
    for index, turn in enumerate(chat.messages):
        if template.names_role(turn.role):
            continue
        if turn.role not in ROLES:
            known = ", ".join(ROLES)
            raise InvalidArgument(
                f"messages[{index}].role",
                f"{turn.role!r:.80} is none of {known}, and the chat template does not name it",
            )
        if turn.role == "developer":
            turn.role = "system"


class ChatBody(GenerationFields, ToolFields):
    """`/v1/chat/completions`."""

    messages: ChatMessages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Json | None = None
    max_completion_tokens: UInt | None = told("OpenAI's newer name of max_tokens.", least=1)
    logprobs: bool | None = None
    top_logprobs: UInt | None = told("Alternatives a token, with logprobs.", default=0, least=0, most=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidArgument("max_completion_tokens", "differs from max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs", "is only for logprobs: true")
        return self

    def names(self, prompt: int = 0) -> Mapping[str, str]:
        """With what chats alone have another name for."""
        names = {**super().names(prompt), "prompt": "messages"}
        if self.top_logprobs is not None:
            names["response.logprobs"] = "top_logprobs"
        if self.max_tokens is None and self.max_completion_tokens is not None:
            names["stopping.max_tokens"] = "max_completion_tokens"
        return names

    def requests(self, label: str) -> tuple[pb.GenerateRequest, ...]:
        """The one there is."""
        message = self._common(label)
        message.chat.CopyFrom(
            chat_of(self.messages, self.add_generation_prompt, self.offered, self.chat_template_kwargs)
        )
        if self.max_completion_tokens is not None:
            message.stopping.max_tokens = self.max_completion_tokens
        if self.logprobs:
            message.response.logprobs = self.top_logprobs or 0
        return (message,)
