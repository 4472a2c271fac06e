"""Convert a GGUF file, once, into a model folder that all processes load: safetensors, config and tokenizer.

    python -m engine.gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m-instruct

Weights are unpacked to float32, the only dtype that holds the file's values exactly. The folder appears whole or not at
all: everything is written to a temporary neighbour that is renamed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, get_gguf_tokenizer

from kvferry.errors import FailedPrecondition, KvferryError

STEPS = ("reading the header", "unpacking the weights", "building the tokenizer", "writing the folder")

DIGIT_SPLITTING_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "codeshell"})
"""Byte-level BPE whose text is cut at every digit first. transformers does not know that and would cut
"x =    12" otherwise than the original tokenizer does."""

PLAIN_PRE_TOKENIZERS = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais"})
"""Byte-level BPE with the splitting rule of GPT-2, which is what transformers builds."""


def convert_gguf(source: Path, target: Path, *, show_progress: bool = False) -> None:
    """Write the model of `source` to the new folder `target`.

    Raises:
        FailedPrecondition: `source` is missing, truncated, or of a kind that cannot be converted exactly; or `target`
            is there already.
    """
    if not source.is_file():
        raise FailedPrecondition(f"{source}: no such GGUF file")
    if target.exists():
        raise FailedPrecondition(f"{target}: is there already; remove it or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _progress(show_progress) as progress, _readable_errors(source):
            _convert_into(scratch, source, progress)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert_into(scratch: Path, source: Path, progress: Progress) -> None:
    task = progress.add_task(f"{source.name}: {STEPS[0]}", total=len(STEPS))
    kind, pre_tokenizer = _tokenizer_kind(source)
    progress.update(task, advance=1, description=f"{source.name}: {STEPS[1]}")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    progress.update(task, advance=1, description=f"{source.name}: {STEPS[2]}")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    _correct_pre_tokenizer(tokenizer, kind, pre_tokenizer)
    progress.update(task, advance=1, description=f"{source.name}: {STEPS[3]}")
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(scratch)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(scratch)
    _clean_tokenizer_config(scratch)
    progress.update(task, advance=1, description=f"{source.name}: done")


def _tokenizer_kind(source: Path) -> tuple[str, str]:
    """The file's `tokenizer.ggml.model` and `tokenizer.ggml.pre`."""
    _, described, _ = get_gguf_tokenizer(str(source))
    return str(described.get("tokenizer_type")), str(described.get("pre_tokenizer_type", ""))


def _correct_pre_tokenizer(tokenizer: object, kind: str, pre_tokenizer: str) -> None:
    """Make the tokenizer cut text as the original does, or refuse the file."""
    if kind != "gpt2" or pre_tokenizer in GGUF_PRE_TOKENIZER_SPLITS or pre_tokenizer in PLAIN_PRE_TOKENIZERS:
        return
    if pre_tokenizer not in DIGIT_SPLITTING_PRE_TOKENIZERS:
        raise FailedPrecondition(
            f"tokenizer.ggml.pre is {pre_tokenizer!r}, whose splitting rule is not known, so text could become other "
            "tokens than with the original tokenizer; use the model's safetensors folder"
        )
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _clean_tokenizer_config(folder: Path) -> None:
    """Keep only what readers other than transformers 5 understand too, with the chat template in place."""
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    for name in ("backend", "is_local", "local_files_only"):
        described.pop(name, None)
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = folder / "chat_template.jinja"
    if template.is_file():
        described["chat_template"] = template.read_text()
    path.write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n")


def _publish(scratch: Path, target: Path) -> None:
    """Rename the finished folder into place; where another process was first, its folder stays."""
    scratch.chmod(0o755)  # mkdtemp makes it private, and so does safetensors its files
    for path in scratch.iterdir():
        path.chmod(0o644)
    try:
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():
            raise


@contextlib.contextmanager
def _progress(show: bool) -> Iterator[Progress]:
    """A bar on stderr; the bars of the libraries below are kept out of its way."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    bar = Progress(*columns, console=console, disable=not show, redirect_stderr=False)
    with bar as progress, contextlib.redirect_stderr(io.StringIO()):
        yield progress


@contextlib.contextmanager
def _readable_errors(source: Path) -> Iterator[None]:
    """The libraries raise anything from struct.error to KeyError on a damaged file: name the file instead."""
    try:
        yield
    except KvferryError as error:
        raise FailedPrecondition(f"{source}: {error.message}") from error
    except Exception as error:
        raise FailedPrecondition(
            f"{source}: cannot be read as a GGUF model, it may be truncated ({type(error).__name__}: {error})"
        ) from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.gguf",
        description="Convert a GGUF file into a model folder (safetensors in float32, config, tokenizer).",
        epilog="example: python -m engine.gguf SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m-instruct",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE.gguf", help="the GGUF file")
    parser.add_argument("target", type=Path, metavar="TARGET_FOLDER", help="the folder to make; must not exist")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parsed = parser.parse_args(arguments)
    try:
        convert_gguf(parsed.source, parsed.target, show_progress=not parsed.quiet)
    except FailedPrecondition as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
