"""`/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.models import Model
from router.openai.body import Body, Ids, parse
from router.openai.constraints import Json
from router.openai.endpoint import Call
from router.openai.requests import ChatMessages, chat_of, fit_roles
from router.openai.tools import Tools
from router.tokenizing import detokenize as ids_to_text
from router.tokenizing import tokenize as text_to_ids
from router.validation import Limits


class TokenizeBody(Body):
    """Of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Json | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def request(self) -> pb.TokenizeRequest:
        """As gRPC's clients send it. Raises InvalidArgument where there is none, or two, or a switch without use."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgument("prompt", "exactly one of prompt and messages must be set")
        if self.messages is not None:
            chat = chat_of(self.messages, self.add_generation_prompt, self.tools, self.chat_template_kwargs)
            return pb.TokenizeRequest(chat=chat, add_special_tokens=self.add_special_tokens or None)
        if self.add_generation_prompt is not None:
            raise InvalidArgument("add_generation_prompt", "is only for messages")
        if self.chat_template_kwargs:
            raise InvalidArgument("chat_template_kwargs", "is only for messages")
        if self.tools:
            raise InvalidArgument("tools", "is only for messages")
        return pb.TokenizeRequest(text=self.prompt, add_special_tokens=self.add_special_tokens)


class DetokenizeBody(Body):
    """Of token ids."""

    model: str | None = None
    tokens: Ids


async def tokenize(call: Call) -> None:
    """`POST /tokenize`."""
    body = parse(TokenizeBody, await call.body())
    model, limits = _find(call, body.model)
    request = body.request()
    fit_roles(request.chat, model.tokenizer.chat_template)
    token_ids = await text_to_ids(request, model, limits)
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


async def detokenize(call: Call) -> None:
    """`POST /detokenize`."""
    body = parse(DetokenizeBody, await call.body())
    model, limits = _find(call, body.model)
    await call.exchange.answer({"prompt": await ids_to_text(body.tokens, model, limits, field="tokens")})


def _find(call: Call, name: str | None) -> tuple[Model, Limits]:
    parts = call.serving.parts
    model = parts.models.find(name or "")
    return model, model.limits(parts.config)
