"""Small real tokenizers of the two families that language models use, trained in memory in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)

_LINES = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "hello world, how are you? I am fine. User: what? Assistant: nothing much.",
    "<|im_end|> and [INST] and </s> in text; 日本語 שלום 👩‍👩‍👧 🇩🇪 naïve café",
]


def byte_level_tokenizer(vocab_size: int = 420) -> Tokenizer:
    """Byte-level BPE as in GPT-2 and SmolLM, with ChatML tokens (special) and `<think>` (added, not special)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def byte_fallback_tokenizer(*, legacy: bool = True) -> Tokenizer:
    """BPE over `▁` words with `<0x..>` tokens for other characters, as in Llama 2: adds `<s>`, drops a first space.

    `legacy`: the space is put in front by a normaliser, in every part between special tokens; else by Metaspace, at the
    beginning only.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_LINES[:2] * 3, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """`byte_fallback_tokenizer` whose decoder is Metaspace alone: byte tokens read as their names."""
    tokenizer = byte_fallback_tokenizer(legacy=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, object] | None = None,
    tokenizer_config: dict[str, object] | None = None,
    generation_config: dict[str, object] | None = None,
) -> Path:
    """Writes the text side of a model folder; `config` gets the tokenizer's vocabulary size unless it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    whole_config = {"vocab_size": tokenizer.get_vocab_size(), **(config or {})}
    (folder / "config.json").write_text(json.dumps(whole_config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def write_chatml_folder(folder: Path) -> Path:
    """A byte-level model folder with the ChatML template; ends at `<|im_end|>` (2) and `<|endoftext|>` (0)."""
    return write_model_folder(
        folder,
        byte_level_tokenizer(),
        tokenizer_config={"eos_token": "<|im_end|>", "chat_template": CHATML_TEMPLATE},
        generation_config={"eos_token_id": [2, 0]},
    )


def write_llama_folder(folder: Path, *, legacy: bool = True) -> Path:
    """A byte-fallback model folder with a Llama 2 template; begins with `<s>` (1), ends at `</s>` (2)."""
    return write_model_folder(
        folder,
        byte_fallback_tokenizer(legacy=legacy),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": LLAMA_TEMPLATE},
        config={"eos_token_id": 2},
    )
