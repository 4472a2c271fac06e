"""The fields of a request that completions and chat have in common, OpenAI's and vLLM's, and what they become.

Every field is here with its type; a name that is not here is refused, never ignored. `null` is as good as absent.
Limits on values are `router/validation.py`'s, which knows the model; here is only what the message could not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.logit_rules import MAX_BIAS, MAX_PENALTY
from router.openai.body import Body, Ids, Strings, TokenKey, UInt, told
from router.openai.constraints import ConstraintFields
from router.validation import MAX_CHOICES, MAX_STOP_STRINGS

SEED_MODULUS = 1 << 64
MAX_USER_CHARS = 256
SERVER_TIERS = ("auto", "default")
"""OpenAI's names for the server's own choice."""


class StreamOptions(Body):
    """What a stream carries besides."""

    include_usage: bool | None = None


class GenerationFields(ConstraintFields):
    """Common to both."""

    model: str | None = told("Name or alias; absent: the first.")
    temperature: float | None = told("0 takes the likeliest token.", default=1.0, least=0)
    top_p: float | None = told("Above 0.", default=1.0, least=0, most=1)
    n: UInt | None = told("Choices returned.", default=1, least=1, most=MAX_CHOICES)
    best_of: UInt | None = told("Candidates, at least n; absent: n.", least=1, most=MAX_CHOICES)
    stop: str | Strings | None = told(f"At most {MAX_STOP_STRINGS} strings.")
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: float | None = told(default=0.0, least=-MAX_PENALTY, most=MAX_PENALTY)
    frequency_penalty: float | None = told(default=0.0, least=-MAX_PENALTY, most=MAX_PENALTY)
    logit_bias: dict[TokenKey, float] | None = told(f"By token id; -{MAX_BIAS:g} … {MAX_BIAS:g} each.")
    max_tokens: UInt | None = told("Most output tokens; absent: what fits the context.", least=1)
    user: Annotated[str, Field(max_length=MAX_USER_CHARS)] | None = None
    service_tier: str | None = told("A tier; auto and default are the server's own choice.")
    stream: bool | None = told("Events in the place of one object.", default=False)
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: float | None = told(default=0.0, least=0, most=1)
    repetition_penalty: float | None = told("Above 0.", default=1.0, least=0)
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Strings | None = None
    logprob_token_ids: Ids | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: UInt | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    time_limit_s: float | None = told("Ends with what there is after so many seconds; above 0.", least=0)
    cache_salt: str | None = told("Keeps the prefix cache apart from calls with another.")
    request_id: str | None = told("The label; absent: x-request-id.")
    session_id: str | None = told("Calls of one session prefer the same workers; absent: x-session-id.")
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _options_have_a_use(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "is only for stream: true")
        if not self.use_beam_search and (self.length_penalty is not None or self.early_stopping is not None):
            name = "early_stopping" if self.length_penalty is None else "length_penalty"
            raise InvalidArgument(name, "is only for use_beam_search: true")
        return self

    @model_validator(mode="after")
    def _names_one_session(self) -> Self:
        if self.session_id and self.prompt_cache_key and self.session_id != self.prompt_cache_key:
            raise InvalidArgument("prompt_cache_key", "differs from session_id, which means the same")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def names(self, prompt: int = 0) -> Mapping[str, str]:
        """What fields of the GenerateRequest of this prompt are called in this body, where that depends on it."""
        del prompt
        is_key = not self.session_id and bool(self.prompt_cache_key)
        session = {"session_id": "prompt_cache_key"} if is_key else {}
        return {
            **self.constraint_names,
            **session,
            **({} if self.best_of is None else {"beam_search.width": "best_of"}),
        }

    def requests(self, label: str) -> tuple[pb.GenerateRequest, ...]:
        """What the body asks for, one for each prompt, as gRPC's clients send it; `label` unless the body has one.

        Raises InvalidArgument.
        """
        raise AssertionError("of the subclasses")

    def _common(self, label: str) -> pb.GenerateRequest:
        """Everything but the prompt."""
        message = pb.GenerateRequest(request_id=self.request_id or label, model=self.model or "")
        message.session_id = self.session_id or self.prompt_cache_key or ""
        self._set_sampling(message)
        message.stopping.CopyFrom(self._stopping())
        message.response.CopyFrom(self._response())
        message.cache.cache_salt = self.cache_salt or ""
        if self.service_tier is not None and self.service_tier not in SERVER_TIERS:
            if not self.service_tier:
                raise InvalidArgument("service_tier", "is empty; leave it out for the server's own")
            message.tier = self.service_tier
        if self.truncate_prompt_tokens is not None:
            message.truncate_prompt_tokens = self.truncate_prompt_tokens
        self.constrain(message)
        return message

    def _set_sampling(self, message: pb.GenerateRequest) -> None:
        """With a beam search `best_of` is its width, as it was in vLLM."""
        best_of = self.best_of
        if self.use_beam_search:
            width = self.n or 1 if best_of is None else best_of
            message.beam_search.CopyFrom(
                pb.BeamSearch(width=width, length_penalty=self.length_penalty, early_stopping=self.early_stopping)
            )
            best_of = None
        message.sampling.CopyFrom(
            pb.SamplingOptions(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=None if self.top_k is None else max(0, self.top_k),
                min_p=self.min_p,
                seed=None if self.seed is None else self.seed % SEED_MODULUS,
                n=self.n,
                best_of=best_of,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
                allowed_token_ids=self.allowed_token_ids,
                bad_words=self.bad_words,
            )
        )

    def _stopping(self) -> pb.StoppingOptions:
        return pb.StoppingOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            time_limit_s=self.time_limit_s,
        )

    def _response(self) -> pb.ResponseOptions:
        wants_ids = bool(self.return_token_ids)
        return pb.ResponseOptions(
            token_ids=wants_ids,
            prompt_token_ids=wants_ids,
            skip_special_tokens=self.skip_special_tokens,
            logprob_token_ids=self.logprob_token_ids,
        )
