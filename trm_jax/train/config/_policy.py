"""Sections about the policy: its shape, its devices, and what is kept of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast

from trm_jax.models import ComputeConfig, ExpertImplementation, TransformerConfig, architecture_config
from trm_jax.train._structured import structured
from trm_jax.train.config._rules import at_least, require

__all__ = ["CheckpointConfig", "MeshConfig", "ModelConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a pretrained one (``path``), or one of random weights (``architecture`` and sizes).

    Attributes:
      path: a Hugging Face directory or a GGUF file, with its tokenizer; or "smollm2", what `trm-jax fetch smollm2` put
        into the cache. Empty starts from random weights, with the task's own characters as vocabulary.
      architecture: from scratch, whose parts the policy has: "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe" or
        "deepseek_v2".
      d_model: from scratch, width of the residual stream.
      n_layers: from scratch, number of blocks.
      n_heads: from scratch, attention heads.
      d_ff: from scratch, width of the feed-forward layer, of each expert when there are experts.
      n_experts: from scratch, number of experts; 0 is what the architecture has: none, or 8 in a mixture.
      experts_per_token: from scratch, experts a token is sent to.
      shape: from scratch, further fields of the shape by name (models.TransformerConfig), over the architecture's own,
        e.g. { n_kv_heads = 2, tie_embeddings = true }.
      param_dtype: type of the parameters, "float32" or "bfloat16". The optimizer keeps float32 either way; an update of
        a bfloat16 parameter is rounded at random in proportion, so that small ones are not lost.
      dtype: type of activations in training, "float32" or "bfloat16".
      experts: how a mixture multiplies on the training side: "dense" runs every expert on every token; "blocked",
        "ragged_dot" and, on TPUs, "megablox" run the chosen ones. Left out, it is the best for type and device.
      batch_invariant: fixed-tile arithmetic on the training side (see rollout.numerics.batch_invariant).
      remat: what the backward pass recomputes to save memory: "none"; "dots", all but products with weights; "full",
        everything between blocks.
      replay_routes: a mixture's experts in training are those that the engine chose for the same token, which it then
        records (routing replay, R3).
    """

    path: str = ""
    architecture: Literal["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2"] = "llama"
    d_model: int = 96
    n_layers: int = 2
    n_heads: int = 4
    d_ff: int = 256
    n_experts: int = 0
    experts_per_token: int = 2
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    dtype: Literal["float32", "bfloat16"] = "float32"
    experts: ExpertImplementation | None = None
    batch_invariant: bool = False
    remat: Literal["none", "dots", "full"] = "none"
    replay_routes: bool = False

    def __post_init__(self) -> None:
        self.compute()
        if self.path:
            of_scratch = ("architecture", "d_model", "n_layers", "n_heads", "d_ff", "n_experts", "experts_per_token")
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            given = [f"{name}={value!r}" for name in of_scratch if (value := getattr(self, name)) != defaults[name]]
            given += [f"shape={self.shape!r}"] * bool(self.shape)
            require(
                not given, f"{', '.join(given)}: path={self.path!r} brings its own shape; leave it out, or the path."
            )
            return
        at_least(self, 1, "d_model", "n_layers", "n_heads", "d_ff", "experts_per_token")
        at_least(self, 0, "n_experts")
        require(self.d_model % self.n_heads == 0, f"n_heads={self.n_heads} must divide d_model={self.d_model}.")
        require(
            (self.d_model // self.n_heads) % 2 == 0,
            f"d_model/n_heads={self.d_model // self.n_heads}: the width of a head must be even (rotary positions).",
        )
        own = {"vocab_size", "experts_per_token", *(field.name for field in dataclasses.fields(self))}
        taken = sorted(own & self.shape.keys())
        require(not taken, f"shape.{', shape.'.join(taken)}: has a key of its own, model.NAME, or comes from the task.")
        self.scratch(vocab_size=1)

    def scratch(self, vocab_size: int) -> TransformerConfig:
        """The shape of a policy from scratch over that many token ids.

        Raises:
          ValueError: it cannot be built, naming the field.
        """
        base = architecture_config(
            self.architecture,
            vocab_size=vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_ff=self.d_ff,
            experts_per_token=self.experts_per_token,
            **({"n_experts": self.n_experts} if self.n_experts else {}),
        )
        if not self.shape:
            return base
        parts = {"latent": base.latent, "yarn": base.yarn}
        within = {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}
        changed = {
            name: {**within[name], **value} if name in within and isinstance(value, Mapping) else value
            for name, value in self.shape.items()
        }
        return cast(TransformerConfig, structured({**dataclasses.asdict(base), **changed}, TransformerConfig, "shape"))

    def compute(self) -> ComputeConfig:
        """The training side's arithmetic."""
        return ComputeConfig(dtype=self.dtype, batch_invariant=self.batch_invariant, experts=self.experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices: ``data`` x ``tensor``.

    Attributes:
      data: ways to split rows.
      tensor: ways to split heads, feed-forward and the vocabulary of the head.
    """

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        at_least(self, 1, "data", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and whether the policy leaves as a Hugging Face directory.

    Attributes:
      every: steps between checkpoints; the last step is always saved.
      keep: newest checkpoints kept.
      export: when a run ends, or is stopped, write its policy as a Hugging Face directory, "model" beside the
        checkpoints, in this type: "none", "float32", "bfloat16" or "float16". Tokenizer and chat template come along
        from what model.path names. A run that ended without one is exported by --resume with this option.
    """

    every: int = 20
    keep: int = 2
    export: Literal["none", "float32", "bfloat16", "float16"] = "none"

    def __post_init__(self) -> None:
        at_least(self, 1, "every", "keep")
