"""Packed weights in a file, made once a model: processes of one machine map it and share its memory.

A file of safetensors whose tensors begin at cache lines. Whoever comes first writes it, under another name until it is
whole; a file that cannot be read is made anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

LEAST_KEPT_BYTES = 32 << 20
"""Smaller ones are packed in no time."""
ALIGNMENT_BYTES = 64
PADDING = "padding"


def kept_weights(path: Path | None, pack: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The tensors of the file at `path`; where there is none, those that `pack` makes, which are kept there.

    Nothing is kept without a path, below `LEAST_KEPT_BYTES`, or where the disk has no room; tensors are not written to.
    """
    if path is None:
        return pack()
    if path.is_file():
        try:
            return _mapped(path)
        except SafetensorError as error:
            logger.warning("%s: made anew, since it cannot be read (%s)", path, error)
    weights = pack()
    if sum(tensor.nbytes for tensor in weights.values()) < LEAST_KEPT_BYTES:
        return weights
    try:
        _write(path, dict(weights))
        return _mapped(path)
    except OSError as error:
        logger.warning("%s: packed weights are not kept (%s)", path, error)
        return weights


def _mapped(path: Path) -> Mapping[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _write(path: Path, weights: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        save_file(weights, unfinished, {PADDING: ""})
        excess = _data_offset(unfinished) % ALIGNMENT_BYTES
        if excess:
            save_file(weights, unfinished, {PADDING: " " * (ALIGNMENT_BYTES - excess)})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _data_offset(path: Path) -> int:
    """Bytes before the first tensor: the length of the header, in eight bytes, and the header."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
