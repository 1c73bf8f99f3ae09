"""Full-vocabulary divergences straight from the hidden states and heads of two policies."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, UInt8

from trm_jax.numerics import AnyArray
from trm_jax.ops._choice import choose
from trm_jax.ops._dispatch import AnyMesh, Implementation
from trm_jax.ops._head import Head, as_head, check_operands, check_scaling, legal_tokens
from trm_jax.ops._sharding import Layout, layout_of, with_automatic_axes
from trm_jax.ops.linear_vocab_divergence._fused import Plan, check_blocks, linear_vocab_divergence_fused
from trm_jax.ops.linear_vocab_divergence._reference import linear_vocab_divergence_reference
from trm_jax.types import VocabDivergence

__all__ = ["linear_vocab_divergence"]


def linear_vocab_divergence(
    policy_hidden: Float[AnyArray, "N D1"],
    policy_head: Float[AnyArray, "V D1"],
    rollout_hidden: Float[AnyArray, "N D2"],
    rollout_head: Float[AnyArray, "V D2"] | Int8[AnyArray, "V D2"],
    tokens: Int[AnyArray, " N"],
    *,
    temperature: float = 1.0,
    logit_soft_cap: float | None = None,
    policy_bias: Float[AnyArray, " V"] | None = None,
    rollout_bias: Float[AnyArray, " V"] | None = None,
    rollout_head_scale: Float[AnyArray, " V"] | None = None,
    with_tv: bool = True,
    support: UInt8[AnyArray, "N V8"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    mesh: AnyMesh | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axis: str | tuple[str, ...] | None = None,
) -> VocabDivergence:
    """KL(π_roll ‖ π_θ), total variation, entropies and token log-probs, never holding ``[N, V]`` (TRM 2.3).

    Each policy is ``softmax(z)`` of ``z = cap(hidden · headᵀ + bias) / temperature``, with
    ``cap(s) = logit_soft_cap · tanh(s / logit_soft_cap)``, in Gemma's order. Divergences and log-probs are constants
    for the gradient; ``linear_logps`` is the differentiable one. A KL of 1e-7 keeps 1% relative accuracy
    whichever token the row has; from 1e-5 up, and TV from 1e-6 up, 0.1%, of the logits as float32 has them: a soft cap
    rounds each by 1e-7 of the cap. The kernel's TV may be off by 4e-7 where the unlikely tokens share one logit, and by
    5% where the policy all but bans a rare token, by 30 nats and more, through its row of the head (ban by a bias or a
    support); its KL by 0.5% where one tile of many has the mass and its tokens, or a likely one, have moved by about
    0.1; its entropies by 4e-6 nats. Logits lie within 1e29.

    With a mesh, each device holds its rows of the heads and its tokens, and what travels is 48 to 68 bytes a token of
    statistics, for heads sharded over the vocabulary alone: one whose D is sharded too (FSDP) is gathered over that
    axis, as for any product. Without a mesh, operands whose types say over which (explicit) axes their rows are sharded
    are treated alike; others the compiler shards as it sees fit.

    ``[B, T, D]`` is flattened by the caller: under ``jax.vmap`` a chunk of each of the B rows is held at once.

    Args:
      policy_hidden: ``[N, D]`` hidden states of the training model, float32 or bfloat16.
      policy_head: ``[V, D]`` its head. A ``[D, V]`` kernel is refused by its shape, but for ``V = D``, where nothing
        tells it from its transpose. On a CPU the compiler holds a bfloat16 one in float32, whole, beside float32
        ``policy_hidden``; so it does the rollout's.
      rollout_hidden: ``[N, D]`` hidden states from which the engine sampled (another width is allowed).
      rollout_head: ``[V, D]`` the engine's head: float32, bfloat16, or int8 with its scale, which is then widened some
        thousand rows at a time.
      tokens: ``[N]`` sampled ids in ``[0, V)``; another id, as padding has (-1, say), gets NaN log-probs: mask them
        with ``jnp.where``, not by a product. Divergences do not depend on the token.
      temperature: at least 1e-6, static; of both policies.
      logit_soft_cap: from 1e-30 to 1e24, static; of both policies; None for none.
      policy_bias: ``[V]`` added to the policy's logits before the cap; ``-inf`` takes a token (a padding row of the
        head, say, which must be finite) out of its vocabulary. A value of at most -1e29, as masks have, is ``-inf``.
      rollout_bias: likewise of the engine.
      rollout_head_scale: ``[V]`` factor of each row of an int8 ``rollout_head``.
      with_tv: a bool; False leaves ``token_tv`` None; the kernel then saves its second pass.
      support: ``[N, ceil(V/8)]`` bits (``v % 8`` of byte ``v // 8``) of the tokens that truncated sampling left,
        applied to both policies. With a mesh every device makes a copy of its share, 1/32 of one policy's logits.
      chunk_size: tokens whose logits are held at once; 256 on a CPU and 1024 elsewhere when None.
      implementation: ``"reference"`` (full logits), ``"chunked"`` (any device), ``"pallas_tpu"``; None picks the kernel
        on one TPU and on a mesh of them, where its blocks fit, and the chunked form elsewhere. A named one runs or
        raises.
      interpret: run the kernel in Pallas' interpreter, on any platform, slowly.
      mesh: the devices to run on, with axes of any type; operands may lie on them in any way. An abstract mesh wants
        ``jax.set_mesh`` or operands that lie on it. Inside a ``shard_map`` that splits some axes, its mesh. None with a
        ``vocab_axis``: that of ``jax.set_mesh``.
      vocab_axis: mesh axis of the rows of the heads; needed with a mesh, an axis of one device for data parallelism
        alone. It need not divide V, but a head that it does not divide is copied.
      token_axis: mesh axis of the tokens; None where every device holds all of them.

    Returns:
      ``VocabDivergence`` of float32 ``[N]`` arrays, nats. Identical operands give exactly 0; KL is ``+inf`` where the
      rollout can sample a token that the policy cannot; NaN stays in its row.

    Raises:
      ValueError: on shapes, axes, or a temperature, cap or chunk size out of range.
      TypeError: on operands that are neither float32 nor bfloat16, an int8 head without its scale, something else than
        a mesh, axis names or a bool, or a traced temperature, cap or chunk size.
      NotImplementedError: on a kernel that does not run on this platform or with these options.

    >>> import numpy as np
    >>> head = jnp.eye(2)
    >>> out = linear_vocab_divergence(jnp.log(jnp.array([[0.5, 0.5]])), head, jnp.log(jnp.array([[0.25, 0.75]])), head,
    ...                               jnp.array([0]))
    >>> print(np.asarray(out.token_kl, float).round(4), np.asarray(out.token_tv, float).round(4))
    [0.1308] [0.25]
    """
    check_operands("policy_", policy_hidden, policy_head, tokens, support, bias=policy_bias)
    check_operands(
        "rollout_", rollout_hidden, rollout_head, tokens, support, scale=rollout_head_scale, bias=rollout_bias
    )
    if policy_head.shape[0] != rollout_head.shape[0]:
        raise ValueError(
            f"both heads must have one vocabulary, given {policy_head.shape[0]} and {rollout_head.shape[0]} rows: "
            "strip the padding rows of the larger one"
        )
    if not isinstance(with_tv, bool):
        raise TypeError(f"with_tv must be True or False, compiled into the program, given {with_tv!r}")
    scaling = check_scaling(temperature, logit_soft_cap, chunk_size)
    layout = layout_of(mesh, vocab_axis, token_axis)

    hidden = (jnp.asarray(policy_hidden), jnp.asarray(rollout_hidden))
    y, legal = legal_tokens(tokens, policy_head.shape[0])
    shared = policy_head is rollout_head and policy_bias is rollout_bias
    heads: tuple[Head, ...] = (as_head(policy_head, bias=policy_bias),)
    if not shared:
        heads += (as_head(rollout_head, rollout_head_scale, rollout_bias),)
    hidden, heads = jax.lax.stop_gradient((hidden, heads))
    bits = None if support is None else jnp.asarray(support)
    choice = choose(
        "linear_vocab_divergence",
        implementation,
        layout,
        hidden=hidden[0],
        head=heads[0].weight,
        operands=(hidden, heads, y, bits),
        chunk_size=chunk_size,
        interpret=interpret,
        check_blocks=functools.partial(check_blocks, hidden, heads, supported=bits is not None),
    )

    def run(
        layout: Layout | None,
        hidden: tuple[Array, Array],
        heads: tuple[Head, ...],
        y: Array,
        bits: Array | None,
        legal: Array,
    ) -> VocabDivergence:
        if choice.implementation == "reference":
            out = linear_vocab_divergence_reference(
                *(hidden[0], heads[0], hidden[1], heads[-1], y, bits), scaling=scaling, with_tv=with_tv
            )
        else:
            plan = Plan(
                choice.implementation, scaling, with_tv, layout, choice.chunk_size, choice.rows_at_once, interpret
            )
            out = linear_vocab_divergence_fused(plan, *hidden, heads, y, bits)
        logps = (jnp.where(legal, x, jnp.nan) for x in (out.policy_logps, out.rollout_logps))
        return dataclasses.replace(out, **dict(zip(("policy_logps", "rollout_logps"), logps, strict=True)))

    out: VocabDivergence = with_automatic_axes(choice.layout, run, (hidden, heads, y, bits, legal), hidden[0])
    return out
