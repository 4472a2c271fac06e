"""Grammars of structured output: compiled once, off the event loop, bounded in time and memory. Torch-free.

    router:  field of the request ─► grammar (`router/constraint.py`) ─► `Grammars.compiled`: refused here, or sent on
    workers: `SamplingParams.grammar` ─► `Grammars.compiled` ─► `engine/constraint.py`, one matcher a choice

A grammar is llguidance's: text in its Lark dialect, or JSON with a JSON schema. Its bounds count work, not time, so
that one grammar meets the same fate on every machine. Special tokens have no text here: no grammar can ask for one, and
their text in a grammar stays text. Of other added tokens those that look like `<tool_call>` have none either: a grammar
asks for one by its id, and their text is spelled by other tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.errors import ResourceExhausted
from kvferry.telemetry import log_event

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GRAMMAR_BYTES = 64 << 10
"""Of a grammar's text. The library recurses along chains of rules: this much text cannot exhaust `STACK_BYTES`."""
STACK_BYTES = 512 << 20
"""Stack of the thread that compiles; only what is touched is memory, about 50 MB after the longest chain of rules."""
MAX_JOBS = 32
"""Compilations that run or wait: the worst take 2 s, and a client behind more of them is told to come back."""
MAX_COMPILED = 64
"""Compiled grammars that are kept: most take well below 1 MB, the worst about 50 MB."""
RETRY_AFTER_S = 1.0
MAX_REASON_CHARS = 300


class GrammarRefused(ValueError):
    """A grammar that is malformed, beyond the limits, or matches nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A matcher, and the ids that it must not be asked about since they have no text: it may name one all the same."""

    matcher: LLMatcher
    special_token_ids: tuple[int, ...]


class GrammarThread:
    """One thread for what has to do with compiling, made with the first job, and a bounded number of jobs for it."""

    def __init__(self, make: Callable[[], ThreadPoolExecutor]) -> None:
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._free = threading.Semaphore(MAX_JOBS)

    async def run(self, job: Callable[[], T]) -> T:
        """Result of `job`; raises ResourceExhausted when too many run or wait."""
        if not self._free.acquire(blocking=False):
            raise ResourceExhausted(f"{MAX_JOBS} grammars are being compiled", retry_after_s=RETRY_AFTER_S)
        try:
            if self._thread is None:
                self._thread = self._make()
            future = self._thread.submit(job)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops waiting jobs; a running one ends by itself."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


class Grammars:
    """The compiled grammars of one model. Its methods belong to one event loop."""

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int) -> None:
        """`read_tokenizer` gives tokenizer.json's text, when its table is built; token ids are below `vocab_size`."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], CompiledGrammar] = OrderedDict()
        self._tokens: _Tokens | None = None  # of the thread alone once a grammar was asked for
        self._thread = GrammarThread(_deep_thread)

    def prepare(self, eos_token_ids: tuple[int, ...]) -> None:
        """Builds the tokenizer's table now, before anything runs that would wait: the library keeps all threads from
        Python for it, 0.3 s with 49,152 tokens. What fails here is said at the first grammar.
        """
        if not eos_token_ids:
            return
        try:
            self._tokens = _Tokens(self._read_tokenizer(), self._vocab_size, eos_token_ids)
        except Exception as error:  # noqa: BLE001 - a tokenizer the library lacks, or none: grammars alone will fail
            log_event(
                logger,
                "no_grammars",
                level=logging.WARNING,
                reason=f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS],
            )

    async def compiled(self, grammar: str, eos_token_ids: tuple[int, ...]) -> CompiledGrammar:
        """With a matcher at the grammar's beginning, for the caller to copy.

        Args:
            eos_token_ids: the model's, at least one.

        Raises:
            GrammarRefused: it cannot be compiled within the limits, or no output can match it.
            ResourceExhausted: too many are being compiled.
        """
        key = (grammar, eos_token_ids)
        if key not in self._compiled:
            self._compiled[key] = await self.run(lambda: self._compile(grammar, eos_token_ids))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    async def run(self, job: Callable[[], T]) -> T:
        """Result of `job`, run in the thread that compiles; raises ResourceExhausted when too many wait for it."""
        return await self._thread.run(job)

    def close(self) -> None:
        """Drops waiting jobs; a running one ends by itself."""
        self._thread.close()

    def _compile(self, grammar: str, eos_token_ids: tuple[int, ...]) -> CompiledGrammar:
        num_bytes = len(grammar.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"has {num_bytes} bytes as a grammar; at most {MAX_GRAMMAR_BYTES} are allowed")
        if self._tokens is None or self._tokens.eos_token_ids != eos_token_ids:
            self._tokens = _Tokens(self._read_tokenizer(), self._vocab_size, eos_token_ids)
        matcher = LLMatcher(self._tokens.table, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the costliest step of many grammars; copies have it done
        if matcher.is_error():
            raise GrammarRefused(reason_of(matcher))
        return CompiledGrammar(matcher, self._tokens.special_token_ids)


class _Tokens:
    """What the library knows of a tokenizer."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        content = json.loads(tokenizer_json)
        added = content["added_tokens"]
        num_ids = max([len(content["model"]["vocab"]), vocab_size, *(token["id"] + 1 for token in added)])
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = tuple(token["id"] for token in added if token["special"])
        _rename_special(content)
        self.table = LLTokenizer(json.dumps(content), n_vocab=num_ids, eos_token=list(eos_token_ids))


def is_text(added_token: str, *, is_special: bool) -> bool:
    """Whether the library takes an added token for its text; else grammars can name it by its id, `<[42]>`, alone."""
    return not (is_special or (added_token.startswith("<") and added_token.endswith(">")))


def _rename_special(tokenizer: dict[str, Any]) -> None:
    """Gives tokens that are no text names that no text has: text that must come is tokenised, and must not give one."""
    model = tokenizer["model"]
    names = {}
    for token in tokenizer["added_tokens"]:
        if not is_text(token["content"], is_special=token["special"]):
            names[token["content"]] = token["content"] = f"\ue000{token['id']}\ue001"
            token["special"] = True
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher is in its error state, for people; nothing of the output."""
    if matcher.stop_reason() == "InternalError" and matcher.get_error().startswith("NoExtension"):
        return "no output can match it"
    if "doesn't satisfy the grammar" in matcher.get_error():
        return "the output so far does not match it"  # the library's words quote the token
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_REASON_CHARS]


def _limits() -> LLParserLimits:
    """A step's bounds are a quarter of the library's: a step of one sequence is waited for by its whole batch."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _deep_thread() -> ThreadPoolExecutor:
    """One thread, started now: the size of its stack is a setting of the process at that moment."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    previous_bytes = threading.stack_size(STACK_BYTES)
    try:
        thread.submit(int)
    finally:
        threading.stack_size(previous_bytes)
    return thread
