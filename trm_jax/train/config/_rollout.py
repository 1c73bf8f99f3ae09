"""The section about sampling: what is sampled, and how the sampler differs from the trainer."""

from __future__ import annotations

import dataclasses

from trm_jax.rollout import RolloutNumerics
from trm_jax.train.config._rules import at_least, positive, require

__all__ = ["RolloutConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled, and how the sampler differs from the trainer (``lag`` and ``numerics``).

    Attributes:
      prompts_per_step: prompts a step.
      samples_per_prompt: responses a prompt (the group of the advantage).
      temperature: logits are divided by it, on both sides.
      top_p: nucleus mass; below 1 the support is recorded and applied on both sides.
      max_prompt_length: longest prompt in tokens.
      max_response_length: longest response in tokens, the end token included.
      slots: sequences that decode together.
      prefill_rows: prompts in one prefill call.
      decode_chunk: decode steps between two looks at which slots are free.
      lag: updates by which the engine's weights are older than the trainer's.
      record_hidden: return final hidden states, from which the full-vocabulary KL and TV are computed.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompt_length: int = 32
    max_response_length: int = 34
    slots: int = 256
    prefill_rows: int = 32
    decode_chunk: int = 8
    lag: int = 0
    record_hidden: bool = True
    numerics: RolloutNumerics = RolloutNumerics()

    def __post_init__(self) -> None:
        at_least(self, 1, "prompts_per_step", "max_prompt_length", "max_response_length", "slots", "prefill_rows")
        at_least(self, 1, "decode_chunk", "samples_per_prompt")
        at_least(self, 0, "lag")
        positive(self, "temperature")
        require(0 < self.top_p <= 1, f"top_p={self.top_p}: must lie in (0, 1].")

    @property
    def rows(self) -> int:
        """Sequences a step."""
        return self.prompts_per_step * self.samples_per_prompt
