"""From hidden states to log-probabilities with the same arithmetic wherever it is called from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from trm_jax.models._compute import ComputeConfig
from trm_jax.models._quantize import QuantizedArray, dequantize
from trm_jax.models._rowwise import rowwise

__all__ = ["head_distributions", "head_log_probs", "head_token_logps", "restrict_log_probs"]


def _logits(hidden: Array, head: Array | QuantizedArray, compute: ComputeConfig) -> Array:
    """``[N, V]`` float32. What follows is compiled apart from it, so that every caller's softmax has the same bits."""
    if isinstance(head, QuantizedArray):  # stored [D, V], input axis first, as every quantised weight
        weight = dequantize(head, compute.jnp_dtype).T
    else:
        weight = head.astype(compute.jnp_dtype)
    logits = jnp.einsum(
        "nd,vd->nv",
        hidden.astype(compute.jnp_dtype),
        weight,
        precision=compute.precision,
        preferred_element_type=jnp.float32,
    )
    apart: Array = jax.lax.optimization_barrier(logits)
    return apart


def _at_temperature(logits: Array, temperature: Array) -> Array:
    return jax.nn.log_softmax(logits / _filled(temperature)[:, None], axis=-1)


def _filled(temperature: Array) -> Array:
    """1 for the rows that pad a tile: a division by their 0 would reach the gradient of the head as NaN."""
    return jnp.where(temperature > 0, temperature, 1.0)


def _rows_of(temperature: float | Array, hidden: Array) -> Array:
    """A temperature a row: as an operand, so that a division has the same bits wherever the temperature comes from."""
    return jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), hidden.shape[:1])


def _restrict(logps: Array, kept: Array) -> Array:
    inside = jnp.where(kept, logps, -jnp.inf)
    return inside - jax.nn.logsumexp(inside, axis=-1, keepdims=True)


def head_log_probs(
    hidden: Float[Array, "N D"],
    head: Array | QuantizedArray,
    *,
    temperature: float | Float[Array, " N"],
    compute: ComputeConfig,
) -> Float[Array, "N V"]:
    """Log-probs of the whole vocabulary for a few positions: what a sampler needs.

    Args:
      hidden: final hidden states.
      head: ``[V, D]``, or quantised as ``[D, V]``.
      temperature: logits are divided by it, one for all rows or one a row; above 0.
      compute: the arithmetic.

    Returns:
      ``log softmax(hidden · headᵀ / temperature)``, float32.

    >>> logps = head_log_probs(jnp.array([[2.0, 0.0]]), jnp.eye(2), temperature=0.5, compute=ComputeConfig())
    >>> print([f"{p:.4f}" for p in jnp.exp(logps[0])])
    ['0.9820', '0.0180']
    """

    def fn(h: Array, t: Array, w: Array | QuantizedArray) -> Array:
        return _at_temperature(_logits(h, w, compute), t)

    out: Array = rowwise(fn, compute, (hidden, _rows_of(temperature, hidden)), (head,))
    return out


def head_distributions(
    hidden: Float[Array, "N D"],
    head: Array | QuantizedArray,
    *,
    temperature: Float[Array, " N"],
    compute: ComputeConfig,
) -> tuple[Float[Array, "N V"], Float[Array, "N V"], Float[Array, " N"]]:
    """What an engine that records both needs of one product with the head.

    Args:
      hidden: final hidden states.
      head: ``[V, D]``, or quantised as ``[D, V]``.
      temperature: one a row; above 0.
      compute: the arithmetic.

    Returns:
      Log-probs at each row's temperature and at temperature 1, each bitwise those of ``head_log_probs``, and
      ``log Σ exp(logits)`` at temperature 1; float32. Where every temperature is 1, there is one softmax, not two.

    >>> scaled, model, lse = head_distributions(
    ...     jnp.array([[2.0, 0.0]]), jnp.eye(2), temperature=jnp.array([0.5]), compute=ComputeConfig()
    ... )
    >>> print([f"{x:.4f}" for x in (jnp.exp(scaled[0, 0]), jnp.exp(model[0, 0]), lse[0])])
    ['0.9820', '0.8808', '2.1269']
    """

    def fn(h: Array, t: Array, w: Array | QuantizedArray) -> tuple[Array, Array, Array]:
        logits = _logits(h, w, compute)
        model = jax.lax.optimization_barrier(_at_temperature(logits, jnp.ones_like(t)))
        # The largest log-prob is 0 - log Σ exp(logit - top): this difference is top + log Σ exp(logit - top).
        lse = jnp.max(logits, axis=-1) - jnp.max(model, axis=-1)
        scaled = jax.lax.cond(jnp.all(_filled(t) == 1), lambda: model, lambda: _at_temperature(logits, t))
        return scaled, model, lse

    out: tuple[Array, Array, Array] = rowwise(fn, compute, (hidden, _rows_of(temperature, hidden)), (head,))
    return out


def restrict_log_probs(
    logps: Float[Array, "N V"], kept: Bool[Array, "N V"], *, compute: ComputeConfig
) -> Float[Array, "N V"]:
    """Log-probs within a support: ``logps - log Σ_kept exp(logps)`` on kept tokens, ``-inf`` elsewhere.

    Args:
      logps: log-probs of the whole vocabulary.
      kept: True on the tokens of the support; a row without any gives NaN.
      compute: the arithmetic.

    >>> logps = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    >>> inside = restrict_log_probs(logps, jnp.array([[True, True, False]]), compute=ComputeConfig())
    >>> print([f"{p:.3f}" for p in jnp.exp(inside[0])])
    ['0.625', '0.375', '0.000']
    """
    out: Array = rowwise(_restrict, compute, (logps, kept))
    return out


def head_token_logps(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, " N"],
    *,
    temperature: float,
    compute: ComputeConfig,
    support: UInt8[Array, "N V8"] | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Log-prob of the given tokens and the entropy, tile by tile, bitwise equal to ``head_log_probs`` at those tokens.

    The form for ``batch_invariant`` arithmetic; elsewhere ``ops.linear_logps`` is faster. Nothing of size ``N × V`` is
    held beyond one tile in the forward pass.

    Args:
      hidden: final hidden states.
      head: the output head.
      tokens: ids in ``[0, V)``.
      temperature: logits are divided by it; above 0.
      compute: the arithmetic.
      support: bit ``v % 8`` of byte ``v // 8`` says that truncated sampling left token ``v``; both results are then
        those of the distribution within the support, bitwise equal to ``restrict_log_probs``.

    Returns:
      Log-probs and entropies in nats, float32. A token outside its row's support has ``-inf`` and zero gradients.

    >>> hidden, tokens = jnp.eye(2), jnp.array([0, 0])
    >>> logps, entropy = head_token_logps(hidden, jnp.eye(2), tokens, temperature=1.0, compute=ComputeConfig())
    >>> print([f"{x:.4f}" for x in (*logps, *entropy)])
    ['-0.3133', '-1.3133', '0.5822', '0.5822']
    """

    def fn(h: Array, y: Array, t: Array, bits: Array | None, w: Array) -> tuple[Array, Array]:
        logps = jax.lax.optimization_barrier(_at_temperature(_logits(h, w, compute), t))
        if bits is None:
            entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
            return jnp.take_along_axis(logps, y[:, None], axis=-1)[:, 0], entropy
        kept = jnp.unpackbits(bits, axis=-1, count=logps.shape[-1], bitorder="little").astype(bool)
        logps = jax.lax.optimization_barrier(_restrict(logps, kept))
        finite = jnp.where(kept, logps, 0.0)
        entropy = -jnp.sum(jnp.exp(finite) * finite, axis=-1)
        token, legal = (jnp.take_along_axis(x, y[:, None], axis=-1)[:, 0] for x in (finite, kept))
        return jnp.where(legal, token, -jnp.inf), entropy

    out: tuple[Array, Array] = rowwise(fn, compute, (hidden, tokens, _rows_of(temperature, hidden), support), (head,))
    return out
