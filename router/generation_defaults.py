"""Defaults that a model's folder brings for fields a request leaves unset: generation_config.json, as vLLM reads it.

Whatever `do_sample` says, a value that is there counts. Values are checked when the router starts, against the ranges
of the request's own fields, and are rounded as those are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from kvferry.errors import FailedPrecondition
from proto.kvferry.v1 import inference_pb2 as pb
from router.text.model_files import GENERATION_CONFIG, read_object

MAX_TOKENS_NAME = "max_new_tokens"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """By field of SamplingOptions; `max_tokens` is the most output tokens, cut to what fits, None for just that."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    def filled(self, sampling: pb.SamplingOptions) -> pb.SamplingOptions:
        """A copy in which none of these fields is unset."""
        made = pb.SamplingOptions()
        made.CopyFrom(sampling)
        for name in SAMPLING_NAMES:
            if not made.HasField(name):
                setattr(made, name, getattr(self, name))
        return made


NO_DEFAULTS = GenerationDefaults()
SAMPLING_NAMES = tuple(field.name for field in fields(GenerationDefaults) if field.name != "max_tokens")


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Those of a model folder, ours where it has none. Raises FailedPrecondition naming file, field and range."""
    path = folder / GENERATION_CONFIG
    found = {name: value for name, value in read_object(path, required=False).items() if value is not None}
    values: dict[str, float] = {}
    for name, (is_right, words) in _RANGES.items():
        if name in found:
            number = _number(found[name], is_whole=name in _WHOLE)
            if number is None or not is_right(number):
                raise FailedPrecondition(
                    f"{path}: {name} is {found[name]!r:.80}, expected {words}; "
                    "model.generation_config = 'none' leaves the file's sampling alone"
                )
            values[name] = number
    max_tokens = values.pop(MAX_TOKENS_NAME, None)
    top_k = max(0, int(values.pop("top_k", 0)))
    return GenerationDefaults(**values, top_k=top_k, max_tokens=None if max_tokens is None else int(max_tokens))


_WHOLE = ("top_k", MAX_TOKENS_NAME)
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, "a number of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (lambda value: -1 <= value < 1 << 32, "a whole number of at least 0, or -1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number of 0 to 1"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number of -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number of -2 to 2"),
    "repetition_penalty": (lambda value: value > 0, "a number above 0"),
    MAX_TOKENS_NAME: (lambda value: 1 <= value < 1 << 32, "a whole number of at least 1"),
}


def _number(value: object, *, is_whole: bool) -> float | None:
    """As the request's field would hold it: in float32 unless it is whole; None for what is no number there."""
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        return None
    if is_whole:
        return value
    try:
        (single,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return None
    return float(single) if math.isfinite(single) else None
