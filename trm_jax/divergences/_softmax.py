"""One softmax row from its logits: what log-probs, entropies and comparisons of two are made of."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["Softmax", "softmax_statistics", "take_token"]


class Softmax(NamedTuple):
    """Statistics of one softmax row: enough for log-probs, entropy and expectations.

    Attributes:
      gap: logits less the largest, before the temperature, ``[..., V]``: near 0 exact, where quotients round.
      unnormalised: ``exp(gap / T)``, ``[..., V]``.
      total: its sum, at least 1 (1 for a row without any token), ``[...]``.
      logsumexp: ``[...]``, ``-inf`` for a row without any token.
      entropy: nats, ``[...]``.
      logps: log-prob of the token, ``[...]``; ``-inf`` for a token outside the support.
    """

    gap: Float[Array, "*S V"]
    unnormalised: Float[Array, "*S V"]
    total: Float[Array, "*S"]
    logsumexp: Float[Array, "*S"]
    entropy: Float[Array, "*S"]
    logps: Float[Array, "*S"]


def take_token(values: Array, tokens: Array) -> Array:
    """``values[..., tokens]`` along the last axis; NaN for an id outside it, a negative one too.

    A masked sum: a gather does not say how its result is sharded where the axis is.
    """
    tokens = tokens.astype(jnp.int32) if tokens.dtype.itemsize < 4 else tokens  # or the size would wrap around
    legal = (tokens >= 0) & (tokens < values.shape[-1])
    ids = jnp.where(legal, tokens, 0).astype(jnp.int32)[..., None]
    hit = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1) == ids
    return jnp.where(legal, jnp.sum(jnp.where(hit, values, 0.0), axis=-1), jnp.nan)


def softmax_statistics(logits: Float[Array, "*S V"], tokens: Int[Array, "*S"], *, temperature: float = 1.0) -> Softmax:
    """``lse = log Σ_v e^(z_v)``, ``H = lse - Σ_v π_v z_v`` and ``log π(y) = z_y - lse`` of ``π = softmax(z)``.

    ``z = logits / T``.

    The most likely tokens stay out of the sum that is added to 1, so that log-probs and entropies of nearly
    deterministic rows keep their relative accuracy.

    Args:
      logits: ``[..., V]`` float32; ``-inf`` marks tokens outside the support.
      tokens: ``[...]`` token ids in ``[0, V)``.
      temperature: positive.

    Returns:
      ``Softmax``, nats; NaN where a logit is NaN or ``+inf``. A row without any token has ``logsumexp = -inf`` and
      entropy 0.

    >>> out = softmax_statistics(jnp.log(jnp.array([[1.0, 3.0, 0.0]])), jnp.array([1]))
    >>> [round(float(x[0]), 4) for x in (out.logsumexp, out.entropy, out.logps)]  # log 4, H(1/4, 3/4), log 3/4
    [1.3863, 0.5623, -0.2877]
    """
    top = jnp.max(logits, axis=-1, initial=-jnp.inf)
    top = jnp.where(top == jnp.inf, jnp.nan, top)  # a softmax with an infinite logit is none
    empty = top == -jnp.inf
    about = jnp.where(empty, 0.0, top)[..., None]
    gap = jnp.where(logits == about, 0.0, logits - about)
    shifted = gap / temperature
    unnormalised = jnp.exp(shifted)
    at_top = shifted == 0.0
    rest = jnp.sum(jnp.where(at_top, 0.0, unnormalised), axis=-1)
    log_total = jnp.log1p(jnp.where(empty, 0.0, rest + (jnp.sum(at_top, axis=-1, dtype=jnp.float32) - 1.0)))
    total = jnp.exp(log_total)
    moment = jnp.sum(jnp.where(unnormalised > 0, unnormalised * shifted, 0.0 * unnormalised), axis=-1)
    return Softmax(
        gap=gap,
        unnormalised=unnormalised,
        total=total,
        logsumexp=jnp.where(empty, -jnp.inf, top / temperature + log_total),
        entropy=log_total - moment / total,
        logps=take_token(shifted, tokens) - log_total,
    )
