"""Weight-only quantisation: cases by hand, the error bound, groups and edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.models import dequantize, quantize

FLOAT32 = jnp.dtype("float32")


def test_int8_by_hand():
    # Column 0: scale 2.54 / 127 = 0.02; 2.54 -> 127, -1.0 -> -50, 0.029 -> 1.45 -> 1. Column 1: scale 1 / 127.
    q = quantize(jnp.array([[2.54, 1.0], [-1.0, -1.0], [0.029, 0.5]]), "int8")
    assert q.values.dtype == jnp.int8
    assert q.values.shape == (1, 3, 2)
    assert q.values[0].tolist() == [[127, 127], [-50, -127], [1, 64]]  # 63.5 rounds to even
    np.testing.assert_allclose(q.scales, [[[0.02, 1 / 127]]], rtol=1e-6)
    np.testing.assert_allclose(dequantize(q, FLOAT32)[:, 0], [2.54, -1.0, 0.02], rtol=1e-6)


def test_int4_groups_by_hand():
    # Two groups of two input channels: scales 7 / 7 = 1 and 0.14 / 7 = 0.02.
    q = quantize(jnp.array([[7.0], [-2.6], [0.14], [0.05]]), "int4", group_size=2)
    assert q.values.dtype == jnp.int4
    assert q.values.shape == (2, 2, 1)
    assert q.values.astype(jnp.int32).reshape(-1).tolist() == [7, -3, 7, 2]  # 2.5 rounds to even
    np.testing.assert_allclose(q.scales.reshape(-1), [1.0, 0.02], rtol=1e-6)
    np.testing.assert_allclose(dequantize(q, FLOAT32).reshape(-1), [7.0, -3.0, 0.14, 0.04], rtol=1e-6)


def test_fp8_by_hand():
    # Scale 448 / 448 = 1. e4m3 has 3 bits of mantissa: between 16 and 32 the step is 2, between 1 and 2 it is 1/8.
    q = quantize(jnp.array([[448.0], [17.5], [-1.3], [0.0]]), "fp8")
    assert q.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(dequantize(q, FLOAT32).reshape(-1), [448.0, 18.0, -1.25, 0.0])


@pytest.mark.parametrize(("fmt", "group"), [("int8", None), ("int8", 8), ("int4", 4), ("int4", None)])
def test_the_error_is_at_most_half_a_step(fmt, group):
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((3, 16, 5)) * np.exp(rng.standard_normal((3, 1, 5)))).astype(np.float32)
    q = quantize(jnp.asarray(weight), fmt, group_size=group)
    error = np.abs(np.asarray(dequantize(q, FLOAT32), np.float64) - weight)
    size = group or 16
    # The step of each group, from the definition and not from the stored scale.
    largest = np.abs(weight.reshape(3, 16 // size, size, 5)).max(axis=2, keepdims=True)
    half = np.broadcast_to(largest / {"int8": 127, "int4": 7}[fmt] / 2, (3, 16 // size, size, 5)).reshape(weight.shape)
    assert np.all(error <= half * (1 + 1e-5))
    assert error.max() > half.max() / 4  # the bound is not empty: the format does lose something


def test_fp8_error_is_relative():
    weight = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    error = np.abs(np.asarray(dequantize(quantize(jnp.asarray(weight), "fp8"), FLOAT32)) - weight)
    # Half a unit of a 3-bit mantissa is 1/16 of the value; below 2^-6 of scale, half a subnormal step of 2^-9.
    scale = np.abs(weight).max(axis=0) / 448
    assert np.all(error <= np.maximum(np.abs(weight) / 16, scale * 2.0**-10) * (1 + 1e-5))


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8"])
def test_a_group_of_zeros_stays_zero(fmt):
    weight = jnp.array([[0.0, 1.0], [0.0, -3.0], [2.0, 0.0], [1.0, 0.0]])
    q = quantize(weight, fmt, group_size=2)
    back = np.asarray(dequantize(q, FLOAT32))
    assert np.isfinite(np.asarray(q.scales)).all()
    assert q.scales[0, 0, 0] == q.scales[1, 0, 1] == 1
    np.testing.assert_array_equal(back[[0, 1, 2, 3], [0, 0, 1, 1]], 0.0)


def test_columns_and_leading_axes_do_not_share_scales():
    weight = np.random.default_rng(0).standard_normal((2, 8, 3)).astype(np.float32)
    whole = quantize(jnp.asarray(weight), "int8", group_size=4)
    assert whole.values.shape == (2, 2, 4, 3)
    assert whole.scales.shape == (2, 2, 1, 3)
    for layer in range(2):
        part = quantize(jnp.asarray(weight[layer, 4:, 1:2]), "int8")
        np.testing.assert_array_equal(part.values[0, :, 0], whole.values[layer, 1, :, 1])


@pytest.mark.parametrize("group", [3, 0, 16])
def test_a_group_that_does_not_divide_the_width_is_refused(group):
    with pytest.raises(ValueError, match=rf"group_size={group} must divide the weight's input width 8"):
        quantize(jnp.ones((8, 2)), "int4", group_size=group)


def test_dequantize_casts_plain_arrays_and_rounds_once():
    assert dequantize(jnp.ones((2, 2)), jnp.dtype("bfloat16")).dtype == jnp.bfloat16
    q = quantize(jnp.array([[1.0], [0.3]]), "int4")
    # 2 · (1 / 7) = 0.285714 in float32, then to bfloat16: 0.28515625.
    assert float(dequantize(q, jnp.dtype("bfloat16"))[1, 0]) == 0.28515625


def test_a_quantised_array_is_a_pytree():
    q = quantize(jnp.ones((2, 4, 3)), "int8")
    sliced = jax.tree.map(lambda x: x[1], q)
    np.testing.assert_allclose(dequantize(sliced, FLOAT32), np.ones((4, 3)), rtol=1e-6)
