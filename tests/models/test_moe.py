"""The mixture: its forms agree, cost what the chosen experts cost, and say how near each choice was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from trm_jax.models import ComputeConfig, TransformerConfig, make_mesh
from trm_jax.models._moe import mixture, route

WIDTH, FF, EXPERTS, K, ROWS = 32, 24, 16, 2, 512
CONFIG = TransformerConfig(vocab_size=13, d_model=WIDTH, d_ff=FF, n_experts=EXPERTS, experts_per_token=K)


def parameters(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"router": (WIDTH, EXPERTS), "gate": (EXPERTS, WIDTH, FF), "up": (EXPERTS, WIDTH, FF)}
    shapes["down"] = (EXPERTS, FF, WIDTH)
    return {k: (rng.standard_normal(s) / np.sqrt(s[-2])).astype(np.float32) for k, s in shapes.items()}


def rows(count: int = ROWS, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def matmul_flops(jaxpr) -> int:
    """Floating point operations of all matrix products, those of loops times their length."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [v for v in equation.params.values() if isinstance(v, jax.extend.core.ClosedJaxpr)]
        inner = [v.jaxpr for v in inner] + [v for v in equation.params.values() if isinstance(v, jax.extend.core.Jaxpr)]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(matmul_flops(part) for part in inner)
        assert equation.primitive.name != "while"  # of unknown length
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * int(np.prod([left[i] for i in contracted]))
    return total


def flops(function, *args) -> int:
    return matmul_flops(jax.make_jaxpr(function)(*args).jaxpr)


def run(x, block, experts, **options):
    return mixture(x, None, None, block, CONFIG, ComputeConfig(experts=experts, **options))[0]


def test_the_count_of_operations_is_the_compilers_where_there_is_no_loop():
    args = rows(), parameters()
    ours = flops(lambda x, block: run(x, block, "dense"), *args)
    theirs = jax.jit(lambda x, block: run(x, block, "dense")).lower(*args).compile().cost_analysis()["flops"]
    assert ours < theirs < 1.1 * ours  # the compiler also counts the element-wise work


def test_the_forward_pass_costs_the_chosen_experts_and_the_backward_twice_that():
    x, block = rows(4096), parameters()
    chosen = 4096 * K * 3 * 2 * WIDTH * FF
    router = 4096 * 2 * WIDTH * EXPERTS
    forward = flops(lambda x, block: run(x, block, "blocked"), x, block) - router
    assert chosen <= forward <= 1.13 * chosen  # tiles are padded, by an eighth at most
    assert flops(lambda x, block: run(x, block, "dense"), x, block) - router == EXPERTS // K * chosen

    def loss(x, block):
        return jnp.sum(run(x, block, "blocked"))

    both = flops(jax.grad(loss, argnums=(0, 1)), x, block) - 3 * router
    assert both <= 1.13 * 3 * chosen


@pytest.mark.parametrize("experts", ["blocked", "ragged_dot"])
def test_all_forms_have_the_values_and_gradients_of_the_dense_one(experts, quick_jit):
    x, block = rows(50), parameters()
    readout = rows(50, seed=2)

    def found(form):
        def value(x, block):
            out = run(x, block, form)
            return jnp.sum(out * readout), out

        return quick_jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))(x, block)

    expected = found("dense")
    assert float(jnp.std(expected[0][1])) > 0.1
    # The same products, summed in another order: float32 rounding of sums over 50 rows.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found(experts), expected)


def test_one_expert_may_get_everything_and_the_others_nothing(quick_jit):
    block = parameters()
    block["router"] = np.zeros_like(block["router"])
    block["router"][:, 5], block["router"][:, 9] = 3.0, 2.0
    x = np.abs(rows(40))  # the logits of experts 5 and 9 are above all others
    out, chosen, _ = quick_jit(lambda x, b: mixture(x, None, None, b, CONFIG, ComputeConfig()))(x, block)
    assert (np.asarray(chosen) == [5, 9]).all()
    np.testing.assert_allclose(out, run(x, block, "dense"), atol=2e-5)


def test_weights_and_margins_by_hand():
    """Logits 3, 1, 2, 0 and two experts a token: 0 and 2 run, and 2 is ahead of 1 by 1."""
    config = TransformerConfig(vocab_size=13, d_model=1, n_experts=4, experts_per_token=2, expert_scale=0.5)
    block = {"router": jnp.array([[3.0, 1.0, 2.0, 0.0]])}
    one = jnp.ones((1, 1))
    chosen, weights, margin = route(one, None, None, block, config)
    assert chosen.tolist() == [[0, 2]]
    np.testing.assert_allclose(margin, [1.0], rtol=1e-6)
    e = np.exp([3.0, 2.0])
    np.testing.assert_allclose(weights[0], 0.5 * e / e.sum(), rtol=1e-6)
    apart = TransformerConfig(
        vocab_size=13, d_model=1, n_experts=4, experts_per_token=2, expert_scale=0.5, normalize_experts=False
    )
    np.testing.assert_allclose(
        route(one, None, None, block, apart)[1][0], 0.5 * e / np.exp([3.0, 1.0, 2.0, 0.0]).sum(), rtol=1e-6
    )
    everyone = TransformerConfig(vocab_size=13, d_model=1, n_experts=4, experts_per_token=4)
    assert route(one, None, None, block, everyone)[2].tolist() == [np.inf]


def test_a_disturbance_below_half_the_margin_flips_nothing():
    x, block = rows(200), parameters()
    chosen, _, margin = route(x, None, None, block, CONFIG)
    signs = np.random.default_rng(3).choice([-1.0, 1.0], (200, EXPERTS)).astype(np.float32)
    jitter = 0.499 * np.asarray(margin)[:, None] * signs
    disturbed, _, _ = route(x, jnp.asarray(jitter), None, block, CONFIG)
    np.testing.assert_array_equal(np.sort(disturbed), np.sort(chosen))
    worst = (
        np.where((np.arange(EXPERTS) == np.asarray(chosen)[:, -1:]), -1.0, 1.0) * 0.501 * np.asarray(margin)[:, None]
    )
    flipped, _, _ = route(x, jnp.asarray(worst, jnp.float32), None, block, CONFIG)
    assert np.any(np.sort(flipped) != np.sort(chosen), axis=1).all()


def test_on_a_mesh_every_device_sorts_its_own_tokens(quick_jit):
    x, block, readout = rows(48), parameters(), rows(48, seed=2)
    mesh = make_mesh(data=4)

    def loss(x, block):
        return jnp.sum(run(x, block, None) * readout)

    expected, grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, block)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        found, found_grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(split, block)
        split_cost, odd_cost = (flops(lambda x: run(x, block, None), rows(count)) for count in (4096, 4095))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # Sums over 48 positions, made in four parts: a few float32 roundings of terms of order ten.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5), found_grads, grads)
    whole_cost, router = flops(lambda x: run(x, block, None), rows(4096)), 4096 * 2 * WIDTH * EXPERTS
    assert split_cost - router < 0.3 * (whole_cost - router)  # of one device in four, whose tiles are padded too
    assert odd_cost > 0.9 * whole_cost  # rows that do not divide are not split


def test_bfloat16_experts_have_gradients_on_a_mesh(quick_jit):
    """The sum of their gradients over one of a mesh's axes is what the CPU's compiler cannot make in bfloat16."""
    x, readout = jnp.asarray(rows(48)), rows(48, seed=2)
    block = {name: jnp.asarray(value, jnp.bfloat16) for name, value in parameters().items()}

    def loss(block):
        return jnp.sum(run(x, block, None) * readout)

    expected = quick_jit(jax.grad(loss))(block)
    with jax.set_mesh(make_mesh(data=2, tensor=2)):
        found = quick_jit(jax.grad(loss))(block)
    for name, grad in found.items():
        assert grad.dtype == jnp.bfloat16
        # Each is rounded to eight bits; near a rounding's edge, sums in another order go to the neighbour.
        np.testing.assert_allclose(
            np.asarray(grad, np.float32), np.asarray(expected[name], np.float32), rtol=2**-7, atol=1e-4, err_msg=name
        )
