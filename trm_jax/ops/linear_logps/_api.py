"""Log-probs of given tokens straight from hidden states and a head."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Float, Int, UInt8

from trm_jax.checks import in_range
from trm_jax.numerics import AnyArray
from trm_jax.ops._common import Implementation, check_operands, choose_implementation, default_chunk_size
from trm_jax.ops.linear_logps._chunked import linear_logps_chunked
from trm_jax.ops.linear_logps._reference import linear_logps_reference
from trm_jax.ops.linear_logps._types import LinearLogps

__all__ = ["linear_logps"]


def linear_logps(
    hidden: Float[AnyArray, "N D"],
    head: Float[AnyArray, "V D"],
    tokens: Int[AnyArray, " N"],
    *,
    temperature: float = 1.0,
    support: UInt8[AnyArray, "N V8"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> LinearLogps:
    """``log softmax(hidden · headᵀ / temperature)[tokens]`` with normaliser and entropy, never holding ``[N, V]``.

    Differentiable (reverse mode) in ``hidden`` and ``head``, through all three outputs. Products are accumulated in
    float32, the head gradient too.

    Args:
      hidden: ``[N, D]`` final hidden states, float32 or bfloat16.
      head: ``[V, D]`` row-major, as Hugging Face stores ``lm_head`` and tied embeddings.
      tokens: ``[N]`` ids in ``[0, V)``.
      temperature: positive, static.
      support: ``[N, ceil(V/8)]`` bits (``v % 8`` of byte ``v // 8``) of the tokens that truncated sampling left;
        log-prob, normaliser and entropy are those of the policy restricted to them.
      chunk_size: tokens whose logits are held at once; 128 on a CPU and 1024 elsewhere when None.
      implementation: ``"reference"`` (full logits), ``"chunked"``, ``"pallas_tpu"``; None picks the best available.

    Returns:
      ``LinearLogps`` of float32 ``[N]`` arrays. A token outside its row's support gives ``-inf`` and zero gradients; a
      row with an empty support gives entropy 0 and zero gradients; NaN stays in its row unless its gradient is asked.

    Raises:
      ValueError: on shapes, a temperature or a chunk size out of range.
      NotImplementedError: on an implementation that this version lacks.

    >>> import numpy as np
    >>> out = linear_logps(jnp.eye(2), jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.array([0, 1]))
    >>> print(np.asarray(out.logps, float).round(4))
    [-0.6931 -1.3133]
    """
    check_operands(hidden, head, tokens, support, temperature)
    in_range("chunk_size", chunk_size, low=1)
    chosen = choose_implementation("linear_logps", implementation)
    h, w, y = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)
    bits = None if support is None else jnp.asarray(support)
    if chosen == "reference":
        return linear_logps_reference(h, w, y, bits, temperature)
    size = chunk_size or default_chunk_size()
    out: LinearLogps = linear_logps_chunked(h, w, y, bits, temperature=float(temperature), chunk_size=int(size))
    return out
