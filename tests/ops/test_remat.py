"""Under ``jax.checkpoint``, and in the derivative of a loop: none of the operators' own products are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from trm_jax import ops

N, D, V = 64, 4, 512
CHUNKED: dict[str, Any] = {"implementation": "chunked", "chunk_size": 8}
MESH = {"vocab_axis": "tensor", "token_axis": "data"}
FORMS = [
    pytest.param(CHUNKED, id="chunked"),
    pytest.param(CHUNKED | MESH, id="mesh", marks=pytest.mark.slow),
    pytest.param({"implementation": "reference"}, id="reference", marks=pytest.mark.slow),
]
POLICIES = ["dots_saveable", "dots_with_no_batch_dims_saveable"]


def log_probs(hidden: jax.Array, head: jax.Array, given: dict[str, Any], **options: Any) -> jax.Array:
    out = ops.linear_logps(jnp.tanh(hidden), head, given["tokens"], support=given["support"], **options)
    return jnp.sum(jnp.exp(out.logps) + out.entropy)


def weighted(hidden: jax.Array, head: jax.Array, given: dict[str, Any], **options: Any) -> jax.Array:
    """By a divergence, of states that have a gradient of their own."""
    states = jnp.tanh(hidden)
    out = ops.linear_vocab_divergence(states, head, given["rollout_hidden"], given["head"], given["tokens"], **options)
    return jnp.sum(states * jnp.exp(-out.token_kl - out.token_tv)[:, None])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", [log_probs, weighted])
def test_no_logits_are_saved(
    loss: Callable[..., jax.Array],
    policy: str,
    form: dict[str, Any],
    operands: Callable[..., dict[str, Any]],
) -> None:
    given = operands(N, D, V)
    if "vocab_axis" in form:
        form = form | {"mesh": jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)}

    def run(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return loss(hidden, head, given, **form)

    args = jnp.asarray(given["hidden"]), jnp.asarray(given["head"])
    value, pull = jax.vjp(jax.checkpoint(run, policy=getattr(jax.checkpoint_policies, policy)), *args)
    saved = [x.shape for x in jax.tree.leaves(pull)]
    assert saved, "the pullback is a pytree of what it keeps"
    # Operands are 2,304 numbers, the logits of one policy 32,768.
    assert sum(map(np.prod, saved)) < N * V / 2, saved
    want, whole = jax.vjp(run, *args)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, expected in zip(pull(jnp.ones_like(value)), whole(jnp.ones_like(value)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)  # the same sums, compiled twice


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("loss", [log_probs, weighted])
def test_a_loop_over_a_constant_rollout_keeps_no_logits(
    loss: Callable[..., jax.Array], form: dict[str, Any], operands: Callable[..., dict[str, Any]]
) -> None:
    """A derivative of a loop computes what no turn changes once, ahead of it: never the rollout's logits."""
    given = operands(N, D, V)
    if "vocab_axis" in form:
        form = form | {"mesh": jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)}
    epochs = jnp.stack([jnp.asarray(given["hidden"]) * scale for scale in (1.0, 0.9, 0.8)])

    def looped(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, h: (total + loss(h, head, given, **form), None), 0.0, hidden)[0]

    def unrolled(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return sum(loss(h, head, given, **form) for h in hidden)

    args = epochs, jnp.asarray(given["head"])
    jaxpr = jax.make_jaxpr(jax.grad(looped, (0, 1)))(*args)
    made = [np.prod(v.aval.shape) for e in jax.tree.leaves(jaxpr.eqns) for v in e.outvars]
    assert max(made) < N * V / 2, max(made)
    for got, want in zip(jax.grad(looped, (0, 1))(*args), jax.grad(unrolled, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # the same sums, compiled twice
