"""Full-vocabulary divergences straight from the hidden states and heads of two policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt8

from trm_jax.checks import in_range
from trm_jax.numerics import AnyArray
from trm_jax.ops._common import Implementation, check_operands, choose_implementation, default_chunk_size
from trm_jax.ops.linear_vocab_divergence._chunked import linear_vocab_divergence_chunked
from trm_jax.ops.linear_vocab_divergence._reference import linear_vocab_divergence_reference
from trm_jax.types import VocabDivergence

__all__ = ["linear_vocab_divergence"]


def linear_vocab_divergence(
    policy_hidden: Float[AnyArray, "N D1"],
    policy_head: Float[AnyArray, "V D1"],
    rollout_hidden: Float[AnyArray, "N D2"],
    rollout_head: Float[AnyArray, "V D2"],
    tokens: Int[AnyArray, " N"],
    *,
    temperature: float = 1.0,
    with_tv: bool = True,
    support: UInt8[AnyArray, "N V8"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> VocabDivergence:
    """KL(π_roll ‖ π_θ), total variation, entropies and token log-probs, never holding ``[N, V]`` (TRM 2.3).

    Divergences and log-probs are constants for the gradient; ``linear_logps`` is the differentiable one.

    Args:
      policy_hidden: ``[N, D]`` hidden states of the training model, float32 or bfloat16.
      policy_head: ``[V, D]`` its head.
      rollout_hidden: ``[N, D]`` hidden states from which the engine sampled (another width is allowed).
      rollout_head: ``[V, D]`` the engine's head, dequantised.
      tokens: ``[N]`` sampled ids in ``[0, V)``.
      temperature: positive, static; of both policies.
      with_tv: False leaves ``token_tv`` None and saves its pass.
      support: ``[N, ceil(V/8)]`` bits (``v % 8`` of byte ``v // 8``) of the tokens that truncated sampling left,
        applied to both policies.
      chunk_size: tokens whose logits are held at once; 128 on a CPU and 1024 elsewhere when None.
      implementation: ``"reference"`` (full logits), ``"chunked"``, ``"pallas_tpu"``; None picks the best available.

    Returns:
      ``VocabDivergence`` of float32 ``[N]`` arrays, nats. Identical operands give exactly 0; NaN stays in its row.

    Raises:
      ValueError: on shapes, a temperature or a chunk size out of range.
      NotImplementedError: on an implementation that this version lacks.

    >>> import numpy as np
    >>> head = jnp.eye(2)
    >>> out = linear_vocab_divergence(jnp.log(jnp.array([[0.5, 0.5]])), head, jnp.log(jnp.array([[0.25, 0.75]])), head,
    ...                               jnp.array([0]))
    >>> print(np.asarray(out.token_kl, float).round(4), np.asarray(out.token_tv, float).round(4))
    [0.1308] [0.25]
    """
    check_operands(policy_hidden, policy_head, tokens, support, temperature)
    check_operands(rollout_hidden, rollout_head, tokens, support, temperature)
    if policy_head.shape[0] != rollout_head.shape[0]:
        raise ValueError(
            f"both heads must have one vocabulary, given {policy_head.shape[0]} and {rollout_head.shape[0]} rows: "
            "strip the padding rows of the larger one"
        )
    in_range("chunk_size", chunk_size, low=1)
    chosen = choose_implementation("linear_vocab_divergence", implementation)
    hp, wp, hr, wr = (
        jax.lax.stop_gradient(jnp.asarray(x)) for x in (policy_hidden, policy_head, rollout_hidden, rollout_head)
    )
    y = jnp.asarray(tokens)
    bits = None if support is None else jnp.asarray(support)
    if chosen == "reference":
        return linear_vocab_divergence_reference(hp, wp, hr, wr, y, bits, temperature=temperature, with_tv=with_tv)
    size = chunk_size or default_chunk_size()
    out: VocabDivergence = linear_vocab_divergence_chunked(
        hp, wp, hr, wr, y, bits, temperature=float(temperature), with_tv=with_tv, chunk_size=int(size)
    )
    return out
