"""Updates of bfloat16 parameters: exact in expectation, where rounding to the nearest would lose them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trm_jax.train.rounding import apply_updates, round_at_random


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bfloat16 numbers around float32 ``x``, as float64: its upper 16 bits, and the next number from zero."""
    bits = x.view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64), (bits + np.uint32(0x10000)).view(np.float32).astype(np.float64)


def test_it_goes_to_one_of_the_two_neighbours_with_the_right_mean():
    x = np.array([1.0 + 2**-9, -0.3, 3.1e-5, 0.1, -7.77], np.float32)
    keys = jax.random.split(jax.random.key(1), 4000)
    drawn = np.asarray(jax.vmap(lambda key: round_at_random(jnp.asarray(x), key))(keys), np.float64)
    inner, outer = neighbours(x)
    assert ((drawn == inner) | (drawn == outer)).all()
    share = (x - inner) / (outer - inner)
    assert share[0] == 0.25  # 1 + 2⁻⁹ lies a quarter of the way from 1 to 1 + 2⁻⁷
    # Five standard deviations of a share over 4,000 draws: 5 · 0.5 / √4000 = 0.04.
    np.testing.assert_allclose((drawn == outer).mean(axis=0), share, atol=0.04)


def test_updates_too_small_for_bfloat16_add_up():
    params = {"w": jnp.full((2000,), 1.0, jnp.bfloat16)}
    step = jax.jit(apply_updates)
    for version in range(64):
        params = step(params, {"w": jnp.full((2000,), -(2.0**-12))}, jnp.int32(version))
    # 64 · 2⁻¹² = 2⁻⁶, four distances of 2⁻⁸ below 1; rounding to the nearest would still be at 1.
    # A step moves with probability 1/16 by 2⁻⁸: sd 2⁻⁸ √(64/16) over √2000 is 1.7e-4; five of it.
    np.testing.assert_allclose(np.asarray(params["w"], np.float64).mean(), 1 - 2.0**-6, atol=9e-4)
    assert jnp.bfloat16(1.0) - jnp.bfloat16(2.0**-12) == 1


def test_the_draw_follows_from_version_and_place_and_float32_is_plain_addition():
    rng = np.random.default_rng(0)
    x, u = (jnp.asarray(rng.standard_normal(300), jnp.float32) for _ in range(2))
    params, updates = {"a": x.astype(jnp.bfloat16), "b": x.astype(jnp.bfloat16), "c": x}, {"a": u, "b": u, "c": u}

    def moved(version):
        return jax.tree.map(np.asarray, apply_updates(params, updates, jnp.int32(version)))

    first, again, later = moved(3), moved(3), moved(4)
    assert first["a"].tobytes() == again["a"].tobytes()
    assert first["a"].tobytes() != later["a"].tobytes()
    assert first["a"].tobytes() != first["b"].tobytes()
    np.testing.assert_array_equal(first["c"], np.asarray(x) + np.asarray(u))
    assert first["a"].dtype == jnp.bfloat16
    assert first["c"].dtype == np.float32
