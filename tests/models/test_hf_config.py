"""``config.json`` as the published checkpoints have it, and what is refused in it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trm_jax.models import LatentConfig, TransformerConfig, YarnConfig, config_from_hf, config_to_hf
from trm_jax.models._hf_tensors import checkpoint_slots
from trm_jax.models._rope import score_scale

SMOLLM2: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1},
    **{"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664},
    **{"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False},
    **{"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
    **{"pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None},
    **{"rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3"},
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "vocab_size": 49152},
}
QWEN25_7B: dict[str, Any] = {
    **{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643},
    **{"eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02},
    **{"intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2"},
    **{"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False},
    **{"vocab_size": 152064},
}
QWEN3_8B: dict[str, Any] = {
    **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960},
    **{"max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
    **{"sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936},
}
QWEN15_MOE: dict[str, Any] = {
    **{"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643},
    **{"eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02},
    **{"intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe"},
    **{"num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936},
    **{"decoder_sparse_step": 1, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60},
    **{"num_experts_per_tok": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    **{"shared_expert_intermediate_size": 5632},
}
QWEN3_30B_A3B: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128},
    **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144},
    **{"max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe"},
    **{"moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False},
    **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001},
    **{"sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936},
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001},
    **{"bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu"},
    **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408},
    **{"moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False},
    **{"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16},
    **{"pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax"},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    **{"seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy"},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128},
    **{"vocab_size": 102400},
}
PUBLISHED = {
    "SmolLM2-135M": (
        SMOLLM2,
        TransformerConfig(
            vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536,
            rope_theta=1e5, norm_eps=1e-5, tie_embeddings=True,
        ),
    ),
    "Qwen2.5-7B": (
        QWEN25_7B,
        TransformerConfig(
            vocab_size=152064, d_model=3584, n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128, d_ff=18944,
            qkv_bias=True, rope_theta=1e6, norm_eps=1e-6,
        ),
    ),
    "Qwen3-8B": (
        QWEN3_8B,
        TransformerConfig(
            vocab_size=151936, d_model=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=12288,
            qk_norm=True, rope_theta=1e6, norm_eps=1e-6,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        QWEN15_MOE,
        TransformerConfig(
            vocab_size=151936, d_model=2048, n_layers=24, n_heads=16, n_kv_heads=16, head_dim=128, d_ff=1408,
            qkv_bias=True, n_experts=60, experts_per_token=4, normalize_experts=False, d_ff_shared=5632,
            shared_router=True, rope_theta=1e6, norm_eps=1e-6,
        ),
    ),
    "Qwen3-30B-A3B": (
        QWEN3_30B_A3B,
        TransformerConfig(
            vocab_size=151936, d_model=2048, n_layers=48, n_heads=32, n_kv_heads=4, head_dim=128, d_ff=768,
            qk_norm=True, n_experts=128, experts_per_token=8, rope_theta=1e6, norm_eps=1e-6,
        ),
    ),
    "DeepSeek-V2-Lite": (
        DEEPSEEK_V2_LITE,
        TransformerConfig(
            vocab_size=102400, d_model=2048, n_layers=27, n_heads=16, n_kv_heads=16, head_dim=192, d_ff=1408,
            latent=LatentConfig(kv_rank=512, rope_dim=64, value_dim=128),
            n_experts=64, experts_per_token=6, normalize_experts=False, d_ff_shared=2816, n_dense_layers=1,
            d_ff_dense=10944, norm_eps=1e-6,
            yarn=YarnConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    raw, expected = PUBLISHED[name]
    assert config_from_hf(raw) == expected
    assert config_from_hf(config_to_hf(expected, dtype="bfloat16", longest=64)) == expected
    # As Transformers 5 writes it.
    rope = raw.get("rope_scaling") or {"rope_type": "default"}
    newer = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    newer |= {"rope_parameters": {**rope, "rope_theta": raw["rope_theta"]}, "dtype": "bfloat16"}
    assert config_from_hf(newer) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_read_at_once_is_never_larger_than_the_largest_tensor(name):
    """Loading holds one slot at a time, and a copy while it is sent: of a mixture, one layer's experts of a matrix."""
    slots = list(checkpoint_slots(PUBLISHED[name][1]))
    largest = max(math.prod(slot.shape) for slot in slots)
    assert max(len(slot.names) * math.prod(slot.shape) for slot in slots) <= largest


def test_the_parameters_are_as_many_as_published():
    import jax
    from flax import nnx

    from trm_jax.models import Transformer

    counts = {}
    for name, (_, config) in PUBLISHED.items():
        model = nnx.eval_shape(lambda config=config: Transformer(config, rngs=nnx.Rngs(0)))
        counts[name] = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    # The model cards: 134,515,008; 7.61 B; 8.2 B (8.19); 14.3 B; 30.5 B; 15.7 B.
    assert counts["SmolLM2-135M"] == 134_515_008
    billions = {name: round(count / 1e9, 2) for name, count in counts.items()}
    assert billions["Qwen2.5-7B"] == 7.62
    assert billions["Qwen3-8B"] == 8.19
    assert billions["Qwen1.5-MoE-A2.7B"] == 14.32
    assert billions["Qwen3-30B-A3B"] == 30.53
    assert billions["DeepSeek-V2-Lite"] == 15.71


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (SMOLLM2, {"model_type": "gemma"}, "model_type='gemma' is not supported; choose one of llama, qwen2"),
        (SMOLLM2, {"model_type": None}, "model_type=None is not supported"),
        (SMOLLM2, {"hidden_size": None}, "field 'hidden_size' is missing"),
        (SMOLLM2, {"model_type": ["llama"]}, "model_type=\\['llama'\\] is not supported"),
        (SMOLLM2, {"num_attention_heads": "9"}, "num_attention_heads='9': a whole number of at least 1 is required"),
        (SMOLLM2, {"num_attention_heads": 0}, "num_attention_heads=0: a whole number of at least 1"),
        (SMOLLM2, {"hidden_size": 576.5}, r"hidden_size=576\.5: a whole number"),
        (SMOLLM2, {"vocab_size": True}, "vocab_size=True: a whole number"),
        (SMOLLM2, {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': a finite number is required"),
        (SMOLLM2, {"rms_norm_eps": math.nan}, "rms_norm_eps=nan: a finite number is required"),
        (SMOLLM2, {"tie_word_embeddings": "false"}, "tie_word_embeddings='false': true or false is required"),
        (SMOLLM2, {"rope_theta": "1e5"}, "rope_theta='1e5': a finite number"),
        (SMOLLM2, {"rope_scaling": "linear"}, "rope_scaling='linear': an object is required"),
        (SMOLLM2, {"rope_scaling": {"type": "yarn", "factor": "4"}}, r"rope_scaling\.factor='4': a finite number"),
        (DEEPSEEK_V2_LITE, {"q_lora_rank": 1.5}, r"q_lora_rank=1\.5: a whole number"),
        (SMOLLM2, {"attention_bias": True}, "attention_bias=True is not supported; False is required"),
        (SMOLLM2, {"mlp_bias": True}, "mlp_bias=True"),
        (SMOLLM2, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; 'silu' is required"),
        (SMOLLM2, {"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        (SMOLLM2, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"type \['llama3'\] is not supported"),
        (SMOLLM2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 2.0}}, r"attention_factor=2\.0"),
        (SMOLLM2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, r"supported: mscale=1\.0"),
        (SMOLLM2, {"rope_scaling": {"type": "yarn"}}, "yarn needs 'factor'"),
        (SMOLLM2, {"logit_softcap": 30.0, "a": 1}, r"fields that are not supported: a=1, logit_softcap=30\.0"),
        (QWEN25_7B, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN25_7B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        (QWEN3_8B, {"head_dim": None}, "field 'head_dim' is missing"),
        (QWEN15_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        (QWEN15_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (DEEPSEEK_V2_LITE, {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        (DEEPSEEK_V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK_V2_LITE, {"first_k_dense_replace": 27}, "n_dense_layers=27 must be below n_layers=27"),
    ],
)
def test_what_is_not_built_in_is_refused_by_name(base, changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**base, **changes})


@pytest.mark.parametrize("name", ["num_key_value_heads"])
def test_a_default_that_is_not_ours_must_be_written_out(name):
    with pytest.raises(ValueError, match=f"field '{name}' is missing"):
        config_from_hf({key: value for key, value in QWEN25_7B.items() if key != name})


@pytest.mark.parametrize("name", ["q_lora_rank", "n_shared_experts"])
def test_null_is_not_the_same_as_missing(name):
    with pytest.raises(ValueError, match=f"field '{name}' is missing; give it, if only as null"):
        config_from_hf({key: value for key, value in DEEPSEEK_V2_LITE.items() if key != name})


def test_shapes_without_a_model_type_cannot_be_exported():
    both = TransformerConfig(vocab_size=16, qkv_bias=True, qk_norm=True)
    with pytest.raises(ValueError, match="'qwen2', cannot express qk_norm=True"):
        config_to_hf(both, dtype="float32", longest=64)
    scaled = TransformerConfig(vocab_size=16, n_experts=4, qk_norm=True, expert_scale=2.0)
    with pytest.raises(ValueError, match=r"'qwen3_moe', cannot express expert_scale=2\.0"):
        config_to_hf(scaled, dtype="float32", longest=64)


def test_the_published_deepseek_scale():
    """modeling_deepseek.py: 192^-0.5 times (0.1 · 0.707 · ln 40 + 1)²."""
    expected = 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert score_scale(config_from_hf(DEEPSEEK_V2_LITE)) == pytest.approx(expected, rel=1e-9)
