"""Drawing one token for each row, and the log-prob of the distribution it was drawn from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from trm_jax.rollout._config import SamplingConfig

__all__ = ["nucleus", "pack_support", "sample"]


def nucleus(logps: Float[Array, "N V"], top_p: float) -> Bool[Array, "N V"]:
    """The smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al. 2020); never empty."""
    order = jnp.argsort(-logps, axis=-1, stable=True)
    mass = jnp.cumsum(jnp.exp(jnp.take_along_axis(logps, order, axis=-1)), axis=-1)
    kept_in_order = jnp.concatenate([jnp.ones_like(mass[:, :1], bool), mass[:, :-1] < top_p], axis=-1)
    return jnp.zeros_like(kept_in_order).at[jnp.arange(logps.shape[0])[:, None], order].set(kept_in_order)


def pack_support(kept: Bool[Array, "N V"]) -> UInt8[Array, "N V8"]:
    """One bit a token: bit ``v % 8`` of byte ``v // 8``."""
    return jnp.packbits(kept, axis=-1, bitorder="little")


def sample(
    logps: Float[Array, "N V"],
    seeds: UInt32[Array, " N"],
    steps: Int[Array, " N"],
    sampling: SamplingConfig,
) -> tuple[Int[Array, " N"], Float[Array, " N"], Bool[Array, "N V"] | None]:
    """One token a row, its log-prob under the distribution drawn from, and the support when top-p cut it.

    Args:
      logps: log-probs at ``sampling.temperature`` over the whole vocabulary.
      seeds: a row's seed. Token ``t`` of a row is drawn with ``fold_in(key(seed), t)``, whatever slot it runs in.
      steps: ``t``, the response index of the token to be drawn.
      sampling: options.
    """
    if sampling.greedy:
        token = jnp.argmax(logps, axis=-1).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32), None
    kept = None
    if sampling.top_p < 1.0:
        kept = nucleus(logps, sampling.top_p)
        inside = jnp.where(kept, logps, -jnp.inf)
        logps = inside - jax.nn.logsumexp(inside, axis=-1, keepdims=True)

    def draw(row: Array, seed: Array, step: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), step), row)

    token = jax.vmap(draw)(logps, seeds, steps).astype(jnp.int32)
    return token, jnp.take_along_axis(logps, token[:, None], axis=-1)[:, 0], kept
