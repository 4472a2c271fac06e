"""The prompt's text, for a response whose choices begin with it.

Joined with the output it is one text: where a prompt of token ids ends in half a character, that half is not in the
echo; it stands in the text of the output token that completes it. Stop strings are looked for in the output's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.text.detokenizer import Detokenizer
from router.text.token_bytes import TokenBytes

PIECE_CHARS = 1 << 16
"""Most characters of one message: at most 256 KiB, far below gRPC's 4 MiB."""


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """What stands before the output of each choice.

    Attributes:
        text: its whole characters.
    """

    text: str

    @classmethod
    def of_tokens(
        cls,
        token_ids: Sequence[int],
        table: TokenBytes,
        *,
        skip_special_tokens: bool,
        kept_special_ids: frozenset[int] = frozenset(),
    ) -> EchoedPrompt:
        """The text of token ids."""
        detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens, kept_special_ids=kept_special_ids)
        return cls("".join(map(detokenizer.push, token_ids)))

    @property
    def pieces(self) -> Iterator[str]:
        """The text, cut so that each piece fits a message."""
        return (self.text[start : start + PIECE_CHARS] for start in range(0, len(self.text), PIECE_CHARS))
