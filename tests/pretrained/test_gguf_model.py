"""A GGUF file as a model: the same function as a NumPy forward pass over the file's own rows."""

from __future__ import annotations

import numpy as np
import pytest

from trm_jax.models import load_pretrained
from trm_jax.models.pretrained import read_gguf

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
