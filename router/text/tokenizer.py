"""The tokenizer of one model: prompt text or chat → token ids, and the tables for the way back.

Path of a request: `encode_async` or `encode_chat_async` (here) → ids to the workers → ids back into `ChoiceText`
(`output_text.py`), which uses `token_bytes`.

Text prompts are encoded as they are: the text of a special token in them is that token, so a caller who renders chats
himself can do so. Chats go through the model's template, and control text typed into a content stays text
(`control_text.py`). BOS stands at the beginning exactly once: the tokenizer's own is added to a text prompt that does
not begin with it, and never to a chat, where the template writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvferry.errors import ContextExceeded, FailedPrecondition, InvalidArgument
from kvferry.grammar import is_text
from router.grammar_checker import GrammarChecker
from router.text.chat_template import FIELD as CHAT_FIELD
from router.text.chat_template import NO_ARGUMENTS, ChatMessage, ChatTemplate, JsonObject, Tool, json_chars
from router.text.control_text import ControlText
from router.text.detokenizer import decode
from router.text.encode_queue import EncodeQueue, T
from router.text.model_files import ModelFiles
from router.text.text_length import LengthBound
from router.text.token_bytes import TokenBytes

TEXT_FIELD = "prompt.text"

INLINE_CHARS = 2048
"""Prompts up to this are encoded at once (about 1 ms): a thread's turn behind long prompts would cost more."""

MESSAGE_CHARS = 16
"""What a message counts for beside its text, so that very many empty ones do not pass as a short prompt."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What is refused before it is encoded: more UTF-8 bytes, or text that certainly gives more tokens (None: any)."""

    max_tokens: int | None
    max_bytes: int


class TextTokenizer:
    """One model's tokenizer; safe to use from several threads.

    Attributes:
        vocab_size: rows of the model's embedding; no prompt holds an id at or above it.
        bos_token_id: beginning-of-text id, None where the model has none.
        eos_token_ids: end-of-sequence ids, in the model folder's order.
        token_bytes: bytes of each id, and which ids are special.
        chat_template: renders chats.
        length_bound: tokens that a text gives at least.
        grammars: makes those of structured output.
        named_ids: added tokens that grammars can only ask for by their id, though they are text to all else, by text.
    """

    def __init__(self, tokenizer: Tokenizer, files: ModelFiles, queue: EncodeQueue) -> None:
        tokenizer.no_truncation()  # saved settings of training; a prompt is never cut or padded
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._queue = queue
        self.vocab_size = files.vocab_size
        added = tokenizer.get_added_tokens_decoder()
        self.named_ids = {
            token.content: token_id
            for token_id, token in added.items()
            if not token.special and not is_text(token.content, is_special=False)
        }
        self.token_bytes = TokenBytes.of(tokenizer)
        self.bos_token_id = self._id_of(files.special_texts.get("bos_token"))
        self.eos_token_ids = files.eos_token_ids or self._ids_of(files.special_texts.get("eos_token"))
        self.grammars = GrammarChecker(
            lambda: files.tokenizer_json,
            files.vocab_size,
            eos_token_ids=self.eos_token_ids,
            named_ids=self.named_ids,
        )
        self.chat_template = ChatTemplate(files.chat_template, files.special_texts, tool_source=files.tool_template)
        self.length_bound = LengthBound.of(tokenizer)
        self._control = ControlText(tokenizer, self.chat_template)
        self._prefix = self._prompt_prefix(files.add_bos_token)
        self._has_foreign_ids = len(self.token_bytes.by_id) > self.vocab_size

    @classmethod
    def load(cls, folder: Path, *, num_threads: int = 1, max_jobs: int = 64) -> TextTokenizer:
        """Reads a model folder; raises FailedPrecondition naming the file that is missing, broken or not supported.

        `max_jobs`: prompts being encoded or waiting for it, before ResourceExhausted.
        """
        files = ModelFiles.read(folder)
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise FailedPrecondition(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
        return cls(tokenizer, files, EncodeQueue(num_threads=num_threads, max_jobs=max_jobs))

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids whose text is left out when special tokens are skipped."""
        return self.token_bytes.special_ids

    def special_id(self, text: str) -> int | None:
        """Id of the special token of this text; None where there is none."""
        token_id = self._id_of(text)
        return token_id if token_id in self.token_bytes.special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text prompt; empty text may give none. Raises InvalidArgument for text that cannot be encoded."""
        ids = self._guarded(TEXT_FIELD, lambda: self._encode_plainly(text))
        prefix = self._prefix if add_special_tokens else []
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        arguments: JsonObject = NO_ARGUMENTS,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a chat. Raises InvalidArgument as `ChatTemplate.render` does, and for text that cannot be encoded."""
        return self._guarded(CHAT_FIELD, lambda: self._encode_chat(messages, tools, arguments, add_generation_prompt))

    async def encode_async(self, text: str, *, limits: PromptLimits, add_special_tokens: bool = True) -> list[int]:
        """`encode` off the event loop, after the cheap refusals. Raises also ResourceExhausted when too many wait."""
        self._check_length(TEXT_FIELD, [text], limits)
        return await self._run(len(text), lambda: self.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat_async(
        self,
        messages: Sequence[ChatMessage],
        *,
        limits: PromptLimits,
        tools: Sequence[Tool] = (),
        arguments: JsonObject = NO_ARGUMENTS,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """`encode_chat` off the event loop, after the cheap refusals; see `encode_async`."""
        texts = [text for message in messages for text in (message.role, message.content)]
        self._check_length(CHAT_FIELD, texts, limits)
        num_chars = sum(map(len, texts)) + MESSAGE_CHARS * len(messages) + json_chars(messages, tools, arguments)
        return await self._run(
            num_chars,
            lambda: self.encode_chat(
                messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
            ),
        )

    def bad_word_token_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The sequences of ids that a word is at the beginning of a text, and behind a space where that differs.

        As in vLLM. Raises InvalidArgument for a word that cannot be encoded.
        """
        bare = word.lstrip()
        plain = tuple(self._guarded("sampling.bad_words", lambda: self._encode_plainly(bare)))
        spaced = tuple(self._guarded("sampling.bad_words", lambda: self._encode_plainly(f" {bare}")))
        is_other_word = spaced != plain and len(spaced) == len(plain) and spaced[:1] != plain[:1]
        return (plain, spaced) if is_other_word else (plain,)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary add none."""
        return decode(self.token_bytes, token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As `decode`, in a thread where there are many; raises ResourceExhausted when too much waits for one."""
        return await self._run(len(token_ids), lambda: self.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """Ends the threads; prompts still waiting are dropped."""
        self._queue.close()
        self.grammars.close()

    async def _run(self, num_chars: int, job: Callable[[], T]) -> T:
        return job() if num_chars <= INLINE_CHARS else await self._queue.run(job)

    def _encode_plainly(self, text: str) -> list[int]:
        # The batch call lets other threads run meanwhile; `Tokenizer.encode` holds the interpreter for seconds.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        arguments: JsonObject,
        add_generation_prompt: bool,
    ) -> list[int]:
        marked = self._control.mark(messages, tools, arguments)
        messages, tools, arguments = marked or (messages, tools, arguments)
        rendered = self.chat_template.render(
            messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt
        )
        return self._encode_plainly(rendered) if marked is None else self._control.encode_marked(rendered)

    def _guarded(self, field: str, job: Callable[[], list[int]]) -> list[int]:
        """Turns whatever the tokenizer raises on a text into InvalidArgument."""
        try:
            ids = job()
        except (InvalidArgument, FailedPrecondition):
            raise
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # Rust's panic is no Exception
                raise InvalidArgument(field, f"cannot be tokenised: {error}") from error
            raise
        if self._has_foreign_ids and max(ids, default=0) >= self.vocab_size:
            raise InvalidArgument(field, f"gives token id {max(ids)}, but the model has ids below {self.vocab_size}")
        return ids

    def _check_length(self, field: str, texts: Sequence[str], limits: PromptLimits) -> None:
        try:
            num_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise InvalidArgument(field, f"is not Unicode text: {error}") from error
        if num_bytes > limits.max_bytes:
            raise InvalidArgument(field, f"is {num_bytes} bytes long, at most {limits.max_bytes} are allowed")
        if limits.max_tokens is None:
            return
        num_tokens = max(map(self.length_bound.min_tokens, texts), default=0)
        if num_tokens > limits.max_tokens:
            raise ContextExceeded(field, f"gives {num_tokens} tokens or more, at most {limits.max_tokens} are allowed")

    def _prompt_prefix(self, add_bos_token: bool | None) -> list[int]:
        """Ids that every text prompt begins with: tokenizer_config.json decides, else tokenizer.json."""
        if add_bos_token is not None:
            return [self.bos_token_id] if add_bos_token and self.bos_token_id is not None else []
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a").ids
        starts = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        return whole[: next(starts, 0)]

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    def _ids_of(self, text: str | None) -> tuple[int, ...]:
        token_id = self._id_of(text)
        return () if token_id is None else (token_id,)
