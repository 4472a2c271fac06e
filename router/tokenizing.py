"""Texts to token ids and back for clients, over gRPC and HTTP: the text plane by itself; no worker does anything."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.logit_rules import check_ids
from router.models import Model
from router.validation import PROMPT_FIELD, Limits, validate


async def tokenize(message: pb.TokenizeRequest, model: Model, limits: Limits) -> Sequence[int]:
    """The ids that `Generate` would make of the prompt. Raises InvalidArgument where that would refuse it, too."""
    adds = message.add_special_tokens if message.HasField("add_special_tokens") else True
    match message.WhichOneof("prompt"):
        case "text":
            request = pb.GenerateRequest(text=message.text)
        case "chat" if adds and message.HasField("add_special_tokens"):
            raise InvalidArgument("add_special_tokens", "is not for a chat: its template writes all there are")
        case "chat":
            request = pb.GenerateRequest(chat=message.chat)
        case _:
            raise InvalidArgument(PROMPT_FIELD, "one of text and chat must be set")
    prompt = validate(request, limits, lambda: 0).prompt
    return await model.tokenize(prompt, limits, add_special_tokens=adds)


async def detokenize(
    token_ids: Sequence[int], model: Model, limits: Limits, *, skip_special_tokens: bool = False, field: str
) -> str:
    """The text of at most as many ids as the context has. Raises InvalidArgument naming `field`."""
    if len(token_ids) > limits.max_context:
        raise InvalidArgument(field, f"has {len(token_ids)} ids; at most {limits.max_context} are allowed")
    check_ids(field, token_ids, limits.vocab_size)
    return await model.tokenizer.decode_async(token_ids, skip_special_tokens=skip_special_tokens)
