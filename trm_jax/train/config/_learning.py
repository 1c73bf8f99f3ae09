"""Sections about learning: the warm start, the loss, the optimizer."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from trm_jax.train.config._rules import at_least, at_most, positive, require

__all__ = ["MOST_STEPS", "LossConfig", "OptimizerConfig", "WarmstartConfig"]

MOST_STEPS = 10_000_000
"""Far above any run, far below what counts steps and updates in 32 bits and names checkpoints in eight digits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmstartConfig:
    """Supervised training on demonstrations before RL.

    Attributes:
      steps: optimizer steps at most; 0 leaves it out.
      target_accuracy: end as soon as this share of the validation prompts is solved; 0 takes all steps.
      validation_prompts: held-out prompts, none of them a test prompt, that decide it.
      check_every: steps between two looks at them.
      batch_size: demonstrations a step.
      learning_rate: peak; linear warm-up, then cosine decay to a tenth.
      warmup_steps: length of the warm-up.
      corruption: probability that each intermediate result of a demonstration is wrong.
    """

    steps: int = 400
    target_accuracy: float = 0.0
    validation_prompts: int = 1024
    check_every: int = 25
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    corruption: float = 0.3

    def __post_init__(self) -> None:
        at_least(self, 0, "steps", "warmup_steps")
        at_least(self, 1, "batch_size", "validation_prompts", "check_every")
        at_most(self, 100_000, "validation_prompts")
        at_most(self, MOST_STEPS, "steps")
        require(0 <= self.target_accuracy < 1, f"target_accuracy={self.target_accuracy}: must lie in [0, 1).")
        positive(self, "learning_rate")
        require(0 <= self.corruption <= 1, f"corruption={self.corruption}: must lie in [0, 1].")

    @property
    def validation(self) -> int:
        """Validation prompts that are needed."""
        return self.validation_prompts if self.steps and self.target_accuracy else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss.

    Attributes:
      kind: "clipped" (PPO clip on policy/proximal, times the correction's weights) or "masked" (TRM's surrogate
        mean of M · A · Σ_t policy/rollout over all sequences).
      clip_low: the clip keeps the ratio above 1 - clip_low.
      clip_high: the clip keeps the ratio below 1 + clip_high.
      dual_clip: bound c > 1 on the loss of negative advantages, or 0 for none.
      aggregation: "token_mean", "sequence_mean" or "constant_length".
      denominator: divide by all ("original") or by what was kept ("kept").
      advantage: "std" (GRPO), "none" (Dr. GRPO) or "loo" (RLOO).
      advantage_scope: the group's baseline over "all" samples or over those "kept".
      minibatches: optimizer updates a rollout; above 1 the ratio policy/proximal leaves 1.
      microbatch_rows: rows of one gradient computation; 0 takes all rows of a minibatch at once.
    """

    kind: Literal["clipped", "masked"] = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    denominator: Literal["original", "kept"] = "original"
    advantage: Literal["std", "none", "loo"] = "std"
    advantage_scope: Literal["all", "kept"] = "all"
    minibatches: int = 1
    microbatch_rows: int = 0

    def __post_init__(self) -> None:
        require(0 < self.clip_low < 1, f"clip_low={self.clip_low}: must lie in (0, 1).")
        require(self.clip_high > 0, f"clip_high={self.clip_high}: must be above 0.")
        require(self.dual_clip == 0 or self.dual_clip > 1, f"dual_clip={self.dual_clip}: must be 0 (off) or above 1.")
        at_least(self, 1, "minibatches")
        at_least(self, 0, "microbatch_rows")
        if self.kind == "masked":
            fields = {field.name: field.default for field in dataclasses.fields(self)}
            idle = ("clip_low", "clip_high", "dual_clip", "aggregation", "denominator")
            changed = [f"{name}={getattr(self, name)!r}" for name in idle if getattr(self, name) != fields[name]]
            require(
                not changed,
                f"{', '.join(changed)}: kind='masked' does not clip, and is the mean over all sequences of sums over "
                "tokens; leave it out, or set kind='clipped'.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a clipped gradient.

    Attributes:
      learning_rate: peak learning rate of RL.
      warmup_steps: linear warm-up.
      decay: "constant" or "cosine" (to a tenth at the last step).
      b1: decay of the first moment.
      b2: decay of the second moment.
      weight_decay: decoupled weight decay.
      max_grad_norm: the gradient's global norm is clipped to it.
    """

    learning_rate: float = 2e-4
    warmup_steps: int = 0
    decay: Literal["constant", "cosine"] = "constant"
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "learning_rate")
        at_least(self, 0, "warmup_steps", "weight_decay")
        require(self.weight_decay < math.inf, "weight_decay=inf: must be finite.")
        require(self.max_grad_norm > 0, f"max_grad_norm={self.max_grad_norm}: must be above 0.")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)}: must lie in [0, 1).")
