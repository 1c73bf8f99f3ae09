"""Log-probs from hidden states: against float64, within a support, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trm_jax.models import (
    ComputeConfig,
    dequantize,
    head_distributions,
    head_log_probs,
    head_token_logps,
    quantize,
    restrict_log_probs,
)

PLAIN, TILED = ComputeConfig(), ComputeConfig(batch_invariant=True, row_tile=4)


def log_softmax64(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def states() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    draw = rng.standard_normal
    return draw((6, 16)).astype(np.float32), draw((11, 16)).astype(np.float32), rng.integers(0, 11, 6)


@pytest.mark.parametrize("compute", [PLAIN, TILED])
@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
def test_log_probs_are_those_of_float64(states, compute, temperature):
    hidden, head, tokens = states
    expected = log_softmax64(hidden.astype(np.float64) @ head.T.astype(np.float64) / temperature)
    found = head_log_probs(hidden, head, temperature=temperature, compute=compute)
    # Logits reach 30 at temperature 1/4: 16 products and a sum in float32, 6e-8 of the logit each.
    np.testing.assert_allclose(found, expected, atol=1e-5 / temperature)
    logps, entropy = head_token_logps(hidden, head, tokens, temperature=temperature, compute=compute)
    np.testing.assert_allclose(logps, expected[np.arange(6), tokens], atol=1e-5 / temperature)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(-1), atol=1e-5 / temperature)
    assert found.dtype == logps.dtype == jnp.float32


@pytest.mark.parametrize("compute", [PLAIN, TILED])
def test_a_temperature_a_row_and_the_log_sum_exp(states, compute):
    hidden, head, _ = states
    temperature = np.array([1.0, 0.25, 3.0, 1.0, 0.7, 1.0], np.float32)
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    scaled, model, lse = jax.jit(lambda t: head_distributions(hidden, head, temperature=t, compute=compute))(
        temperature
    )
    np.testing.assert_allclose(scaled, log_softmax64(logits / temperature[:, None]), atol=4e-5)  # as above, at 1/4
    np.testing.assert_allclose(model, log_softmax64(logits), atol=1e-5)
    top = logits.max(-1, keepdims=True)
    np.testing.assert_allclose(lse, top[:, 0] + np.log(np.exp(logits - top).sum(-1)), rtol=1e-6)
    assert scaled.dtype == model.dtype == lse.dtype == jnp.float32
    for row, value in enumerate(temperature):  # a row's temperature is that row's alone, and to the bit
        one = jax.jit(lambda v: head_log_probs(hidden, head, temperature=v, compute=compute))(float(value))
        np.testing.assert_array_equal(scaled[row], one[row])
    np.testing.assert_array_equal(
        jax.jit(lambda t: head_log_probs(hidden, head, temperature=t, compute=compute))(temperature), scaled
    )
    ones, alone, _ = jax.jit(lambda t: head_distributions(hidden, head, temperature=t, compute=compute))(jnp.ones(6))
    np.testing.assert_array_equal(ones, alone)
    np.testing.assert_array_equal(alone, model)


def test_temperature_by_hand():
    # Logits [2, 0] at temperature 1/2 are [4, 0]: p = 1 / (1 + e^-4) = 0.98201; at temperature 1 it would be 0.88080.
    hidden, head = jnp.array([[2.0, 0.0]]), jnp.eye(2)
    assert float(jnp.exp(head_log_probs(hidden, head, temperature=0.5, compute=PLAIN))[0, 0]) == pytest.approx(
        0.98201, abs=1e-5
    )


def test_bfloat16_rounds_the_inputs_and_sums_in_float32(states):
    hidden, head, _ = states
    compute = ComputeConfig(dtype="bfloat16")
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (hidden, head)]
    expected = log_softmax64(rounded[0] @ rounded[1].T)
    np.testing.assert_allclose(head_log_probs(hidden, head, temperature=1.0, compute=compute), expected, atol=2e-5)


def test_a_quantised_head_multiplies_with_its_dequantised_values(states):
    hidden, head, _ = states
    stored = quantize(jnp.asarray(head.T), "int8")
    expected = log_softmax64(
        hidden.astype(np.float64) @ np.asarray(dequantize(stored, jnp.dtype("float32")), np.float64)
    )
    np.testing.assert_allclose(head_log_probs(hidden, stored, temperature=1.0, compute=PLAIN), expected, atol=1e-5)
    assert np.abs(np.asarray(head_log_probs(hidden, head, temperature=1.0, compute=PLAIN)) - expected).max() > 1e-3


@pytest.mark.parametrize("compute", [PLAIN, TILED])
def test_a_support_renormalises_log_probs_and_entropy(states, compute):
    hidden, head, tokens = states
    rng = np.random.default_rng(0)
    kept = rng.random((6, 11)) < 0.5
    kept[np.arange(6), tokens] = True
    kept[2] = np.arange(11) == tokens[2]  # a nucleus of one token
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    expected = log_softmax64(np.where(kept, logits, -np.inf))
    full = head_log_probs(hidden, head, temperature=1.0, compute=compute)
    np.testing.assert_allclose(restrict_log_probs(full, kept, compute=compute), expected, atol=1e-5)
    packed = np.packbits(kept, axis=1, bitorder="little")
    logps, entropy = head_token_logps(hidden, head, tokens, temperature=1.0, compute=compute, support=packed)
    np.testing.assert_allclose(logps, expected[np.arange(6), tokens], atol=1e-5)
    finite = np.where(kept, expected, 0.0)
    np.testing.assert_allclose(entropy, -(np.exp(finite) * finite).sum(-1), atol=1e-5)
    assert (float(logps[2]), float(entropy[2])) == (0.0, 0.0)


def test_restricted_log_probs_by_hand():
    # p = [.5, .3, .2] on {0, 2}: .5 / .7 and .2 / .7.
    inside = restrict_log_probs(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([[True, False, True]]), compute=PLAIN)
    np.testing.assert_allclose(jnp.exp(inside), [[5 / 7, 0.0, 2 / 7]], rtol=1e-6)


def token_loss(hidden, head, tokens, weights, compute, support):
    logps, entropy = head_token_logps(hidden, head, tokens, temperature=0.8, compute=compute, support=support)
    return jnp.sum(jnp.where(weights != 0, weights * (logps + 0.5 * entropy), 0.0))


@pytest.mark.parametrize("compute", [PLAIN, TILED])
@pytest.mark.parametrize("truncated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_are_those_of_float64_differences(states, compute, truncated):
    hidden, head, tokens = states
    kept = np.random.default_rng(1).random((6, 11)) < (0.6 if truncated else 2.0)
    kept[np.arange(6), tokens] = True
    support = np.packbits(kept, axis=1, bitorder="little") if truncated else None
    weights = np.array([1.0, -2.0, 0.5, 0.0, 1.0, 3.0], np.float32)

    def value(h: np.ndarray, w: np.ndarray) -> float:
        logps = log_softmax64(np.where(kept, h @ w.T / 0.8, -np.inf))
        finite = np.where(kept, logps, 0.0)
        entropy = -(np.exp(finite) * finite).sum(-1)
        return float((weights * (logps[np.arange(6), tokens] + 0.5 * entropy)).sum())

    grads = jax.grad(token_loss, argnums=(0, 1))(
        jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens), weights, compute, support
    )
    wide = (hidden.astype(np.float64), head.astype(np.float64))
    for which, index in [(0, (0, 3)), (0, (1, 15)), (0, (5, 0)), (1, (0, 2)), (1, (int(tokens[1]), 7)), (1, (10, 15))]:
        shifted = [x.copy() for x in wide]
        shifted[which][index] += 1e-5
        above = value(*shifted)
        shifted[which][index] -= 2e-5
        below = value(*shifted)
        np.testing.assert_allclose(grads[which][index], (above - below) / 2e-5, rtol=1e-4, atol=2e-5)
    assert np.all(np.asarray(grads[0])[3] == 0)


@pytest.mark.parametrize("compute", [PLAIN, TILED])
def test_a_token_outside_its_support_has_no_probability_and_no_gradient(states, compute):
    hidden, head, tokens = states
    kept = np.ones((6, 11), bool)
    kept[0, tokens[0]] = False
    kept[1] = False  # an empty support
    support = np.packbits(kept, axis=1, bitorder="little")
    logps, entropy = head_token_logps(hidden, head, tokens, temperature=1.0, compute=compute, support=support)
    assert np.isneginf(np.asarray(logps)[:2]).all()
    assert np.isfinite(np.asarray(logps)[2:]).all()
    assert np.isfinite(np.asarray(entropy)).all()
    assert float(entropy[1]) == 0

    def loss(h, w):
        found, empty = head_token_logps(h, w, tokens, temperature=1.0, compute=compute, support=support)
        return found[0] + found[1] + empty[1]

    for grad in jax.grad(loss, argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(head)):
        assert np.all(np.asarray(grad) == 0)
