"""What ``linear_logps`` returns."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

__all__ = ["LinearLogps"]


class LinearLogps(NamedTuple):
    """Log-probs of given tokens under a linear head, float32.

    Attributes:
      logps: ``[N]`` log-prob of each token; ``-inf`` outside the support.
      logsumexp: ``[N]`` normaliser of the scaled logits.
      entropy: ``[N]`` nats.
    """

    logps: Float[Array, " N"]
    logsumexp: Float[Array, " N"]
    entropy: Float[Array, " N"]
