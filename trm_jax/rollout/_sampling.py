"""Drawing one token for each row, and the log-prob of the distribution it was drawn from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8, UInt32

from trm_jax.models import ComputeConfig, restrict_log_probs
from trm_jax.rollout._config import SamplingConfig

__all__ = ["draw_tokens", "nucleus", "pack_support", "sample"]


def nucleus(logps: Float[Array, "N V"], top_p: float) -> Bool[Array, "N V"]:
    """The smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al. 2020); never empty.

    Args:
      logps: log-probs of the whole vocabulary; of equally likely tokens the lower id goes first.
      top_p: in (0, 1]. The mass is a float32 sum: where it meets ``top_p`` to the last bit, one more token may stay.

    >>> print(nucleus(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), 0.75))
    [[ True  True False]]
    """
    order = jnp.argsort(-logps, axis=-1, stable=True)
    mass = jnp.cumsum(jnp.exp(jnp.take_along_axis(logps, order, axis=-1)), axis=-1)
    kept_in_order = jnp.concatenate([jnp.ones_like(mass[:, :1], bool), mass[:, :-1] < top_p], axis=-1)
    return jnp.zeros_like(kept_in_order).at[jnp.arange(logps.shape[0])[:, None], order].set(kept_in_order)


def pack_support(kept: Bool[Array, "N V"]) -> UInt8[Array, "N V8"]:
    """One bit a token: bit ``v % 8`` of byte ``v // 8``.

    >>> print(pack_support(jnp.array([[True, False, True, False, False, False, False, False, True]])))
    [[5 1]]
    """
    return jnp.packbits(kept, axis=-1, bitorder="little")


def draw_tokens(logps: Float[Array, "N V"], seeds: UInt32[Array, " N"], steps: Int[Array, " N"]) -> Int32[Array, " N"]:
    """Token ``steps`` of every row, drawn with ``fold_in(key(seed), step)``, whatever else is drawn beside it.

    >>> logps = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> print(draw_tokens(logps, jnp.array([7, 7], jnp.uint32), jnp.array([0, 3])))
    [0 1]
    """

    def draw(row: Array, seed: Array, step: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), step), row)

    return jax.vmap(draw)(logps, seeds, steps).astype(jnp.int32)


def sample(
    logps: Float[Array, "N V"],
    seeds: UInt32[Array, " N"],
    steps: Int[Array, " N"],
    sampling: SamplingConfig,
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
) -> tuple[Int[Array, " N"], Float[Array, " N"], Bool[Array, "N V"] | None]:
    """One token a row, its log-prob under the distribution drawn from, and the support when top-p cut it.

    Args:
      logps: log-probs at ``sampling.temperature`` over the whole vocabulary.
      seeds: a row's seed. See ``draw_tokens``.
      steps: ``t``, the response index of the token to be drawn.
      sampling: options.
      compute: the arithmetic of the renormalisation within a nucleus.

    Returns:
      Tokens, float32 log-probs, and the kept tokens, or None when nothing was cut.

    >>> logps = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    >>> token, logp, kept = sample(logps, jnp.array([7], jnp.uint32), jnp.array([0]), SamplingConfig(top_p=0.4))
    >>> print(token, logp, kept)
    [0] [0.] [[ True False False]]
    """
    if sampling.greedy:
        token = jnp.argmax(logps, axis=-1).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32), None
    kept = None
    if sampling.top_p < 1.0:
        kept = nucleus(logps, sampling.top_p)
        logps = restrict_log_probs(logps, kept, compute=compute)
    token = draw_tokens(logps, seeds, steps)
    return token, jnp.take_along_axis(logps, token[:, None], axis=-1)[:, 0], kept
