"""The least tokens a text can give: lets a text that is certainly too long be refused before encoding it.

A token covers at most the longest vocabulary entry. That bounds the tokens of a text only where no part of the
tokenizer can swallow text; anything not known to keep all text gives no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from router.text.token_bytes import byte_of_stand_in

COMPOSITION_CHARS = 4
"""Characters that Unicode normalisation (NFC) composes into one, at most."""


@dataclass(frozen=True, slots=True)
class LengthBound:
    """How much text one token covers.

    Attributes:
        chars_per_token: most characters a token covers; None where there is no bound.
        dropped_chars: characters that the vocabulary lacks and the tokenizer drops.
    """

    chars_per_token: int | None
    dropped_chars: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LengthBound:
        config = json.loads(tokenizer.to_str())
        normalizers = list(_parts(config["normalizer"], "normalizers"))
        pre_tokenizers = list(_parts(config["pre_tokenizer"], "pretokenizers"))
        dropped = _dropped_chars(config, pre_tokenizers)
        strips = any(token["lstrip"] or token["rstrip"] for token in config["added_tokens"])
        if dropped is None or strips or not all(map(_keeps_text, normalizers + pre_tokenizers)):
            return cls(None)
        composes = any(part["type"] in ("NFC", "NFKC") for part in normalizers)
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
        return cls(longest * (COMPOSITION_CHARS if composes else 1), dropped)

    def min_tokens(self, text: str) -> int:
        """Tokens that `text` gives at least."""
        if self.chars_per_token is None:
            return 0
        num_chars = len(text) - sum(map(text.count, self.dropped_chars))
        return -(-num_chars // self.chars_per_token)


def _parts(config: Mapping[str, object] | None, name: str) -> Iterator[Mapping[str, object]]:
    if config is None:
        return
    parts = config[name] if config["type"] == "Sequence" else [config]
    assert isinstance(parts, list)
    yield from parts


def _keeps_text(part: Mapping[str, object]) -> bool:
    match part:
        case {"type": "NFC" | "NFKC" | "NFD" | "NFKD" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old)
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
    return False


def _dropped_chars(
    config: Mapping[str, Mapping[str, object]], pre_tokenizers: list[Mapping[str, object]]
) -> str | None:
    """Characters that give no token; None where they cannot be told, or unknown characters run into one token."""
    vocabulary = config["model"].get("vocab")
    if config["model"]["type"] != "BPE" or not isinstance(vocabulary, Mapping):
        return None
    if config["model"]["byte_fallback"]:
        return "" if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None
    if not any(part["type"] == "ByteLevel" for part in pre_tokenizers) or config["model"]["fuse_unk"]:
        return None
    lacking = [byte for stand_in, byte in byte_of_stand_in().items() if stand_in not in vocabulary]
    # A character beyond ASCII keeps at least its continuation bytes, 0x80 to 0xBF, so it gives a token if these do.
    return None if any(0x80 <= byte < 0xC0 for byte in lacking) else "".join(map(chr, filter(_is_ascii, lacking)))


def _is_ascii(byte: int) -> bool:
    return byte < 0x80
