"""`/tokenize` and `/detokenize`, in vLLM's form: the text plane by itself; no worker does anything."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.logit_rules import check_ids
from router.models import Model
from router.openai.body import Body, Ids, parse
from router.openai.endpoint import Call
from router.openai.requests import ChatMessages, chat_of
from router.openai.tools import Tools
from router.text.tokenizer import PromptLimits
from router.validation import Limits, TextPrompt, validate


class TokenizeBody(Body):
    """Of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def request(self) -> pb.GenerateRequest:
        """A request with that prompt. Raises InvalidArgument where there is none, or two, or a switch without use."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgument("prompt", "exactly one of prompt and messages must be set")
        if self.messages is not None:
            if self.add_special_tokens:
                raise InvalidArgument("add_special_tokens", "is not for messages: their template writes all there are")
            return pb.GenerateRequest(chat=chat_of(self.messages, self.add_generation_prompt, self.tools))
        if self.add_generation_prompt is not None:
            raise InvalidArgument("add_generation_prompt", "is only for messages")
        if self.tools:
            raise InvalidArgument("tools", "is only for messages")
        return pb.GenerateRequest(text=self.prompt)


class DetokenizeBody(Body):
    """Of token ids."""

    model: str | None = None
    tokens: Ids


async def tokenize(call: Call) -> None:
    """`POST /tokenize`."""
    body = parse(TokenizeBody, await call.body())
    model, limits = _find(call, body.model)
    token_ids = await _encode(body, model, limits)
    names = None
    if body.return_token_strs:
        names = [model.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids]
    content = {
        "count": len(token_ids),
        "max_model_len": limits.max_context,
        "tokens": list(token_ids),
        "token_strs": names,
    }
    await call.exchange.answer(content)


async def _encode(body: TokenizeBody, model: Model, limits: Limits) -> Sequence[int]:
    prompt = validate(body.request(), limits, lambda: 0).prompt
    if isinstance(prompt, TextPrompt) and body.add_special_tokens is False:
        bounds = PromptLimits(max_tokens=limits.max_context, max_bytes=limits.max_request_bytes)
        return await model.tokenizer.encode_async(prompt.text, limits=bounds, add_special_tokens=False)
    return await model.tokenize(prompt, limits)


async def detokenize(call: Call) -> None:
    """`POST /detokenize`."""
    body = parse(DetokenizeBody, await call.body())
    model, limits = _find(call, body.model)
    if len(body.tokens) > limits.max_context:
        raise InvalidArgument("tokens", f"has {len(body.tokens)} ids; at most {limits.max_context} are allowed")
    check_ids("tokens", body.tokens, limits.vocab_size)
    await call.exchange.answer({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _find(call: Call, name: str | None) -> tuple[Model, Limits]:
    parts = call.serving.parts
    model = parts.models.find(name or "")
    return model, model.limits(parts.config)
