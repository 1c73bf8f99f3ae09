"""``config.json`` of a Hugging Face checkpoint to the shape of a transformer; what is not known is refused by name."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from trm_jax.models._config import LatentConfig, TransformerConfig, YarnConfig

__all__ = ["MODEL_TYPES", "config_from_hf"]

# Fields that change nothing of what a forward pass computes.
_IGNORED = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "max_position_embeddings"),
        *("is_llama_config", "transformers.js_config", "max_window_layers", "sliding_window"),
        *("aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "seq_aux", "n_group", "topk_group"),
    }
)
# Fields with values that are built in here: a checkpoint with another one needs code that does not exist.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "decoder_sparse_step": (1,),
    "ep_size": (1,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "mlp_only_layers": ([], None),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}


class _Fields:
    """A ``config.json`` of which every field must be taken, or be known not to matter."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._left, self._where = dict(raw), where

    def need(self, name: str) -> Any:
        if self._left.get(name) is None:
            raise ValueError(f"{self._where}: field {name!r} is missing.")
        return self._left.pop(name)

    def get(self, name: str, default: Any) -> Any:
        value = self._left.pop(name, None)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number, above 0 unless that is its default; required without one."""
        value = self.need(name) if default is None else self.get(name, default)
        least = 0 if default == 0 else 1
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(f"{self._where}: {name}={value!r}: a whole number of at least {least} is required.")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required without a default."""
        return self.finite(name, self.need(name) if default is None else self.get(name, default))

    def finite(self, name: str, value: Any) -> float:
        """``value`` of field ``name`` as a float."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"{self._where}: {name}={value!r}: a finite number is required.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        if not isinstance(value := self.get(name, default), bool):
            raise ValueError(f"{self._where}: {name}={value!r}: true or false is required.")
        return value

    def nullable(self, name: str) -> int | None:
        """A whole number or null, which must be written."""
        if name not in self._left:
            raise ValueError(f"{self._where}: field {name!r} is missing; give it, if only as null.")
        return self.whole(name, 0) or None

    def only(self, name: str, *allowed: Any) -> None:
        if name in self._left and (value := self._left.pop(name)) not in allowed:
            shown = " or ".join(map(repr, allowed))
            raise ValueError(f"{self._where}: {name}={value!r} is not supported; {shown} is required.")

    def finish(self) -> None:
        for name, allowed in _FIXED.items():
            self.only(name, *allowed)
        if types := self._left.pop("layer_types", None):
            for value in set(types) - {"full_attention"}:
                raise ValueError(f"{self._where}: layer_types holds {value!r}; only 'full_attention' is supported.")
        if unknown := sorted(self._left.keys() - _IGNORED):
            raise ValueError(
                f"{self._where}: fields that are not supported: "
                + ", ".join(f"{name}={self._left[name]!r}" for name in unknown)
            )


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> TransformerConfig:
    """The shape that a ``config.json`` describes.

    Args:
      raw: the parsed file, of Transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).
      where: named in errors.

    Raises:
      ValueError: an unsupported model type, a field that is not known, or a value that is not supported, by name.

    >>> config_from_hf({"model_type": "gpt2"})
    Traceback (most recent call last):
      ...
    ValueError: config.json: model_type='gpt2' is not supported; choose one of llama, qwen2, qwen3, qwen2_moe, \
qwen3_moe, deepseek_v2.
    """
    fields = _Fields(raw, where)
    kind = fields.get("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ValueError(f"{where}: model_type={kind!r} is not supported; choose one of {', '.join(MODEL_TYPES)}.")
    if kind.startswith("qwen") and "num_key_value_heads" not in raw:  # there its default is not the number of heads
        fields.need("num_key_value_heads")
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    shape: dict[str, Any] = {
        "vocab_size": fields.whole("vocab_size"),
        "d_model": width,
        "n_layers": fields.whole("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": fields.whole("num_key_value_heads", None if "qwen" in kind else heads),
        "norm_eps": fields.number("rms_norm_eps"),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
    }
    longest = raw.get("max_position_embeddings")
    shape |= _rope(fields, longest, where, scores=kind == "deepseek_v2")
    if kind == "deepseek_v2":
        shape |= _deepseek(fields)
    else:
        shape["head_dim"] = fields.whole("head_dim", None if kind == "qwen3" else width // heads)
        dense_ff = fields.whole("intermediate_size")  # the mixtures keep it, though no layer has that width
        shape["d_ff"] = dense_ff
        shape |= _qwen_parts(kind, fields)
    fields.finish()
    return TransformerConfig(**shape)


def _rope(fields: _Fields, longest: int | None, where: str, *, scores: bool) -> dict[str, Any]:
    joint = fields.get("rope_parameters", None)
    given = fields.get("rope_scaling", {}) if joint is None else joint
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: rope_scaling={given!r}: an object is required.")
    rope = dict(given)
    theta = fields.finite("rope_theta", rope.pop("rope_theta", None) or fields.get("rope_theta", 10_000.0))
    kinds = {rope.pop(name) for name in ("type", "rope_type") if name in rope} or {"default"}
    rope = {name: value for name, value in rope.items() if value is not None}
    if kinds == {"default"}:
        known: set[str] = set()
    elif kinds == {"yarn"}:
        known = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
        known |= {"mscale", "mscale_all_dim"} if scores else set()
    else:
        raise ValueError(f"{where}: rope_scaling of type {sorted(kinds)} is not supported; 'default' or 'yarn' is.")
    if unknown := sorted(rope.keys() - known):
        shown = ", ".join(f"{name}={rope[name]!r}" for name in unknown)
        raise ValueError(f"{where}: rope_scaling fields that are not supported: {shown}")
    if not known:
        return {"rope_theta": theta}
    length = rope.get("original_max_position_embeddings", longest)
    if "factor" not in rope or length is None:
        raise ValueError(f"{where}: yarn needs 'factor' and 'original_max_position_embeddings', given {sorted(rope)}.")
    values = {name: fields.finite(f"rope_scaling.{name}", rope[name]) for name in known & rope.keys()}
    values.pop("original_max_position_embeddings", None)
    original = int(fields.finite("rope_scaling.original_max_position_embeddings", length))
    return {"rope_theta": theta, "yarn": YarnConfig(original_length=original, **values)}


def _qwen_parts(kind: str, fields: _Fields) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "qkv_bias": fields.flag("qkv_bias", True) if kind == "qwen2_moe" else kind == "qwen2",
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
    }
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return parts
    parts |= {
        "d_ff": fields.whole("moe_intermediate_size"),
        "n_experts": fields.whole("num_experts"),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "normalize_experts": fields.flag("norm_topk_prob", False),
    }
    if kind == "qwen2_moe":
        parts |= {"d_ff_shared": fields.whole("shared_expert_intermediate_size"), "shared_router": True}
    return parts


def _deepseek(fields: _Fields) -> dict[str, Any]:
    plain, rope = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    rank = fields.nullable("q_lora_rank")
    fields.only("head_dim", rope, None)  # what Transformers 4 calls so here is the rotary part
    fields.only("qk_head_dim", plain + rope, None)
    fields.only("norm_topk_prob", False)
    width, dense = fields.whole("moe_intermediate_size"), fields.whole("first_k_dense_replace", 0)
    dense_ff = fields.whole("intermediate_size")
    return {
        "head_dim": plain + rope,
        "latent": LatentConfig(
            kv_rank=fields.whole("kv_lora_rank"),
            rope_dim=rope,
            value_dim=fields.whole("v_head_dim"),
            query_rank=rank,
        ),
        "d_ff": width,
        "n_experts": fields.whole("n_routed_experts"),
        "experts_per_token": fields.whole("num_experts_per_tok"),
        "normalize_experts": False,
        "expert_scale": fields.number("routed_scaling_factor", 1.0),
        "d_ff_shared": width * (fields.nullable("n_shared_experts") or 0),
        "n_dense_layers": dense,
        "d_ff_dense": dense_ff if dense else 0,
    }


MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
"""Supported ``model_type`` to the class that Transformers has for it."""
