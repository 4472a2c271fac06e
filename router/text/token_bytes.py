"""Token id → the bytes it adds to the output, read once from the tokenizer's decoder.

All decoders that language models use turn each token into bytes on its own and join them; what remains is a rule for
the very beginning (a first space is dropped). So the text of a stream is one table look-up and one incremental UTF-8
decode a token, whatever came before it (`detokenizer.py`). A decoder that does not work token by token is refused when
the model is loaded.

How the parts of a `Sequence` decoder map: ByteLevel turns the 256 printable stand-ins back into bytes; Replace with a
string and Metaspace work on a token's text; ByteFallback turns `<0xE2>` into one byte; Fuse joins; Strip after Fuse
drops at most n characters at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from kvferry.errors import FailedPrecondition

Piece = str | bytes
"""A token's text while decoder parts still apply to it; bytes once it is final."""


@dataclass(frozen=True, slots=True)
class StartRule:
    """What the decoder drops at the beginning of a text.

    Attributes:
        strip_char: character dropped from the first tokens, at most `strip_count` times.
        strip_count: 0 where nothing is stripped.
        first_token: bytes of tokens that read differently as the first token, by id.
    """

    strip_char: str = ""
    strip_count: int = 0
    first_token: Mapping[int, bytes] | None = None


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of every token id.

    Attributes:
        by_id: bytes of token `i`; empty where the vocabulary has a hole.
        special_ids: ids of special tokens, left out when special tokens are skipped.
        start: what differs at the beginning of a text.
    """

    by_id: Sequence[bytes]
    special_ids: frozenset[int]
    start: StartRule

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes:
        """Raises FailedPrecondition where the decoder is not made of the parts named above."""
        added = tokenizer.get_added_tokens_decoder()
        texts = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        texts.update((token_id, token.content) for token_id, token in added.items())
        parts = _decoder_parts(tokenizer)
        by_id = [b""] * (max(texts, default=-1) + 1)
        for token_id, text in texts.items():
            by_id[token_id] = _to_bytes(text, parts)
        return cls(
            by_id=by_id,
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            start=_start_rule(parts, texts, by_id),
        )

    def get(self, token_id: int) -> bytes:
        """Bytes of `token_id`; empty for an id outside the vocabulary."""
        return self.by_id[token_id] if 0 <= token_id < len(self.by_id) else b""


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a decoder: what it does to a token, to the first token, and to the beginning of the text."""

    apply: Callable[[Piece], Piece]
    apply_first: Callable[[Piece], Piece] | None = None
    start: StartRule = StartRule()


def _to_bytes(text: str, parts: Iterable[_Part], *, first: bool = False) -> bytes:
    piece: Piece = text
    for part in parts:
        piece = (part.apply_first or part.apply)(piece) if first else part.apply(piece)
    return piece if isinstance(piece, bytes) else piece.encode()


def _start_rule(parts: Sequence[_Part], texts: Mapping[int, str], by_id: Sequence[bytes]) -> StartRule:
    rules = [part.start for part in parts if part.start.strip_count]
    if len(rules) > 1:
        raise FailedPrecondition("tokenizer.json: decoder strips the beginning twice, which is not supported")
    rule = rules[0] if rules else StartRule()
    if all(part.apply_first is None for part in parts):
        return rule
    first = {token_id: _to_bytes(text, parts, first=True) for token_id, text in texts.items()}
    return replace(rule, first_token={i: value for i, value in first.items() if value != by_id[i]})


def _decoder_parts(tokenizer: Tokenizer) -> list[_Part]:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        raise FailedPrecondition("tokenizer.json: no decoder, so token ids cannot become text")
    configs = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    parts: list[_Part] = []
    fused = False
    for config in configs:
        parts.append(_part(config, fused=fused))
        fused = fused or config["type"] == "Fuse"
    return parts


def _part(config: Mapping[str, object], *, fused: bool) -> _Part:
    match config:
        case {"type": "Fuse"}:
            return _Part(apply=lambda piece: piece)
        case {"type": "ByteFallback"} if not fused:
            return _Part(apply=_byte_fallback)
        case {"type": "ByteLevel"} if not fused:
            return _Part(apply=_byte_level(byte_of_stand_in()))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
            return _Part(apply=_on_text(lambda text: text.replace(old, new)))
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)} if not fused:
            first = None if scheme == "never" else _on_text(lambda text: text.replace(mark, ""))
            return _Part(apply=_on_text(lambda text: text.replace(mark, " ")), apply_first=first)
        case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0} if fused:
            return _Part(apply=lambda piece: piece, start=StartRule(strip_char=char, strip_count=count))
    raise FailedPrecondition(f"tokenizer.json: decoder part {dict(config)!r} is not supported here")


def _on_text(change: Callable[[str], str]) -> Callable[[Piece], Piece]:
    return lambda piece: change(piece) if isinstance(piece, str) else piece


def _byte_fallback(piece: Piece) -> Piece:
    if isinstance(piece, str) and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return piece
    return piece


def _byte_level(byte_of: Mapping[str, int]) -> Callable[[Piece], Piece]:
    def apply(piece: Piece) -> Piece:
        if isinstance(piece, str) and all(char in byte_of for char in piece):
            return bytes([byte_of[char] for char in piece])
        return piece  # an added token with characters outside the alphabet stands for itself

    return apply


def byte_of_stand_in() -> dict[str, int]:
    """The 256 printable characters that byte-level vocabularies are written in, each with its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
