"""A GGUF file as a model: the same function as a NumPy forward pass over the file's own rows."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx

from trm_jax.models import export_pretrained, load_pretrained
from trm_jax.models.pretrained import load_tokenizer, read_gguf

IDS = np.array([3, 17, 8, 0, 39, 21])


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_states_and_logits_are_those_of_numpy(write_tiny_llama, llama_forward, tied):
    path = write_tiny_llama(tied=tied).path
    source = read_gguf(path)
    weights = {name: value.astype(np.float64) for name, value in source.tensors.items()}
    hidden, logits = llama_forward(source.config, weights, IDS)
    model = load_pretrained(path)
    assert model.config.tie_embeddings == tied
    found = model(IDS[None].astype(np.int32)).hidden[0]
    # Two blocks of width 64 in float32; the norms of the random file make states of up to ten.
    np.testing.assert_allclose(found, hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found @ model.head().T, logits, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_files_fill_their_own_parameters(write_tiny_llama, architecture):
    written = write_tiny_llama(architecture=architecture)
    model = load_pretrained(written.path)
    assert (model.config.qkv_bias, model.config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    own, name = ("query_bias", "attn_q.bias") if architecture == "qwen2" else ("key_norm", "attn_k_norm.weight")
    expected = np.stack([written.values[f"blk.{layer}.{name}"] for layer in range(2)])
    np.testing.assert_array_equal(getattr(model.blocks, own).get_value(), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_file_becomes_a_directory_with_its_words(write_tiny_llama, tmp_path, architecture):
    pytest.importorskip("tokenizers")
    path = write_tiny_llama(architecture=architecture, words=True).path
    model, words = load_pretrained(path), load_tokenizer(path)
    place = export_pretrained(model, tmp_path / "out", like=path)
    again = load_pretrained(place)
    assert again.config == model.config
    jax.tree.map(
        np.testing.assert_array_equal,
        *(nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (again, model)),
    )
    raw = json.loads((place / "config.json").read_text())
    assert (raw["model_type"], raw["max_position_embeddings"]) == (architecture, 128)
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (1, 2)
    messages = [{"role": "user", "content": "he12"}]
    ids = load_tokenizer(place).apply_chat_template(messages)
    assert ids == words.apply_chat_template(messages)
    assert [ids[0], *ids[5:9]] == [1, 39, 4, 5, 2]  # <|start|>, u s e r, he, 1, 2, <|end|>
    assert load_tokenizer(place).eos_ids == frozenset({2})


def test_a_file_whose_words_cannot_be_read_is_not_exported_without_them(write_tiny_llama, tmp_path):
    path = write_tiny_llama().path
    with pytest.raises(ValueError, match=r"lack 'tokenizer\.ggml\.pre'"):
        export_pretrained(load_pretrained(path), tmp_path / "out", like=path)
    assert not (tmp_path / "out").exists()
