"""What the grammar of a request lets an output go on with. Torch-free.

    a call's `SamplingParams` ─► `Constraints.open`, off the event loop ─► `Sequence.constraint` ─► `logit_rules.py`

A constraint belongs to one choice and follows that choice's own output tokens, whoever sampled them: after a resume, a
hand-off or a preemption it reads on where it stands, from the beginning if it has to. Nothing of it is shipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import FailedPrecondition, InvalidArgument
from kvferry.grammar import CompiledGrammar, GrammarRefused, Grammars, reason_of
from kvferry.sampling import SamplingParams

T = TypeVar("T")

TOKENIZER_FILE = "tokenizer.json"


class OutputRefused(Exception):
    """This choice cannot go on, here or anywhere; the text says why."""


class Constraint:
    """How far one choice's output has come in its grammar; used by the thread that samples."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._special_token_ids = compiled.special_token_ids
        self._matcher = compiled.matcher.deep_copy()
        self._num_read = 0

    def fork(self) -> Self:
        """The same state for another choice that has the same output so far."""
        fork = type(self)(CompiledGrammar(self._matcher, self._special_token_ids))
        fork._num_read = self._num_read
        return fork

    def allowed(self, output: Sequence[int], vocab_size: int) -> npt.NDArray[np.bool_]:
        """Which ids may follow `output`, all tokens of the choice so far, `[vocab_size]`; ending ids mean nothing here.

        Raises OutputRefused where the output does not follow the grammar, or the grammar has become too complex.
        """
        return self._guarded(lambda: self._allowed(output, vocab_size))

    @property
    def is_complete(self) -> bool:
        """Whether the output that `allowed` was asked about may end."""
        return self._matcher.is_accepting()

    def _allowed(self, output: Sequence[int], vocab_size: int) -> npt.NDArray[np.bool_]:
        if self._num_read > len(output):  # a step that failed is run again, and had come further by a draft
            self._matcher.rollback(self._num_read - len(output))
            self._num_read = len(output)
        new = list(output[self._num_read :])
        if new and not self._matcher.consume_tokens(new):
            raise OutputRefused(f"the grammar leads no further: {reason_of(self._matcher)}")
        self._num_read = len(output)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise OutputRefused(f"the grammar leads no further: {reason_of(self._matcher)}")
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little", count=min(vocab_size, 8 * len(bits)))
        allowed[: len(known)] = known
        allowed[[token_id for token_id in self._special_token_ids if token_id < vocab_size]] = False
        return allowed

    @staticmethod
    def _guarded(job: Callable[[], T]) -> T:
        """Turns whatever the library raises into OutputRefused: it must not end the step of others."""
        try:
            return job()
        except (OutputRefused, AssertionError):
            raise
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # Rust's panic is no Exception
                raise OutputRefused(f"the grammar failed: {type(error).__name__}") from error
            raise


class Constraints:
    """Opens the constraints of one worker's calls."""

    def __init__(self, folder: Path, vocab_size: int, *, has_logits: bool = True) -> None:
        """`folder`: the model's, whose tokenizer.json is read now; `has_logits`: it can follow a grammar."""
        self._folder = folder
        self._has_logits = has_logits
        self._grammars = Grammars(self._read_tokenizer, vocab_size)
        if has_logits:
            self._grammars.prepare(_end_ids(folder))

    async def open(self, sampling: SamplingParams) -> Constraint | None:
        """A constraint at its beginning; None where the call has no grammar.

        Raises:
            InvalidArgument: the grammar cannot be compiled within the limits.
            FailedPrecondition: this model cannot follow one.
            ResourceExhausted: too many are being compiled.
        """
        if not sampling.grammar:
            return None
        if not self._has_logits:
            raise FailedPrecondition("a scripted model follows its script, and no grammar")
        try:
            return Constraint(await self._grammars.compiled(sampling.grammar, sampling.eos_token_ids))
        except GrammarRefused as error:
            raise InvalidArgument("sampling.grammar", str(error)) from error

    def close(self) -> None:
        """Ends the thread that compiles."""
        self._grammars.close()

    def _read_tokenizer(self) -> str:
        path = self._folder / TOKENIZER_FILE
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPrecondition(f"{path} cannot be read: {error}") from error


def _end_ids(folder: Path) -> tuple[int, ...]:
    """The ends of sequence, as a router finds them nearly always; where it says others the table is built anew."""
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if value is not None:
            return tuple(dict.fromkeys(value if isinstance(value, list) else [value]))
    return ()
