"""What the response to a public request carries, checked; part of `validation.py`'s work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.logit_rules import check_ids

MAX_LOGPROBS = 20
"""Alternatives a token: each is a line of the response, and a search through the vocabulary."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_KEPT_SPECIAL_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """What a response carries.

    Attributes:
        skip_special_tokens: whether special tokens are left out of the text.
        kept_special_token_ids: those whose text stays all the same.
        echo: whether the text of each choice begins with the prompt's.
        num_logprobs: most likely tokens told of beside each output token; None for no log-probabilities.
        num_prompt_logprobs: most likely tokens told of beside each prompt token; None for no log-probabilities.
        logprob_token_ids: tokens told of beside each output token, instead of the most likely ones.
    """

    text: bool
    token_ids: bool
    prompt_token_ids: bool
    skip_special_tokens: bool
    echo: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    logprob_token_ids: tuple[int, ...]
    kept_special_token_ids: frozenset[int] = frozenset()

    @property
    def logprobs(self) -> bool:
        """Whether the client is told log-probabilities of the output."""
        return self.num_logprobs is not None or bool(self.logprob_token_ids)


def response_parts(message: pb.GenerateRequest, vocab_size: int) -> ResponseParts:
    """Raises InvalidArgument naming the field and the limit."""
    response = message.response
    return ResponseParts(
        text=is_on(response, "text"),
        token_ids=is_on(response, "token_ids"),
        prompt_token_ids=response.prompt_token_ids,
        skip_special_tokens=is_on(response, "skip_special_tokens"),
        echo=_echo(message),
        num_logprobs=_num_logprobs(response, "logprobs"),
        num_prompt_logprobs=_num_logprobs(response, "prompt_logprobs"),
        logprob_token_ids=_logprob_token_ids(response, vocab_size),
        kept_special_token_ids=_kept_special_token_ids(response, vocab_size),
    )


def is_on(message: pb.ResponseOptions | pb.Chat, name: str) -> bool:
    """A boolean whose default is true."""
    return bool(getattr(message, name)) if message.HasField(name) else True


def _num_logprobs(response: pb.ResponseOptions, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    if not response.HasField(name):
        return None
    number: int = getattr(response, name)
    if number > MAX_LOGPROBS:
        raise InvalidArgument(f"response.{name}", f"{number} is above the limit, {MAX_LOGPROBS}")
    return number


def _echo(message: pb.GenerateRequest) -> bool:
    if not message.response.echo:
        return False
    if message.HasField("chat"):
        raise InvalidArgument("response.echo", "cannot be combined with a chat, which is not part of the answer's text")
    if not is_on(message.response, "text"):
        raise InvalidArgument("response.echo", "needs response.text, which is off")
    return True


def _kept_special_token_ids(response: pb.ResponseOptions, vocab_size: int) -> frozenset[int]:
    field, token_ids = "response.kept_special_token_ids", response.kept_special_token_ids
    if len(token_ids) > MAX_KEPT_SPECIAL_TOKEN_IDS:
        raise InvalidArgument(field, f"has {len(token_ids)} ids; at most {MAX_KEPT_SPECIAL_TOKEN_IDS} are allowed")
    check_ids(field, token_ids, vocab_size)
    return frozenset(token_ids)


def _logprob_token_ids(response: pb.ResponseOptions, vocab_size: int) -> tuple[int, ...]:
    field, token_ids = "response.logprob_token_ids", tuple(dict.fromkeys(response.logprob_token_ids))
    if token_ids and response.logprobs:
        raise InvalidArgument(field, "cannot be combined with response.logprobs above 0: both fill the alternatives")
    if len(token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidArgument(field, f"has {len(token_ids)} ids; at most {MAX_LOGPROB_TOKEN_IDS} are allowed")
    check_ids(field, token_ids, vocab_size)
    return token_ids
