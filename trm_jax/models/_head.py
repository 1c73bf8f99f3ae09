"""From hidden states to log-probabilities with the same arithmetic wherever it is called from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from trm_jax.models._compute import ComputeConfig
from trm_jax.models._quantize import QuantizedArray, dequantize
from trm_jax.models._rowwise import rowwise

__all__ = ["head_log_probs", "head_token_logps", "restrict_log_probs"]


def _log_probs(hidden: Array, head: Array | QuantizedArray, compute: ComputeConfig, temperature: float) -> Array:
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
    return jax.nn.log_softmax(logits / temperature, axis=-1)


def _restrict(logps: Array, kept: Array) -> Array:
    inside = jnp.where(kept, logps, -jnp.inf)
    return inside - jax.nn.logsumexp(inside, axis=-1, keepdims=True)


def head_log_probs(
    hidden: Float[Array, "N D"], head: Array | QuantizedArray, *, temperature: float, compute: ComputeConfig
) -> Float[Array, "N V"]:
    """Log-probs of the whole vocabulary for a few positions: what a sampler needs.

    Args:
      hidden: final hidden states.
      head: ``[V, D]``, or quantised as ``[D, V]``.
      temperature: logits are divided by it; above 0.
      compute: the arithmetic.

    Returns:
      ``log softmax(hidden · headᵀ / temperature)``, float32.

    >>> logps = head_log_probs(jnp.array([[2.0, 0.0]]), jnp.eye(2), temperature=0.5, compute=ComputeConfig())
    >>> print([f"{p:.4f}" for p in jnp.exp(logps[0])])
    ['0.9820', '0.0180']
    """

    def fn(h: Array, w: Array | QuantizedArray) -> Array:
        return _log_probs(h, w, compute, temperature)

    out: Array = rowwise(fn, compute, (hidden,), (head,))
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

    def fn(h: Array, y: Array, bits: Array | None, w: Array) -> tuple[Array, Array]:
        logps = jax.lax.optimization_barrier(_log_probs(h, w, compute, temperature))
        if bits is None:
            entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
            return jnp.take_along_axis(logps, y[:, None], axis=-1)[:, 0], entropy
        kept = jnp.unpackbits(bits, axis=-1, count=logps.shape[-1], bitorder="little").astype(bool)
        logps = jax.lax.optimization_barrier(_restrict(logps, kept))
        finite = jnp.where(kept, logps, 0.0)
        entropy = -jnp.sum(jnp.exp(finite) * finite, axis=-1)
        token, legal = (jnp.take_along_axis(x, y[:, None], axis=-1)[:, 0] for x in (finite, kept))
        return jnp.where(legal, token, -jnp.inf), entropy

    out: tuple[Array, Array] = rowwise(fn, compute, (hidden, tokens, support), (head,))
    return out
