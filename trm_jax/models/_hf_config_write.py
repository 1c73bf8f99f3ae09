"""The shape of a transformer as the ``config.json`` of the Hugging Face model type that has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from trm_jax.models._config import TransformerConfig, YarnConfig
from trm_jax.models._hf_config import MODEL_TYPES, config_from_hf

__all__ = ["config_to_hf"]


def config_to_hf(config: TransformerConfig, *, dtype: str, longest: int) -> dict[str, Any]:
    """A ``config.json`` that describes ``config``: the inverse of ``config_from_hf``.

    Args:
      config: the shape.
      dtype: type of the stored weights.
      longest: ``max_position_embeddings``.

    Raises:
      ValueError: for a shape that no supported model type has, naming what does not fit.
    """
    kind = _model_type(config)
    raw: dict[str, Any] = {
        "architectures": [MODEL_TYPES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": longest,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
    }
    if config.yarn is not None:
        raw["rope_scaling"] = _yarn_to_hf(config.yarn, scores=kind == "deepseek_v2")
    if config.latent is None:
        raw["head_dim"] = config.head_dim
    if kind in ("qwen2", "qwen2_moe"):
        del raw["attention_bias"]
    if kind in ("qwen2_moe", "qwen3_moe"):
        raw |= {
            "moe_intermediate_size": config.d_ff,
            "num_experts": config.n_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.normalize_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if kind == "qwen2_moe":
        raw |= {"shared_expert_intermediate_size": config.d_ff_shared, "qkv_bias": config.qkv_bias}
    if config.latent is not None:
        raw |= {
            "q_lora_rank": config.latent.query_rank,
            "kv_lora_rank": config.latent.kv_rank,
            "qk_nope_head_dim": config.head_dim - config.latent.rope_dim,
            "qk_rope_head_dim": config.latent.rope_dim,
            "v_head_dim": config.latent.value_dim,
            "intermediate_size": config.d_ff_dense or config.d_ff,
            "moe_intermediate_size": config.d_ff,
            "n_routed_experts": config.n_experts,
            "num_experts_per_tok": config.experts_per_token,
            "n_shared_experts": config.d_ff_shared // config.d_ff or None,
            "first_k_dense_replace": config.n_dense_layers,
            "routed_scaling_factor": config.expert_scale,
            "norm_topk_prob": False,
            "topk_method": "greedy",
        }
    again = config_from_hf(raw)
    if lost := [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(again, field.name) != getattr(config, field.name)
    ]:
        raise ValueError(f"the nearest Hugging Face model type, {kind!r}, cannot express {', '.join(lost)}.")
    return raw


def _yarn_to_hf(yarn: YarnConfig, *, scores: bool) -> dict[str, Any]:
    raw = {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    return raw | ({"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim} if scores else {})


def _model_type(config: TransformerConfig) -> str:
    if config.latent is not None:
        return "deepseek_v2"
    if config.n_experts:
        return "qwen2_moe" if config.shared_router else "qwen3_moe"
    if config.qkv_bias:
        return "qwen2"
    return "qwen3" if config.qk_norm else "llama"
