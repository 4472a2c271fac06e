"""Tiny random models of several architectures, saved as model folders: real weights files, configs and a tokenizer.

Weights are drawn larger than usual, so that the two best logits are well apart and a greedy decision does not hang on
rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from engine.scripted import SCRIPT_FILE, ScriptConfig

VOCAB_SIZE = 320
BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257
MAX_CONTEXT = 2048
NUM_LAYERS = 3
WINDOW = 20
MATRIX_SCALE = 2.5  # standard deviation of a weight, times the square root of its fan-in

CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
TOOL_TEMPLATES = {
    "hermes": (
        "{% if tools %}<|bos|>system\nFunctions:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
        'Write <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call> to call one.<|eos|>\n{% endif %}'
        "{% for message in messages %}<|bos|>{{ message.role }}\n"
        "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
        "{% else %}{{ message.content }}{% endif %}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|eos|>\n{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
    ),
    "llama3_json": (
        "{% for message in messages %}<|bos|>{{ message.role }}\n{% if loop.first and tools %}Functions:\n"
        "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}"
        'Write {"name": NAME, "parameters": OBJECT} or <|python_tag|>.\n{% endif %}{% if message.tool_calls %}'
        '{"name": "{{ message.tool_calls[0].function.name }}", "parameters": '
        "{{ message.tool_calls[0].function.arguments | tojson }}}"
        "{% else %}{{ message.content }}{% endif %}<|eos|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}[TOOL_RESULTS] "
        '{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% elif message.tool_calls is defined %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
        '{{ call.function | tojson }} {{ call.id }}{{ ", " if not loop.last }}{% endfor %}]<|eos|>'
        "{% else %}[INST]{{ message.name or '' }} {{ message.content }}[/INST]{% endif %}{% endfor %}"
    ),
}
"""Of three families: `<tool_call>` is an added token there, `<|python_tag|>` and `[TOOL_CALLS]` are special ones."""
TOOL_MARKERS = {
    "hermes": AddedToken("<tool_call>", special=False, normalized=False),
    "llama3_json": AddedToken("<|python_tag|>", special=True, normalized=False),
    "mistral": AddedToken("[TOOL_CALLS]", special=True, normalized=False),
}


def tiny_config(architecture: str) -> PreTrainedConfig:
    """Configuration of one of `ARCHITECTURES`: three layers, four heads, 64 wide."""
    ids: dict[str, Any] = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": EOS_TOKEN_ID}
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_CONTEXT,
        **ids,
    }
    grouped = {**common, "num_key_value_heads": 2, "intermediate_size": 96}
    mixed_layers = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = {**grouped, "head_dim": 16, "sliding_window": WINDOW, "layer_types": mixed_layers}
    gemma["tie_word_embeddings"] = False  # tied and scaled up, the input token would win whatever attention says
    gpt2: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": NUM_LAYERS,
        "n_head": 4,
        "n_positions": MAX_CONTEXT,
    }
    match architecture:
        case "llama":
            return LlamaConfig(**grouped)
        case "llama_tied":
            return LlamaConfig(**grouped, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**grouped)
        case "qwen3":
            return Qwen3Config(**grouped, head_dim=16)
        case "mistral":
            return MistralConfig(**grouped, sliding_window=WINDOW)
        case "mixtral":
            return MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        case "gemma2":
            return Gemma2Config(**gemma, query_pre_attn_scalar=16, attn_logit_softcapping=5.0)
        case "gemma3":
            return Gemma3TextConfig(**gemma, query_pre_attn_scalar=16)
        case "opt":
            return OPTConfig(**common, ffn_dim=96, word_embed_proj_dim=64)
        case "gpt2":
            return GPT2Config(**gpt2, **ids)
    raise ValueError(f"no tiny configuration for {architecture!r}")


ARCHITECTURES = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3", "opt", "gpt2")


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with random weights; equal seeds give equal models."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                scale = MATRIX_SCALE * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def save_tiny_model(
    folder: Path, architecture: str, *, seed: int = 0, tool_format: str | None = None, **save_arguments: Any
) -> Path:
    """Make `folder` a model folder; `save_arguments` go to save_pretrained (max_shard_size for a sharded one)."""
    random_model(tiny_config(architecture), seed).save_pretrained(folder, **save_arguments)
    save_tiny_tokenizer(folder, tool_format)
    return folder


def save_scripted_model(folder: Path, config: ScriptConfig | None = None, *, tool_format: str | None = None) -> Path:
    """Make `folder` one that the scripted runner serves."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(folder, tool_format)
    (folder / SCRIPT_FILE).write_text((config or ScriptConfig(vocab_size=VOCAB_SIZE)).model_dump_json(indent=2))
    return folder


def save_tiny_tokenizer(folder: Path, tool_format: str | None = None) -> None:
    """A tokenizer of single bytes: ids 0 to 255, then `<|bos|>`, `<|eos|>`; with a chat template.

    `tool_format`: the chat template has tools, and the format's marker is token 258.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|bos|>", "<|eos|>"])
    if tool_format is not None:
        core.add_tokens([TOOL_MARKERS[tool_format]])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|eos|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE if tool_format is None else TOOL_TEMPLATES[tool_format]
    tokenizer.save_pretrained(folder)
