"""What the trainer asks of a rollout engine."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float

from trm_jax.rollout._config import SamplingConfig
from trm_jax.types import PromptBatch, RolloutBatch

__all__ = ["Engine"]


class Engine(Protocol):
    """Samples responses and records, at sampling time, what only the sampler knows."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""

    def update_weights(self, version: int, params: Any) -> None:
        """Takes new weights (and requantises them); later tokens carry ``version``."""

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig | None = None) -> RolloutBatch:
        """Answers every row of ``prompts``."""

    def head_matrix(self) -> Float[Array, "V D"]:
        """The output head that this engine makes logits with."""
