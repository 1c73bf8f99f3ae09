"""Options of the rollout side: how it samples, how it computes, how it schedules."""

from __future__ import annotations

import dataclasses
from typing import get_args

from trm_jax.models import CacheDtype, ComputeConfig, ExpertImplementation, WeightFormat

__all__ = ["EngineConfig", "RolloutNumerics", "SamplingConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution that tokens are drawn from, and what ends a response besides its length and the end tokens.

    Attributes:
      temperature: logits are divided by it; > 0.
      top_p: nucleus mass in (0, 1]; the smallest set of most likely tokens that reaches it is renormalised.
      top_k: most likely tokens kept; 0 keeps all.
      min_p: tokens below this share of the largest probability are cut; in [0, 1).
      greedy: take the most likely token (evaluation only; the recorded log-prob is then 0, that of a point mass).
      stop: strings that end a response with the token that completes one of them in the decoded text.

    Where top-p, top-k or min-p cut the support, it is recorded, so that the training side can apply the same.

    Raises:
      ValueError: naming field, value and rule.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    greedy: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(
                f"temperature={self.temperature}: must lie in [1e-6, 1e6]. For the most likely token, set greedy=true."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]; 1 keeps the whole vocabulary.")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k}: must be 0 (keep all) or a count of tokens.")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p={self.min_p}: must lie in [0, 1); 0 keeps the whole vocabulary.")
        if not all(self.stop):
            raise ValueError(f"stop={list(self.stop)}: an empty string would end every response before it began.")

    @property
    def cuts(self) -> bool:
        """Whether the support is cut, and recorded."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutNumerics:
    """How the engine's arithmetic differs from the trainer's, each source by its own switch.

    Attributes:
      weight_format: what the engine keeps of the weights: "float32" (the trainer's own), "bfloat16" or "float16" (all
        of them; float16 ends at 65504), or weight-only "int8" and "fp8" (per output channel) or "int4" (in groups along
        the input), which leave embedding and norms as they are.
      group_size: input channels that share an int4 scale; divides every weight's input width.
      quantize_head: quantise the output head too.
      dtype: type of activations.
      kv_cache_dtype: what keys and values are kept as: "float32", "bfloat16", or "int8" with a scale a token and head;
        None keeps ``dtype``.
      routing_jitter: standard deviation of noise on the router's logits (MoE only), in logit units.
      batch_invariant: fixed-tile arithmetic; with the same on the training side, float32 weights and no lag, rollout
        and recomputed log-probs are equal to the bit (on CPU).
      experts: how a mixture multiplies: "dense", "blocked", "ragged_dot" or "megablox" (see ``ComputeConfig``); None is
        the best for type and device.

    Raises:
      ValueError: naming field, value and rule.
    """

    weight_format: WeightFormat = "float32"
    group_size: int = 32
    quantize_head: bool = False
    dtype: str = "float32"
    kv_cache_dtype: CacheDtype | None = None
    routing_jitter: float = 0.0
    batch_invariant: bool = False
    experts: ExpertImplementation | None = None

    def __post_init__(self) -> None:
        if self.weight_format not in get_args(WeightFormat):
            formats = ", ".join(get_args(WeightFormat))
            raise ValueError(f"weight_format={self.weight_format!r}: choose one of {formats}.")
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}: must be at least 1.")
        if self.quantize_head and self.weight_format not in ("int8", "int4", "fp8"):
            raise ValueError(f"quantize_head=true needs a quantised weight_format, not {self.weight_format!r}.")
        self.compute()

    def compute(self) -> ComputeConfig:
        """The arithmetic of the engine's forward pass."""
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'float32' or 'bfloat16'.")
        return ComputeConfig(
            dtype="bfloat16" if self.dtype == "bfloat16" else "float32",
            batch_invariant=self.batch_invariant,
            kv_cache_dtype=self.kv_cache_dtype,
            routing_jitter=self.routing_jitter,
            experts=self.experts,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the continuous batch.

    Attributes:
      slots: sequences that decode together.
      max_prompt_length: ``P``, longest prompt in tokens.
      max_response_length: ``T``, longest response in tokens, the end token included.
      prefill_rows: prompts in one prefill call.
      decode_chunk: most decode steps between two looks at which slots are free.

    Raises:
      ValueError: naming field, value and rule.
    """

    slots: int = 64
    max_prompt_length: int
    max_response_length: int
    prefill_rows: int = 16
    decode_chunk: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: must be at least 1.")

    @property
    def sequence_length(self) -> int:
        """``P + T``, the length of the cache and of a training row."""
        return self.max_prompt_length + self.max_response_length
