"""GGUF conversion, on a tiny Llama written with the gguf library: weights, tokenizer, ending ids, damage, atomicity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine import packed_weights
from engine.gguf import convert_gguf, main
from engine.lean_decoder import LeanDecoder
from engine.loader import load_model, quantised_fingerprint
from engine.model_folder import model_fingerprint
from kernels.decoder import NativeKernels, gate_up_rows, packed_linear
from kernels.native import open_native
from kvferry.config import Config
from kvferry.errors import FailedPrecondition
from tests.support.models import random_model

HEADS, KV_HEADS, HEAD_DIM, LAYERS, HIDDEN, INNER = 4, 2, 8, 2, 32, 48
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, "ĠĠ", "ĠĠĠ", "ĠĠĠĠ", "12"]
MERGES = ["Ġ Ġ", "ĠĠ Ġ", "ĠĠ ĠĠ", "1 2"]

CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order that GGUF keeps them in."""
    return weight.reshape(num_heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    pre_tokenizer: str = "smollm",
    *,
    inner: int = INNER,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random model, its tensors in `kinds` by their short names; returns its weights by transformers' names."""
    kinds = kinds or {}
    config = LlamaConfig(**{**CONFIG.to_dict(), "intermediate_size": inner})
    weights = {name: tensor.detach() for name, tensor in random_model(config).named_parameters()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, array: np.ndarray, kind: GGMLQuantizationType | None) -> None:
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", weights["model.embed_tokens.weight"].numpy(), kinds.get("token_embd"))
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(LAYERS):
        for name, short in NAMES.items():
            array = weights[f"model.layers.{layer}.{name}.weight"].numpy()
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
            add(f"blk.{layer}.{short}.weight", permuted(array, heads) if heads else array, kinds.get(short))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "tiny"
    convert_gguf(source, target)
    return target


def test_weights_are_exact(converted: Path, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "again.gguf")
    ours = load_file(converted / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_the_folder_loads(converted: Path) -> None:
    loaded = load_model(converted, dtype="float32", block_size=16)
    assert loaded.max_context == 256
    assert loaded.vocab_size == len(TOKENS)


KINDS = {
    "token_embd": GGMLQuantizationType.Q8_0,
    **dict.fromkeys(("attn_q", "attn_v", "attn_output", "ffn_gate"), GGMLQuantizationType.Q4_1),
    "attn_k": GGMLQuantizationType.Q8_0,
    **dict.fromkeys(("ffn_up", "ffn_down"), GGMLQuantizationType.Q4_0),
}
"""Q8_0 and Q4_1 meet in one packed matrix, and so do Q4_0 and Q4_1."""


def test_a_quantised_file_keeps_its_values_to_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file through its conversion to packed weights, which several loads share; auto finds them, too."""
    monkeypatch.setattr(packed_weights, "LEAST_KEPT_BYTES", 0)
    write_gguf(tmp_path / "mixed.gguf", inner=64, kinds=KINDS)
    folder = tmp_path / "mixed"
    convert_gguf(tmp_path / "mixed.gguf", folder)
    kernels = NativeKernels(open_native(Config().model.kernels_path), 1)
    for quantization in ("int4", "auto"):
        loaded = load_model(
            folder,
            dtype="bfloat16",
            block_size=16,
            kernels=kernels,
            packed_folder=tmp_path / "packed",
            quantization=quantization,
        )
        assert isinstance(loaded.forward, LeanDecoder)
        assert loaded.layout.model_fingerprint == quantised_fingerprint(model_fingerprint(folder), "int4")
    (path,) = (tmp_path / "packed").iterdir()
    packed, right = load_file(path), load_file(folder / "model.safetensors")
    assert torch.equal(
        packed_linear(packed, "head").rows(torch.arange(len(TOKENS))), right["model.embed_tokens.weight"]
    )
    for layer in range(LAYERS):
        heads = [right[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
        projection = packed_linear(packed, f"{layer}.projection")
        assert torch.equal(projection.rows(torch.arange(len(torch.cat(heads)))), torch.cat(heads))
        for name, rows in zip(("gate", "up"), gate_up_rows(64), strict=True):
            ours = packed_linear(packed, f"{layer}.gate_up").rows(rows)
            assert torch.equal(ours, right[f"model.layers.{layer}.mlp.{name}_proj.weight"])
        for short, name in (("output", "self_attn.o"), ("down", "mlp.down")):
            ours = packed_linear(packed, f"{layer}.{short}").rows(torch.arange(HIDDEN))
            assert torch.equal(ours, right[f"model.layers.{layer}.{name}_proj.weight"])
    assert packed["0.output"].numel() == HIDDEN * HIDDEN // 2  # two codes a byte
    assert packed["0.projection"].numel() == HIDDEN * 2 * HIDDEN


def test_auto_leaves_other_models_as_they_are(tmp_path: Path) -> None:
    write_gguf(tmp_path / "plain.gguf", inner=64)
    convert_gguf(tmp_path / "plain.gguf", tmp_path / "plain")
    kernels = NativeKernels(open_native(Config().model.kernels_path), 1)
    for team in (kernels, None):
        auto = load_model(tmp_path / "plain", dtype="bfloat16", block_size=16, kernels=team, quantization="auto")
        assert auto.layout.model_fingerprint == model_fingerprint(tmp_path / "plain")


def test_auto_rounds_nothing(tmp_path: Path) -> None:
    """A weight beyond those that are looked at first is no code: found when they are packed."""
    write_gguf(tmp_path / "mixed.gguf", inner=64, kinds=KINDS)
    convert_gguf(tmp_path / "mixed.gguf", tmp_path / "mixed")
    path = tmp_path / "mixed" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][31, 63] += 1e-3
    save_file(weights, path, {"format": "pt"})
    kernels = NativeKernels(open_native(Config().model.kernels_path), 1)
    with pytest.raises(FailedPrecondition, match=r"auto: 1 linear.* would be rounded"):
        load_model(tmp_path / "mixed", dtype="bfloat16", block_size=16, kernels=kernels, quantization="auto")
    rounded = load_model(tmp_path / "mixed", dtype="bfloat16", block_size=16, kernels=kernels, quantization="int4")
    assert isinstance(rounded.forward, LeanDecoder)
    assert rounded.forward.num_rounded == 1


def test_ending_ids_and_chat_template_are_there(converted: Path) -> None:
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    described = json.loads((converted / "tokenizer_config.json").read_text())
    assert described["chat_template"] == TEMPLATE
    assert (described["bos_token"], described["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert described["model_max_length"] == 256
    assert "local_files_only" not in described


def test_the_tokenizer_cuts_as_the_original(converted: Path) -> None:
    """Digits one by one, and blanks before a digit together: the rule of this family, which a plain GPT-2 lacks."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(converted)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a    12<|im_end|>")["input_ids"])
    assert pieces == ["a", "ĠĠĠĠ", "1", "2", "<|im_end|>"]


@pytest.mark.parametrize("text", ["hello  world\n\tx = 1234", "日本語 🙂 naïve", "", " ", "<|im_start|>user\n"])
def test_text_survives_the_round_trip(converted: Path, text: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(converted)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_unknown_splitting_rule_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="martian")
    with pytest.raises(FailedPrecondition, match="martian"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.05, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_leaves_nothing(source: Path, tmp_path: Path, kept: float) -> None:
    damaged = tmp_path / "damaged.gguf"
    data = source.read_bytes()
    damaged.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(FailedPrecondition, match=r"damaged\.gguf"):
        convert_gguf(damaged, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.gguf"]


def test_an_existing_target_is_left_alone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="is there already"):
        convert_gguf(source, tmp_path)
    with pytest.raises(FailedPrecondition, match="no such GGUF file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "target")


def test_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), str(tmp_path / "target")]) == 0
    assert (tmp_path / "target" / "tokenizer.json").is_file()
    assert "done" in capsys.readouterr().err
    assert main(["--quiet", str(source), str(tmp_path / "target")]) == 1
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "example: python -m engine.gguf" in capsys.readouterr().out
