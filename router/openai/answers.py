"""What responses are, for the description alone (`/openapi.json`); `responses.py` and its neighbours write them.

A test reads real responses with these classes, so neither can say more than the other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.openai.body import Body

FinishReason = Literal["stop", "length", "abort", "tool_calls"]
Count = Annotated[int, Field(ge=0)]


class PromptTokensDetails(Body):
    """Of a usage."""

    cached_tokens: Count = Field(description="Prompt tokens found in the prefix cache.")


class Usage(Body):
    """Of all prompts and choices together."""

    prompt_tokens: Count
    completion_tokens: Count = Field(description="Over all choices and candidates.")
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class ChoiceAnswer(Body):
    """What choices of both routes have."""

    index: Count = Field(description="Numbered through all prompts: prompt × n + choice.")
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(description="The stop string or id that ended it, or time_limit.")
    token_ids: tuple[int, ...] | None = Field(default=None, description="With return_token_ids.")
    prompt_token_ids: tuple[int, ...] | None = Field(default=None, description="With return_token_ids.")


class CompletionLogprobsAnswer(Body):
    """Parallel lists, one entry a token."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class CompletionChoice(ChoiceAnswer):
    """One choice."""

    text: str
    logprobs: CompletionLogprobsAnswer | None


class Answer(Body):
    """What both routes tell of the call."""

    id: str = Field(description="Ends with the server's id of the first prompt's request.")
    created: int = Field(description="Unix time.")
    model: str
    service_tier: str = Field(description="The tier in force.")
    usage: Usage


class Completion(Answer):
    """Streamed: events of the same form with what is new in their choices, the usage in the last one if asked for."""

    object: Literal["text_completion"]
    choices: tuple[CompletionChoice, ...]


class TopLogprob(Body):
    """An alternative."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprobAnswer(TopLogprob):
    """A token and its alternatives."""

    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobsAnswer(Body):
    """One entry a token."""

    content: tuple[TokenLogprobAnswer, ...]


class FunctionAnswer(Body):
    """What is to be called."""

    name: str
    arguments: str = Field(description="An object in JSON.")


class ToolCallAnswer(Body):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionAnswer


class ChatMessageAnswer(Body):
    """The turn of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: tuple[ToolCallAnswer, ...] | None = None


class ChatChoice(ChoiceAnswer):
    """One choice; in a stream `delta` stands in the place of `message`."""

    message: ChatMessageAnswer
    logprobs: ChatLogprobsAnswer | None


class ChatCompletion(Answer):
    """Streamed: events `chat.completion.chunk` with what is new."""

    object: Literal["chat.completion"]
    choices: tuple[ChatChoice, ...]


class ModelCard(Body):
    """A name or alias."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time of the router's start.")
    owned_by: str
    root: str = Field(description="The model's name.")
    parent: None
    max_model_len: int | None = Field(description="Null until a worker was seen.")


class ModelList(Body):
    """All of them."""

    object: Literal["list"]
    data: tuple[ModelCard, ...]


class TokenizeAnswer(Body):
    """Ids of a prompt."""

    count: Count
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None


class DetokenizeAnswer(Body):
    """Text of ids."""

    prompt: str
