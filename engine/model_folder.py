"""A model folder as it lies on disk, checked without torch: config.json, tokenizer.json and safetensors weights.

The loader calls `check_model_folder` before anything expensive, so a missing or truncated file is named at once.
`model_fingerprint` is what two workers compare to know that they serve the same weights.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import FailedPrecondition

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SINGLE_WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
HASHED_WHOLE_BYTES = 64 * 1024 * 1024
"""Weight files up to this size are hashed whole; of larger ones a sample of every tensor is."""
SAMPLE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor's bytes lie in its file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file whose header and length have been checked."""

    path: Path
    header: bytes
    tensors: Mapping[str, TensorSpan]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds everything a worker and a router need."""

    path: Path
    config: bytes
    weights: tuple[WeightFile, ...]

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(name for file in self.weights for name in file.tensors)


def check_model_folder(folder: Path) -> ModelFolder:
    """Read what is needed to trust the folder; FailedPrecondition names the file and tensor that are wrong."""
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        if not (folder / name).is_file():
            raise FailedPrecondition(f"{folder / name}: is missing; a model folder needs it")
        _read_json_object(folder / name)
    weights = tuple(read_weight_file(folder / name) for name in _weight_file_names(folder))
    found = ModelFolder(folder, (folder / CONFIG_FILE).read_bytes(), weights)
    _check_index(folder, found)
    return found


def model_fingerprint(folder: Path) -> str:
    """A digest of config.json and of the weight files' names, sizes, headers and (sampled) contents.

    It is equal for equal folders anywhere, and differs for other weights of the same shape.
    """
    found = check_model_folder(folder)
    digest = hashlib.sha256(b"kvferry.model.v1")
    _add(digest, found.config)
    for file in sorted(found.weights, key=lambda weight_file: weight_file.path.name):
        _add(digest, file.path.name.encode())
        _add(digest, struct.pack("<Q", file.size_bytes))
        _add(digest, file.header)
        _add_contents(digest, file)
    return digest.hexdigest()


def read_weight_file(path: Path) -> WeightFile:
    """Read and check a safetensors header: the file has to end where its last tensor does."""
    if not path.is_file():
        raise FailedPrecondition(f"{path}: is missing")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length_field = file.read(8)
        header_bytes = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else MOST_HEADER_BYTES + 1
        if header_bytes > min(size_bytes - 8, MOST_HEADER_BYTES):
            raise FailedPrecondition(f"{path}: truncated or not a safetensors file ({size_bytes} bytes)")
        header = file.read(header_bytes)
    tensors = _tensor_spans(path, header)
    for name, span in tensors.items():
        if not 0 <= span.start <= span.end <= size_bytes:
            raise FailedPrecondition(f"{path}: truncated: tensor {name} ends at byte {span.end} of {size_bytes}")
    if size_bytes != max((span.end for span in tensors.values()), default=8 + header_bytes):
        raise FailedPrecondition(f"{path}: {size_bytes} bytes long, which is not where its last tensor ends")
    return WeightFile(path, header, tensors, size_bytes)


def _tensor_spans(path: Path, header: bytes) -> dict[str, TensorSpan]:
    first = 8 + len(header)
    try:
        described = json.loads(header)
        offsets = {name: entry["data_offsets"] for name, entry in described.items() if name != "__metadata__"}
        return {name: TensorSpan(first + int(start), first + int(end)) for name, (start, end) in offsets.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FailedPrecondition(f"{path}: its safetensors header cannot be read ({error!r})") from error


def _weight_file_names(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_WEIGHTS_FILE).is_file():
            raise FailedPrecondition(f"{folder / SINGLE_WEIGHTS_FILE}: is missing, and so is {INDEX_FILE}")
        return [SINGLE_WEIGHTS_FILE]
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name:
            raise FailedPrecondition(f"{index}: names a file outside the folder: {name!r}")
    return names


def _check_index(folder: Path, found: ModelFolder) -> None:
    """Every tensor that a sharded folder's index promises is in the file that it names."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return
    files = {file.path.name: file for file in found.weights}
    for tensor, name in _weight_map(index).items():
        if tensor not in files[name].tensors:
            raise FailedPrecondition(f"{folder / name}: lacks tensor {tensor}, which {INDEX_FILE} says is there")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FailedPrecondition(f"{index}: has no weight_map of tensor names to file names")
    return weight_map


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise FailedPrecondition(f"{path}: does not hold a JSON object")
    return value


def _add(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)) + part)


def _add_contents(digest: hashlib._Hash, file: WeightFile) -> None:
    """The whole file where it is small, else the beginning, middle and end of each tensor."""
    with file.path.open("rb") as stream:
        if file.size_bytes <= HASHED_WHOLE_BYTES:
            _add(digest, stream.read())
            return
        for _, span in sorted(file.tensors.items()):
            middle, last = (span.start + span.end) // 2, max(span.start, span.end - SAMPLE_BYTES)
            for start in (span.start, middle, last):
                stream.seek(start)
                _add(digest, stream.read(min(SAMPLE_BYTES, span.end - start)))
