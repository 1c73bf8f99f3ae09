"""Rotary positions, plain and YaRN."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from trm_jax.models._config import TransformerConfig, YarnConfig

__all__ = ["apply_rope", "rope_frequencies", "score_scale"]


def rope_frequencies(config: TransformerConfig) -> Float[np.ndarray, " half"]:
    """Angle per position of every turned pair, radians, float32; made on the host, so that no backend rounds it.

    ``theta^(-2i/n)`` for the ``n`` rotary coordinates; with YaRN (arXiv 2309.00071, equations 19 to 23) divided by
    ``factor`` where a pair turns less often than ``beta_slow`` times in ``original_length``, kept where it turns more
    often than ``beta_fast`` times, and mixed along a linear ramp over the pair's index in between.

    >>> rope_frequencies(TransformerConfig(vocab_size=16, head_dim=4, rope_theta=100.0)).tolist()
    [1.0, 0.10000000149011612]
    """
    width = config.head_dim if config.latent is None else config.latent.rope_dim
    pair = np.arange(width // 2, dtype=np.float64)
    plain = config.rope_theta ** (-2.0 * pair / width)
    if config.yarn is None:
        return plain.astype(np.float32)
    low, high = _ramp(config.yarn, width, config.rope_theta)
    interpolated = np.clip((pair - low) / (high - low), 0.0, 1.0)
    return (plain * (1.0 - interpolated + interpolated / config.yarn.factor)).astype(np.float32)


def _ramp(yarn: YarnConfig, width: int, theta: float) -> tuple[float, float]:
    """First and last pair of the ramp: the pairs that turn ``beta_fast`` and ``beta_slow`` times."""

    def pair(turns: float) -> float:
        return width * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), width - 1)
    return low, high + 0.001 if low == high else high  # a step, where the two coincide


def rope_magnitude(config: TransformerConfig) -> float:
    """What rotated coordinates are multiplied by: 1 without YaRN."""
    yarn = config.yarn
    return 1.0 if yarn is None else yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)


def score_scale(config: TransformerConfig) -> float:
    """What attention scores are multiplied by: ``head_dim^(-1/2)``, and with YaRN its factor on all dimensions."""
    factor = 1.0 if config.yarn is None else config.yarn.magnitude(config.yarn.mscale_all_dim) ** 2
    return float(factor * config.head_dim**-0.5)


def apply_rope(x: Float[Array, "... H h"], positions: Int[Array, ...], config: TransformerConfig) -> Array:
    """Rotary positions in the "rotate half" convention: coordinates ``i`` and ``i + h/2`` turn together."""
    magnitude = rope_magnitude(config)
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = (magnitude * f(angle)[..., None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
