"""Log-probs of given tokens straight from hidden states and a head."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from trm_jax.numerics import AnyArray
from trm_jax.ops._choice import choose
from trm_jax.ops._dispatch import AnyMesh, Implementation, placed
from trm_jax.ops._head import Head, as_head, check_operands, check_scaling, legal_tokens
from trm_jax.ops._sharding import Layout, layout_of, with_automatic_axes
from trm_jax.ops.linear_logps._fused import Plan, check_blocks, linear_logps_fused
from trm_jax.ops.linear_logps._reference import linear_logps_reference
from trm_jax.ops.linear_logps._types import LinearLogps

__all__ = ["linear_logps"]


def linear_logps(
    hidden: Float[AnyArray, "N D"],
    head: Float[AnyArray, "V D"],
    tokens: Int[AnyArray, " N"],
    *,
    temperature: float = 1.0,
    logit_soft_cap: float | None = None,
    bias: Float[AnyArray, " V"] | None = None,
    support: UInt8[AnyArray, "N V8"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    mesh: AnyMesh | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    token_axis: str | tuple[str, ...] | None = None,
) -> LinearLogps:
    """Log-softmax of a linear head at given tokens, with normaliser and entropy, never holding ``[N, V]``.

    ``logps = log softmax(z)[tokens]`` of ``z = cap(hidden · headᵀ + bias) / temperature``, with
    ``cap(s) = logit_soft_cap · tanh(s / logit_soft_cap)``, in Gemma's order: the log π of TRM's ratios
    ``ρ = π_θ / π_roll``. Differentiable in reverse mode in ``hidden``, ``head`` and ``bias``, through all three outputs
    (the kernel once, the other forms again: forward over reverse, ``jax.jvp`` of ``jax.grad``, since reverse over
    reverse holds all logits, and so does ``jax.linearize``). Products are accumulated in float32, the head gradient
    too. A gradient knows one rounded ``logsumexp``: of logits that share a large offset, it has lost what the offset
    rounds. ``[B, T, D]`` is flattened by the caller: ``jax.vmap`` holds a chunk of each of the B rows at once, and B
    gradients of the head.

    With a mesh, each device holds its rows of the head and its tokens and the statistics travel: 20 bytes a token
    forward; backward the sum of the hidden states' gradient over ``vocab_axis`` and, where tokens are sharded, the head
    gradient's sum over ``token_axis`` that data parallelism always needs. A head sharded over the vocabulary alone
    never moves; one whose D is sharded too (FSDP) is gathered over that axis, as for any product, and its gradient
    summed whole. Without a mesh, operands whose types say over which (explicit) axes their rows are sharded are treated
    alike. Others the compiler shards as it sees fit: the chunked form then sums over devices chunk by chunk, the hidden
    states' gradient too, so that a head sharded over the vocabulary wants ``mesh``. Inside a caller's own ``shard_map``
    operands are local; one that is the same along an axis along which others differ gets the sum of its gradients.

    Args:
      hidden: ``[N, D]`` final hidden states, float32 or bfloat16.
      head: ``[V, D]`` row-major, float32 or bfloat16, as Hugging Face stores ``lm_head`` and tied embeddings. A
        ``[D, V]`` kernel is refused by its shape, but for ``V = D``, where nothing tells it from its transpose. On a
        CPU the compiler holds a bfloat16 one in float32, whole, for the gradient and beside float32 ``hidden``.
      tokens: ``[N]`` ids in ``[0, V)``; another id, as padding has (-1, say), gets a NaN log-prob and no gradient of
        it: mask with ``jnp.where(mask, logps, 0)``, since ``logps * mask`` stays NaN.
      temperature: at least 1e-6, static.
      logit_soft_cap: from 1e-30 to 1e24, static; None for none.
      bias: ``[V]`` float32 or bfloat16, added to the logits before the cap; ``-inf`` takes a token (a padding row of
        the head, say, which must be finite) out of the vocabulary. A value of at most -1e29, as masks have, is
        ``-inf``, and has no gradient.
      support: ``[N, ceil(V/8)]`` bits (``v % 8`` of byte ``v // 8``) of the tokens that truncated sampling left;
        log-prob, normaliser and entropy are those of the policy restricted to them. With a mesh every device makes a
        copy of its share, 1/32 of its logits.
      chunk_size: tokens whose logits are held at once; 256 on a CPU and 1024 elsewhere when None.
      implementation: ``"reference"`` (full logits), ``"chunked"`` (any device), ``"pallas_tpu"``; None picks the kernel
        on one TPU and on a mesh of them, where its blocks fit, and the chunked form elsewhere. A named one runs or
        raises.
      interpret: run the kernel in Pallas' interpreter, on any platform, slowly.
      mesh: the devices to run on, with axes of any type; operands may lie on them in any way. An abstract mesh wants
        ``jax.set_mesh`` or operands that lie on it. Inside a ``shard_map`` that splits some axes, its mesh. None with a
        ``vocab_axis``: that of ``jax.set_mesh``.
      vocab_axis: mesh axis of the rows of the head; needed with a mesh, an axis of one device for data parallelism
        alone. It need not divide V, but a head that it does not divide is copied, and its gradient gathered.
      token_axis: mesh axis of the tokens; None where every device holds all of them.

    Returns:
      ``LinearLogps`` of float32 ``[N]`` arrays. A token outside its row's support has log-prob ``-inf``, which has no
      gradient (normaliser and entropy keep theirs); a row with an empty support has entropy 0 and no gradient at all;
      NaN stays in its row unless its gradient is asked.

    Raises:
      ValueError: on shapes, axes, or a temperature, cap or chunk size out of range.
      TypeError: on operands that are neither float32 nor bfloat16, something else than a mesh or axis names, or a
        traced temperature, cap or chunk size.
      NotImplementedError: on a kernel that does not run on this platform or with these options, or its second
        derivative.

    >>> import numpy as np
    >>> out = linear_logps(jnp.eye(2), jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.array([0, 1]))
    >>> print(np.asarray(out.logps, float).round(4))
    [-0.6931 -1.3133]
    """
    check_operands("", hidden, head, tokens, support, bias=bias)
    scaling = check_scaling(temperature, logit_soft_cap, chunk_size)
    layout = layout_of(mesh, vocab_axis, token_axis)
    h, (y, legal) = jnp.asarray(hidden), legal_tokens(tokens, head.shape[0])
    w = as_head(head, bias=bias)
    bits = None if support is None else jnp.asarray(support)
    choice = choose(
        "linear_logps",
        implementation,
        layout,
        hidden=h,
        head=w.weight,
        operands=(h, w, y, bits),
        chunk_size=chunk_size,
        interpret=interpret,
        check_blocks=functools.partial(check_blocks, h, w.weight, supported=bits is not None),
    )

    def run(layout: Layout | None, h: Array, w: Head, y: Array, bits: Array | None, legal: Array) -> LinearLogps:
        if choice.implementation == "reference":
            out = linear_logps_reference(h, w, y, bits, scaling)
        else:
            plan = Plan(
                choice.implementation,
                scaling,
                layout,
                choice.chunk_size,
                choice.rows_at_once,
                placed(None if layout is None else layout.mesh),
                interpret,
            )
            out = linear_logps_fused(plan, h, w, y, bits)
        return out._replace(logps=jnp.where(legal, out.logps, jnp.nan))

    out: LinearLogps = with_automatic_axes(choice.layout, run, (h, w, y, bits, legal), h)
    return out
