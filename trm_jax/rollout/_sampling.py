"""Drawing one token for each row, where every row may have options of its own, and the log-prob it was drawn with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8, UInt32

from trm_jax.models import ComputeConfig, restrict_log_probs
from trm_jax.rollout._config import SamplingConfig

__all__ = ["RowSampling", "draw_tokens", "pack_support", "row_support", "sample_rows"]


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

    @classmethod
    def of(cls, sampling: SamplingConfig, rows: int) -> RowSampling:
        """The same options for every row."""
        return cls(
            temperature=jnp.full(rows, sampling.temperature, jnp.float32),
            top_p=jnp.full(rows, sampling.top_p, jnp.float32),
            top_k=jnp.full(rows, sampling.top_k, jnp.int32),
            min_p=jnp.full(rows, sampling.min_p, jnp.float32),
            greedy=jnp.full(rows, sampling.greedy, bool),
        )

    @property
    def cuts(self) -> Bool[Array, " N"]:
        """Rows whose support is cut, and must be recorded."""
        return ~self.greedy & ((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0))

    def where(self, used: Bool[Array, " N"]) -> RowSampling:
        """The cheapest options for the rows whose draw nobody uses."""
        return dataclasses.replace(self, greedy=self.greedy | ~used, temperature=jnp.where(used, self.temperature, 1.0))


def row_support(logps: Float[Array, "N V"], rows: RowSampling) -> Bool[Array, "N V"]:
    """The tokens each row may draw: min-p, then top-k, then top-p of what these two left; never empty.

    Top-p keeps the smallest set of most likely tokens whose mass reaches it (Holtzman et al. 2020). Of equally likely
    tokens the lower id goes first. The mass is a float32 sum: where it meets ``top_p`` to the last bit, one more token
    may stay.

    Args:
      logps: log-probs of the whole vocabulary at the rows' temperatures.
      rows: options.

    >>> rows = RowSampling.of(SamplingConfig(top_p=0.7, top_k=2), 1)
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


def sample_rows(
    logps: Float[Array, "N V"],
    seeds: UInt32[Array, " N"],
    steps: Int[Array, " N"],
    rows: RowSampling,
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
) -> tuple[Int32[Array, " N"], Float[Array, " N"], UInt8[Array, "N V8"]]:
    """One token a row and its log-prob under the distribution that the row was drawn from.

    The sort that a cut support needs runs only when some row has one.

    Args:
      logps: log-probs of the whole vocabulary at the rows' temperatures, float32.
      seeds: a row's seed. See ``draw_tokens``.
      steps: ``t``, the response index of the token to be drawn.
      rows: options.
      compute: the arithmetic of the renormalisation within a support.

    Returns:
      Tokens, float32 log-probs (0 for a greedy row, that of a point mass) and the support, one bit a token (all set
      where nothing was cut).

    >>> rows = RowSampling.of(SamplingConfig(top_p=0.4), 1)
    >>> token, logp, kept = sample_rows(
    ...     jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([7], jnp.uint32), jnp.array([0]), rows
    ... )
    >>> print(token, logp, kept)
    [0] [0.] [[1]]
    """
    cuts = rows.cuts

    def restrict(logps: Array) -> tuple[Array, Array]:
        kept = row_support(logps, rows) | ~cuts[:, None]
        inside = restrict_log_probs(logps, kept, compute=compute)
        return jnp.where(cuts[:, None], inside, logps), pack_support(kept)

    def whole(logps: Array) -> tuple[Array, Array]:
        return logps, pack_support(jnp.ones_like(logps, bool))

    drawn_from, support = jax.lax.cond(jnp.any(cuts), restrict, whole, logps)

    drawn = draw_tokens(drawn_from, seeds, steps)
    token = jnp.where(rows.greedy, jnp.argmax(logps, axis=-1), drawn).astype(jnp.int32)
    logp = jnp.take_along_axis(drawn_from, token[:, None], axis=-1)[:, 0]
    return token, jnp.where(rows.greedy & ~jnp.isnan(logp), 0.0, logp), support
