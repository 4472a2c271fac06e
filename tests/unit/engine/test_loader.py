"""Loading: what is served, and what is refused with the file, tensor or property named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from engine import loader
from engine.forward_batch import SequenceSlice
from engine.kv_cache import PagedKvCache
from engine.loader import GenericForward, LoadedModel, load_model
from engine.model_folder import INDEX_FILE, SINGLE_WEIGHTS_FILE, model_fingerprint
from engine.paged_attention import ATTENTION_NAME, build_paged_batch, paged_attention_forward
from kvferry.errors import FailedPrecondition
from tests.support.models import (
    ARCHITECTURES,
    MAX_CONTEXT,
    NUM_LAYERS,
    VOCAB_SIZE,
    random_model,
    save_tiny_model,
    save_tiny_tokenizer,
    tiny_config,
)

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def load(folder: Path, dtype: str = "float32", max_context: int | None = None) -> LoadedModel:
    return load_model(folder, dtype=dtype, block_size=16, max_context=max_context)


def model_of(loaded: LoadedModel) -> PreTrainedModel:
    assert isinstance(loaded.forward, GenericForward)
    return loaded.forward.model


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE_WEIGHTS_FILE).items()}
    edit(tensors)
    save_file(tensors, folder / SINGLE_WEIGHTS_FILE, metadata={"format": "pt"})


def save(folder: Path, config: PreTrainedConfig) -> Path:
    random_model(config).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_architectures_load(tmp_path: Path, architecture: str, dtype: str) -> None:
    loaded = load(save_tiny_model(tmp_path / architecture, architecture), dtype)
    assert {parameter.dtype for parameter in model_of(loaded).parameters()} == {getattr(torch, dtype)}
    assert (loaded.layout.num_layers, loaded.layout.head_dim, loaded.layout.dtype) == (NUM_LAYERS, 16, dtype)
    assert (loaded.max_context, loaded.vocab_size) == (MAX_CONTEXT, VOCAB_SIZE)


def test_a_sharded_folder_is_the_same_model(llama: Path, tmp_path: Path) -> None:
    sharded = save_tiny_model(tmp_path / "sharded", "llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = model_of(load(llama)).state_dict(), model_of(load(sharded)).state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_weights_are_shared_through_the_page_cache(llama: Path) -> None:
    """Two workers on one machine should not hold the weights twice."""
    loaded = load(llama)
    assert loaded.layout.dtype == "float32"
    assert str(llama / SINGLE_WEIGHTS_FILE) in Path("/proc/self/maps").read_text()


FOLDER_DAMAGES: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "config.json: is missing"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: is missing"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    "no weights": (lambda folder: (folder / SINGLE_WEIGHTS_FILE).unlink(), SINGLE_WEIGHTS_FILE),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "config without type": (lambda folder: (folder / "config.json").write_text("{}"), "config.json"),
    "unknown type": (lambda folder: edit_config(folder, model_type="no-such-model"), "no-such-model"),
    "empty weights": (lambda folder: (folder / SINGLE_WEIGHTS_FILE).write_bytes(b""), "truncated"),
}


@pytest.mark.parametrize("damage", FOLDER_DAMAGES)
def test_a_damaged_folder_is_refused_by_name(copy: Path, damage: str) -> None:
    apply, named = FOLDER_DAMAGES[damage]
    apply(copy)
    with pytest.raises(FailedPrecondition, match=named):
        load(copy)


@pytest.mark.parametrize("num_bytes", [4, 8, 100, 50_000, -1])
def test_truncated_weights_are_refused(copy: Path, num_bytes: int) -> None:
    path = copy / SINGLE_WEIGHTS_FILE
    data = path.read_bytes()
    path.write_bytes(data[:num_bytes])
    with pytest.raises(FailedPrecondition, match=f"{SINGLE_WEIGHTS_FILE}: truncated"):
        load(copy)


@pytest.mark.parametrize("header", [b"[]", b"nonsense", b'{"a": 3}', b'{"a": {"data_offsets": [0, "x"]}}'])
def test_a_wrong_header_is_refused(copy: Path, header: bytes) -> None:
    (copy / SINGLE_WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(FailedPrecondition, match=f"{SINGLE_WEIGHTS_FILE}: its safetensors header"):
        load(copy)


def test_a_longer_file_than_its_header_says_is_refused(copy: Path) -> None:
    with (copy / SINGLE_WEIGHTS_FILE).open("ab") as file:
        file.write(b"more")
    with pytest.raises(FailedPrecondition, match="last tensor ends"):
        load(copy)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_a_missing_tensor_is_never_filled_in(copy: Path, name: str) -> None:
    edit_weights(copy, lambda tensors: tensors.pop(name))
    with pytest.raises(FailedPrecondition, match=name):
        load(copy)


def test_a_tensor_of_another_shape_is_refused(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(FailedPrecondition, match=r"model\.norm\.weight"):
        load(copy)


def test_a_missing_shard_and_a_lying_index_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "sharded", "llama", max_shard_size="100KB")
    index = json.loads((folder / INDEX_FILE).read_text())
    shard = folder / index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.ghost.weight"] = shard.name
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(FailedPrecondition, match=rf"{shard.name}: lacks tensor model\.ghost\.weight"):
        load(folder)
    shard.unlink()
    with pytest.raises(FailedPrecondition, match=f"{shard.name}: is missing"):
        load(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(FailedPrecondition, match="outside the folder"):
        load(folder)


SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SMALL |= {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def refused_configs() -> dict[str, tuple[PreTrainedConfig, str]]:
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
    latent: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    latent |= {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16}
    latent |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    return {
        "attention sinks": (GptOssConfig(**SMALL, **experts, num_key_value_heads=1, intermediate_size=32), "s_aux"),
        "no attention": (MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2), "mamba"),
        "own attention": (BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=2), "bloom"),
        "latent attention": (
            DeepseekV3Config(**SMALL, **latent, num_key_value_heads=2, intermediate_size=32),
            "latent attention",
        ),
    }


@pytest.mark.parametrize("kind", ["attention sinks", "no attention", "own attention", "latent attention"])
def test_a_model_that_cannot_be_exact_is_refused(tmp_path: Path, kind: str) -> None:
    config, reason = refused_configs()[kind]
    folder = save(tmp_path / "model", config)
    with pytest.raises(FailedPrecondition, match=reason):
        load(folder, max_context=256)


def test_an_encoder_decoder_model_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps(T5Config().to_dict()))
    with pytest.raises(FailedPrecondition, match="encoder-decoder"):
        load(copy, max_context=256)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layers other than"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layers other than"),
        ({"attention_chunk_size": 16}, "chunked attention"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"sliding_window": 7}, "window 7 but asks for None"),
    ],
)
def test_a_configuration_that_paged_attention_lacks_is_refused(
    copy: Path, changes: dict[str, Any], reason: str
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(FailedPrecondition, match=reason):
        load(copy)


def test_a_rescaling_rotary_embedding_is_refused_where_it_can_rescale(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors}
    rope |= {"original_max_position_embeddings": 128, "factor": 2.0}
    config = LlamaConfig(**SMALL, num_key_value_heads=1, intermediate_size=32, rope_parameters=rope)
    folder = save(tmp_path / "model", config)
    with pytest.raises(FailedPrecondition, match="max_context 256"):
        load(folder)
    assert load(folder, max_context=128).max_context == 128


def test_a_model_that_computes_something_else_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last net: whatever is wrong with attention shows in the logits of the two-chunk check."""

    def without_last_head(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        mixed, weights = paged_attention_forward(*args, **kwargs)
        mixed[:, :, -1] = 0.0
        return mixed, weights

    monkeypatch.setattr(
        loader, "register_attention", lambda: AttentionInterface.register(ATTENTION_NAME, without_last_head)
    )
    try:
        with pytest.raises(FailedPrecondition, match="something else on paged attention"):
            load(llama)
    finally:
        AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def test_tied_output_weights_are_fine(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tied", "llama_tied")
    assert "lm_head.weight" not in load_file(folder / SINGLE_WEIGHTS_FILE)
    weights = model_of(load(folder)).state_dict()
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


def test_fingerprint_is_equal_for_equal_folders_only(llama: Path, copy: Path, tmp_path: Path) -> None:
    first = model_fingerprint(llama)
    assert model_fingerprint(copy) == first
    assert load(copy).layout.model_fingerprint == first
    assert model_fingerprint(save_tiny_model(tmp_path / "other", "llama", seed=1)) != first
    edit_weights(copy, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"].add_(1e-3))
    assert model_fingerprint(copy) != first
    shutil.copy(llama / SINGLE_WEIGHTS_FILE, copy)
    assert model_fingerprint(copy) == first
    edit_config(copy, rms_norm_eps=1e-3)
    assert model_fingerprint(copy) != first


def test_fingerprint_of_large_files_samples_every_tensor(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model_folder.HASHED_WHOLE_BYTES", 0)
    seen = {model_fingerprint(copy)}
    for name in load_file(copy / SINGLE_WEIGHTS_FILE):
        edit_weights(copy, lambda tensors, name=name: tensors[name].mul_(1.01))  # type: ignore[misc]
        seen.add(model_fingerprint(copy))
    assert len(seen) == 1 + len(load_file(copy / SINGLE_WEIGHTS_FILE))


def test_logits_are_only_computed_for_the_rows_asked(llama: Path) -> None:
    loaded = load(llama)
    cache = PagedKvCache(loaded.layout, 2)
    batch = build_paged_batch([SequenceSlice("s", [5, 6, 7], 0, [1], None)], 16, cache.tensor)
    reference = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(
        loaded.forward.logits(batch, torch.tensor([0, 2])), expected[[0, 2]], rtol=1e-4, atol=1e-4
    )
    assert loaded.forward.logits(batch, torch.tensor([], dtype=torch.int64)).shape == (0, VOCAB_SIZE)


def test_tiny_config_of_nothing() -> None:
    with pytest.raises(ValueError, match="no tiny configuration"):
        tiny_config("nothing")
