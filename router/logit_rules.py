"""Penalties, bias and bans of a public request, checked; part of `validation.py`'s work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvferry.errors import InvalidArgument
from kvferry.sampling import LogitRules
from proto.kvferry.v1 import inference_pb2 as pb

MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1_024
"""Each is looked up at every step of the request."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


def logit_rules(sampling: pb.SamplingOptions, vocab_size: int) -> LogitRules:
    """All but the bad words, which are text still. Raises InvalidArgument naming the field and the limit."""
    allowed = tuple(dict.fromkeys(sampling.allowed_token_ids))
    check_ids("sampling.allowed_token_ids", allowed, vocab_size)
    return LogitRules(
        presence_penalty=_penalty(sampling, "presence_penalty"),
        frequency_penalty=_penalty(sampling, "frequency_penalty"),
        repetition_penalty=_repetition_penalty(sampling),
        bias=_bias(sampling, vocab_size),
        allowed_token_ids=allowed,
    )


def checked_bad_words(words: Sequence[str]) -> tuple[str, ...]:
    """Without repetitions. Raises InvalidArgument naming the field and the limit."""
    field = "sampling.bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument(field, f"has {len(words)} words; at most {MAX_BAD_WORDS} are allowed")
    for word in words:
        if not word.strip():
            raise InvalidArgument(field, f"has the word {word!r:.40}, of which nothing is left without spaces")
        if len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidArgument(
                field, f"has a word of {len(word)} characters; at most {MAX_BAD_WORD_CHARS} are allowed"
            )
    return tuple(dict.fromkeys(words))


def _bias(sampling: pb.SamplingOptions, vocab_size: int) -> tuple[tuple[int, float], ...]:
    field, bias = "sampling.logit_bias", sampling.logit_bias
    if len(bias) > MAX_BIASED_TOKENS:
        raise InvalidArgument(field, f"has {len(bias)} entries; at most {MAX_BIASED_TOKENS} are allowed")
    check_ids(field, bias, vocab_size)
    for token_id, value in bias.items():
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidArgument(field, f"must be {-MAX_BIAS:g} … {MAX_BIAS:g}, got {value:g} for token id {token_id}")
    return tuple(sorted(bias.items()))


def _penalty(sampling: pb.SamplingOptions, name: str) -> float:
    value = float(getattr(sampling, name))
    if not -MAX_PENALTY <= value <= MAX_PENALTY:
        raise InvalidArgument(f"sampling.{name}", f"must be {-MAX_PENALTY:g} … {MAX_PENALTY:g}, got {value:g}")
    return value


def _repetition_penalty(sampling: pb.SamplingOptions) -> float:
    value = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument("sampling.repetition_penalty", f"must be above 0, got {value:g}")
    return value


def check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidArgument for an id outside the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgument(field, f"has token id {largest}; the vocabulary has {vocab_size}")
