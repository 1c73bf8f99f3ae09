"""What the backward pass keeps in memory under each policy, and that the gradients stay."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

POLICIES = ["none", "dots", "full"]


@pytest.fixture(scope="module")
def compiled(build, quick_jit):
    """Policy to the compiled gradient, and its arguments."""
    model = build("dense", n_layers=6)
    graphdef, params = nnx.split(model, nnx.Param)
    tokens = np.random.default_rng(0).integers(0, 13, (8, 64)).astype(np.int32)

    def loss(p, t, policy):
        return jnp.sum(nnx.merge(graphdef, p)(t, remat=policy).hidden ** 2)

    @functools.cache
    def one(policy):
        return quick_jit(jax.grad(functools.partial(loss, policy=policy))).lower(params, tokens).compile()

    return one, (params, tokens)


@pytest.mark.slow
def test_each_policy_keeps_less_than_the_one_before(compiled):
    one, _ = compiled
    held = {policy: one(policy).memory_analysis().temp_size_in_bytes for policy in POLICIES}
    assert held["full"] < 0.8 * held["dots"] < 0.8 * 0.8 * held["none"], held


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_gradients_do_not_depend_on_the_policy(compiled, policy):
    one, args = compiled
    # The same sums over 512 positions, fused differently.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), one(policy)(*args), one("none")(*args)
    )


def test_true_is_full_and_an_unknown_policy_is_refused(build):
    model, tokens = build("dense"), jnp.zeros((1, 4), jnp.int32)

    def program(remat):
        return str(jax.make_jaxpr(lambda t: model(t, remat=remat).hidden)(tokens))

    assert program(True) == program("full") != program("none") == program(False)
    with pytest.raises(ValueError, match="remat='most': choose one of none, full, dots"):
        model(tokens, remat="most")
