"""Sampling in which every row has options of its own: what requests of many clients in one batch need."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8, UInt32

from trm_jax.models import ComputeConfig, restrict_log_probs
from trm_jax.rollout import draw_tokens, pack_support

__all__ = ["RowSampling", "row_support", "sample_rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSampling:
    """The distribution each row is drawn from; ``[N]`` each.

    Attributes:
      temperature: logits are divided by it; above 0.
      top_p: nucleus mass in (0, 1]; 1 keeps everything.
      top_k: most likely tokens kept; 0 keeps everything.
      min_p: tokens below ``min_p`` times the largest probability are cut; 0 keeps everything.
      greedy: take the most likely token.
    """

    temperature: Float[Array, " N"]
    top_p: Float[Array, " N"]
    top_k: Int32[Array, " N"]
    min_p: Float[Array, " N"]
    greedy: Bool[Array, " N"]

    @property
    def cuts(self) -> Bool[Array, " N"]:
        """Rows whose support is cut, and must be recorded."""
        return ~self.greedy & ((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0))


def row_support(logps: Float[Array, "N V"], rows: RowSampling) -> Bool[Array, "N V"]:
    """The tokens each row may draw: min-p, then top-k, then top-p of what these two left; never empty.

    Of equally likely tokens the lower id goes first. With top-p alone the result is ``trm_jax.rollout.nucleus``.

    Args:
      logps: log-probs of the whole vocabulary at the rows' temperatures.
      rows: options.

    >>> one = lambda x: jnp.array([x])
    >>> rows = RowSampling(temperature=one(1.0), top_p=one(0.7), top_k=one(2), min_p=one(0.0), greedy=one(False))
    >>> print(row_support(jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]])), rows))
    [[ True  True False False]]
    """
    order = jnp.argsort(-logps, axis=-1, stable=True)
    sorted_logps = jnp.take_along_axis(logps, order, axis=-1)
    rank = jnp.arange(logps.shape[-1])[None, :]
    top_k = jnp.where(rows.top_k > 0, rows.top_k, logps.shape[-1])[:, None]
    left = (rank < top_k) & (sorted_logps >= sorted_logps[:, :1] + jnp.log(rows.min_p)[:, None])
    mass = jnp.cumsum(jnp.where(left, jnp.exp(sorted_logps), 0.0), axis=-1)
    whole = (rows.top_k == 0) & (rows.min_p == 0)  # nothing is cut before top-p: its mass is 1 by definition
    reach = rows.top_p[:, None] * jnp.where(whole[:, None], 1.0, mass[:, -1:])
    before = jnp.concatenate([jnp.zeros_like(mass[:, :1]), mass[:, :-1]], axis=-1)
    enough = (rows.top_p[:, None] < 1) & (before >= reach)
    kept = (left & ~enough).at[:, 0].set(True)
    return jnp.zeros_like(kept).at[jnp.arange(logps.shape[0])[:, None], order].set(kept)


def sample_rows(
    logps: Float[Array, "N V"],
    seeds: UInt32[Array, " N"],
    steps: Int[Array, " N"],
    rows: RowSampling,
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
) -> tuple[Int32[Array, " N"], Float[Array, " N"], UInt8[Array, "N V8"]]:
    """One token a row and its log-prob under the distribution that the row was drawn from.

    The same draw as ``trm_jax.rollout.sample``: token ``t`` of a row comes from ``fold_in(key(seed), t)``. The sort
    that a cut support needs runs only when some row has one.

    Args:
      logps: log-probs of the whole vocabulary at temperature 1, float32.
      seeds: a row's seed.
      steps: ``t``, the response index of the token to be drawn.
      rows: options.
      compute: the arithmetic of the renormalisation within a support.

    Returns:
      Tokens, float32 log-probs (0 for a greedy row, that of a point mass) and the support, one bit a token (all set
      where nothing was cut).

    >>> one = lambda x: jnp.array([x])
    >>> rows = RowSampling(temperature=one(1.0), top_p=one(0.4), top_k=one(0), min_p=one(0.0), greedy=one(False))
    >>> token, logp, kept = sample_rows(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([7], jnp.uint32), one(0), rows)
    >>> print(token, logp, kept)
    [0] [0.] [[1]]
    """
    temperature = rows.temperature[:, None]
    scaled = jnp.where(temperature == 1, logps, jax.nn.log_softmax(logps / temperature, axis=-1))
    cuts = rows.cuts

    def restrict(scaled: Array) -> tuple[Array, Array]:
        kept = row_support(scaled, rows) | ~cuts[:, None]
        inside = restrict_log_probs(scaled, kept, compute=compute)
        return jnp.where(cuts[:, None], inside, scaled), pack_support(kept)

    def whole(scaled: Array) -> tuple[Array, Array]:
        return scaled, pack_support(jnp.ones_like(scaled, bool))

    drawn_from, support = jax.lax.cond(jnp.any(cuts), restrict, whole, scaled)

    drawn = draw_tokens(drawn_from, seeds, steps)
    token = jnp.where(rows.greedy, jnp.argmax(scaled, axis=-1), drawn).astype(jnp.int32)
    logp = jnp.take_along_axis(drawn_from, token[:, None], axis=-1)[:, 0]
    return token, jnp.where(rows.greedy & ~jnp.isnan(logp), 0.0, logp), support
