"""Renders chat messages into prompt text with the model's own template.

transformers renders in jinja's immutable sandbox: a template comes with the model and is not trusted. Importing this
module does not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from kvferry.errors import FailedPrecondition, InvalidArgument

FIELD = "prompt.chat"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: who speaks (`system`, `user`, `assistant` … as the template knows them) and what."""

    role: str
    content: str


class ChatTemplate:
    """The chat template of one model, or the knowledge that it has none."""

    __slots__ = ("_source", "_variables")

    def __init__(self, source: str | None, variables: Mapping[str, str]) -> None:
        """`variables`: text of the named special tokens (`bos_token` …), as templates expect them."""
        self._source = source
        self._variables: dict[str, Any] = dict(variables)

    def writes(self, text: str) -> bool:
        """Whether `text` occurs in the template itself."""
        return self._source is not None and text in self._source

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """Prompt text of a conversation.

        Raises InvalidArgument without messages, for a model without a template, and where the template refuses the
        conversation (with its own words); FailedPrecondition for a template that cannot be compiled.
        """
        if self._source is None:
            raise InvalidArgument(FIELD, "the model has no chat template; send a text prompt instead")
        if not messages:
            raise InvalidArgument(FIELD, "no messages; at least 1 is needed")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            rendered = render_jinja_template(
                conversations=[conversation],
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise FailedPrecondition(f"the model's chat template cannot be compiled: {error}") from error
        except Exception as error:  # whatever an untrusted template runs into fails this request only
            raise InvalidArgument(FIELD, f"the chat template refuses the messages: {error}") from error
        return "".join(rendered[0])  # a list with the text of each conversation, though annotated otherwise
