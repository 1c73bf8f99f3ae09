"""From hidden states to log-probabilities with the same arithmetic wherever it is called from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trm_jax.models._config import ComputeConfig
from trm_jax.models._quantize import QuantizedArray, dequantize
from trm_jax.models._rowwise import rowwise

__all__ = ["head_log_probs", "head_token_logps"]


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


def head_log_probs(
    hidden: Float[Array, "N D"], head: Array | QuantizedArray, *, temperature: float, compute: ComputeConfig
) -> Float[Array, "N V"]:
    """Log-probs of the whole vocabulary for a few positions, float32: what a sampler needs."""

    def fn(h: Array, w: Array | QuantizedArray) -> Array:
        return _log_probs(h, w, compute, temperature)

    out: Array = rowwise(fn, compute, (hidden,), (head,))
    return out


def head_token_logps(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, " N"],
    *,
    temperature: float,
    compute: ComputeConfig,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Log-prob of the given tokens and the entropy, tile by tile, bitwise equal to ``head_log_probs`` at those tokens.

    The form for ``batch_invariant`` arithmetic; elsewhere ``ops.linear_logps`` is faster. Nothing of size ``N × V`` is
    held beyond one tile in the forward pass.
    """

    def fn(h: Array, y: Array, w: Array) -> tuple[Array, Array]:
        logps = jax.lax.optimization_barrier(_log_probs(h, w, compute, temperature))
        entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
        return jnp.take_along_axis(logps, y[:, None], axis=-1)[:, 0], entropy

    out: tuple[Array, Array] = rowwise(fn, compute, (hidden, tokens), (head,))
    return out
