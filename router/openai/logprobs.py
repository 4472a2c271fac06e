"""Log-probabilities as OpenAI's two interfaces show them, of the output tokens of one choice.

A token whose bytes are no whole characters is written `bytes:\\xf0\\x9f`, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proto.kvferry.v1 import types_pb2
from router.text.detokenizer import Detokenizer
from router.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """How tokens are written.

    Attributes:
        as_ids: `token_id:42` in the place of text (vLLM's `return_tokens_as_token_ids`).
    """

    table: TokenBytes
    as_ids: bool

    def of(self, token_id: int) -> str:
        """One token, alone."""
        if self.as_ids:
            return f"token_id:{token_id}"
        data = self.table.get(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(slots=True)
class CompletionLogprobs:
    """The form of `/v1/completions`: parallel lists; the sampled token is among the alternatives.

    Attributes:
        offsets: tells where in the choice's text a token begins.
    """

    texts: TokenTexts
    offsets: Detokenizer
    _num_chars: int = field(default=0, init=False)

    def of(self, logprobs: Iterable[types_pb2.TokenLogprob]) -> dict[str, Any]:
        """The next tokens."""
        tokens, values, tops, offsets = [], [], [], []
        for one in logprobs:
            name = self.texts.of(one.token_id)
            tokens.append(name)
            values.append(one.logprob)
            tops.append({self.texts.of(other.token_id): other.logprob for other in one.top} | {name: one.logprob})
            offsets.append(self._num_chars)
            self._num_chars += len(self.offsets.push(one.token_id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


@dataclass(frozen=True, slots=True)
class ChatLogprobs:
    """The form of `/v1/chat/completions`: one object a token."""

    texts: TokenTexts

    def of(self, logprobs: Iterable[types_pb2.TokenLogprob]) -> dict[str, Any]:
        """The next tokens."""
        return {"content": [self._entry(one, one.top) for one in logprobs]}

    def _entry(self, one: types_pb2.TokenLogprob, top: Sequence[types_pb2.TokenLogprob] | None) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "token": self.texts.of(one.token_id),
            "logprob": one.logprob,
            "bytes": list(self.texts.table.get(one.token_id)),
        }
        if top is not None:
            entry["top_logprobs"] = [self._entry(other, None) for other in top]
        return entry
