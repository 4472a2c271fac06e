"""Reads the text side of a model folder: tokenizer.json, tokenizer_config.json, generation_config.json, config.json.

Everything is read once, when the router starts. A file that is missing or does not hold what it must raises
FailedPrecondition naming the file, so that a broken folder is told at start and never by a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import FailedPrecondition

JsonObject = Mapping[str, object]
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Parsed files of one model folder; the optional ones are empty where the folder has none.

    Attributes:
        folder: where they lie.
        tokenizer_json: text of tokenizer.json.
        tokenizer_config: tokenizer_config.json, optional.
        generation_config: generation_config.json, optional.
        config: config.json.
        chat_template: source of the template, from chat_template.jinja or tokenizer_config.json; None without one.
        tool_template: source of the one for chats with tools, where the model has one of its own for them.
    """

    folder: Path
    tokenizer_json: str
    tokenizer_config: JsonObject
    generation_config: JsonObject
    config: JsonObject
    chat_template: str | None
    tool_template: str | None

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """Raises FailedPrecondition for a file that is missing or broken."""
        tokenizer_config = read_object(folder / "tokenizer_config.json", required=False)
        templates = _chat_templates(folder, tokenizer_config)
        return cls(
            folder=folder,
            tokenizer_json=_read_text(folder / "tokenizer.json"),
            tokenizer_config=tokenizer_config,
            generation_config=read_object(folder / GENERATION_CONFIG, required=False),
            config=read_object(folder / "config.json", required=True),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: ids at or above it do not exist for the model."""
        value = self._model_value("vocab_size")
        if not isinstance(value, int) or value < 1:
            raise FailedPrecondition(
                f"{self.folder / 'config.json'}: vocab_size is {value!r}, expected a number above 0"
            )
        return value

    @property
    def special_texts(self) -> dict[str, str]:
        """Named special tokens as a chat template sees them: `bos_token`, `eos_token` … and their text."""
        texts: dict[str, str] = {}
        for name, value in self.tokenizer_config.items():
            content = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(content, str):
                texts[name] = content
        return texts

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of generation_config.json, else of config.json, else none."""
        for file, value in (
            (GENERATION_CONFIG, self.generation_config.get("eos_token_id")),
            ("config.json", self._model_value("eos_token_id")),
        ):
            if value is not None:
                return self._ids(file, value)
        return ()

    @property
    def add_bos_token(self) -> bool | None:
        """Whether a text prompt starts with BOS; None: tokenizer.json decides."""
        value = self.tokenizer_config.get("add_bos_token")
        return value if isinstance(value, bool) else None

    def _model_value(self, name: str) -> object:
        """A value of config.json, or of its `text_config` for models with several parts."""
        if self.config.get(name) is not None:
            return self.config[name]
        text_config = self.config.get("text_config")
        return text_config.get(name) if isinstance(text_config, Mapping) else None

    def _ids(self, file: str, value: object) -> tuple[int, ...]:
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and item >= 0 for item in ids):
            raise FailedPrecondition(f"{self.folder / file}: eos_token_id is {value!r}, expected ids")
        return tuple(dict.fromkeys(ids))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FailedPrecondition(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPrecondition(f"{path} cannot be read: {error}") from error


def read_object(path: Path, *, required: bool) -> JsonObject:
    """Object of a JSON file, empty for one that need not be there. Raises FailedPrecondition naming the file."""
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise FailedPrecondition(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FailedPrecondition(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _chat_templates(folder: Path, tokenizer_config: JsonObject) -> Mapping[str, str]:
    """By name; a single one is `default`. Files win over tokenizer_config.json."""
    template = tokenizer_config.get("chat_template")
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found = {item.get("name"): item.get("template") for item in named if isinstance(item, Mapping)}
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    if any(path.exists() for path in files.values()):
        found = {name: _read_text(path) for name, path in files.items() if path.exists()}
    return {str(name): source for name, source in found.items() if isinstance(source, str)}
