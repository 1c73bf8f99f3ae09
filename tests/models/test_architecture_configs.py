"""Small configurations of every architecture, by name."""

from __future__ import annotations

import pytest

from trm_jax.models import TransformerConfig, architecture_config, config_from_hf, config_to_hf

KINDS = ["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_a_config_json_of_that_model_type_describes(kind):
    config = architecture_config(kind, vocab_size=14, d_model=16, n_layers=3, n_heads=2, d_ff=8)
    raw = config_to_hf(config, dtype="float32", longest=32)
    assert raw["model_type"] == kind
    assert config_from_hf(raw) == config
    assert (config.n_experts > 0) == (kind in ("qwen2_moe", "qwen3_moe", "deepseek_v2"))
    assert (config.vocab_size, config.d_model, config.n_layers, config.d_ff) == (14, 16, 3, 8)


def test_the_plain_architecture_is_the_plain_block():
    assert architecture_config("llama", vocab_size=16) == TransformerConfig(vocab_size=16)


def test_other_fields_go_over_the_architectures_own():
    config = architecture_config("qwen2_moe", vocab_size=16, n_kv_heads=2, n_experts=4, experts_per_token=3, d_ff=12)
    assert (config.n_kv_heads, config.n_experts, config.experts_per_token) == (2, 4, 3)
    assert (config.d_ff_shared, config.shared_router, config.normalize_experts) == (12, True, False)
    assert architecture_config("deepseek_v2", vocab_size=16, n_layers=1).n_dense_layers == 0


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("mistral", {}, "architecture='mistral' is not known; choose one of llama, qwen2"),
        ("qwen2", {"n_experts": 4}, "'qwen2' has no experts, n_experts=4 is given; 'qwen2_moe' has"),
        ("deepseek_v2", {"n_kv_heads": 2}, "set n_kv_heads to it"),
        ("qwen3", {"n_heads": 32}, "head_dim=3 must be even"),
    ],
)
def test_what_cannot_be_built_is_named(kind, shape, words):
    with pytest.raises(ValueError, match=words):
        architecture_config(kind, vocab_size=16, **shape)
